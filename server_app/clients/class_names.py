"""The class names of nodes that have images of their own, as the server sees them."""

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from server_app.clients.client_info import MAX_CLASSES, ClientInfo
from task.data.class_names import choose_spellings, class_ids, normal_form

log = logging.getLogger(__name__)


class ClassLimit:
    """Refuses clients with which the nodes of a run would hold more than MAX_CLASSES classes together.

    ``planned`` are those of a run that is resumed.
    """

    def __init__(self, planned: Iterable[str]) -> None:
        self._forms = set(map(normal_form, planned))

    def find_excessive(self, clients: Sequence[ClientInfo]) -> dict[int, str]:
        """Take in the classes of clients; returns, by node, why a client would make the classes too many.

        Clients that hold few classes which nobody else has come first, so that one that invents classes keeps no other
        out.
        """
        forms = {client.node: set(map(normal_form, client.classes)) for client in clients}
        holders = Counter(form for of_client in forms.values() for form in of_client)
        reasons = {}
        for client in sorted(clients, key=lambda c: sum(holders[form] == 1 for form in forms[c.node])):
            together = self._forms | forms[client.node]
            number = len(together)
            if number > max(MAX_CLASSES, len(self._forms)):
                said = f"with its {len(client.classes)} classes the run would have {number}, more than {MAX_CLASSES}"
                reasons[client.node] = said
            else:
                self._forms = together
        return reasons


def warn_of_missing_images(clients: Sequence[ClientInfo]) -> None:
    """Name in the log the classes of which no node has held out an image, or of which all images are held out."""
    tested = {normal_form(client.classes[i]) for client in clients for i in np.flatnonzero(client.test_counts)}
    trained = {normal_form(client.classes[i]) for client in clients for i in np.flatnonzero(client.own_counts)}
    names = choose_spellings(name for client in clients for name in client.classes)
    if untested := sorted(name for form, name in names.items() if form not in tested):
        log.warning("no node has held out an image of %s: their accuracy will be unknown", ", ".join(untested))
    if untrained := sorted(names[form] for form in tested - trained):
        log.warning("all images of %s are held out as test images: no node can train on them", ", ".join(untrained))


def small_classes(clients: Sequence[ClientInfo], least: int) -> tuple[list[str], bool]:
    """Names of the classes of which no client has ``least`` images to train on, and whether there are no others."""
    largest = Counter[str]()
    for client in clients:
        largest |= Counter({normal_form(c): int(n) for c, n in zip(client.classes, client.own_counts, strict=True)})
    names = choose_spellings(name for client in clients for name in client.classes)
    return sorted(names[form] for form, n in largest.items() if n < least), max(largest.values(), default=0) < least


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
