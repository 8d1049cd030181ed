"""The class names of nodes that have images of their own, as the server sees them."""

import logging
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from server_app.clients.client_info import ClientInfo
from task.data.class_names import choose_spellings, class_ids, normal_form

log = logging.getLogger(__name__)


def warn_of_untested(clients: Sequence[ClientInfo]) -> None:
    """Name in the log the classes of which no node has held out an image."""
    tested = {normal_form(client.classes[i]) for client in clients for i in np.flatnonzero(client.test_counts)}
    names = choose_spellings(name for client in clients for name in client.classes)
    untested = sorted(name for form, name in names.items() if form not in tested)
    if untested:
        log.warning("no node has held out an image of %s: their accuracy will be unknown", ", ".join(untested))


def describe_spellings(clients: Sequence[ClientInfo], class_names: Sequence[str]) -> list[str]:
    """A line for each class name that some clients spell otherwise than the run does."""
    spellings: dict[tuple[str, str], list[str]] = defaultdict(list)
    for client in clients:
        for name, class_id in zip(client.classes, class_ids(client.classes, class_names).tolist(), strict=True):
            if class_id >= 0 and name != class_names[class_id]:
                spellings[name, class_names[class_id]].append(client.name)
    return [
        f"class {name!r} of {', '.join(holders)} is taken for {class_name!r}: "
        "they differ only in case, punctuation or white space"
        for (name, class_name), holders in sorted(spellings.items())
    ]
