"""The evaluation by the clients at the end of a task."""

from collections.abc import Iterable, Sequence

import numpy as np

from server_app.clients.client_info import ClientInfo
from server_app.errors import RunError
from server_app.rounds.reply_checks import InvalidReply, check_counts
from server_app.run_files.results import RoundReport
from server_app.transport.base import Reply, sort_replies
from strategies.base import RoundContext
from task.config.schema import Config
from task.data.images import Dataset


def sum_client_counts(
    replies: Iterable[Reply],
    clients: Sequence[ClientInfo],
    dataset: Dataset,
    context: RoundContext,
    config: Config,
    report: RoundReport,
) -> np.ndarray:
    """Test images of all clients by true and predicted class, int64 [classes, classes].

    The replies to the evaluate messages come from ``clients`` in any order; ``report`` gets bytes and failures.

    Raises:
        RunError: fewer usable answers than the quorum.
    """
    ordered = sort_replies(replies, [client.node for client in clients])
    report.bytes_up += sum(reply.bytes_up for reply in ordered)
    report.bytes_down += sum(reply.bytes_down for reply in ordered)
    counts = []
    all_images = np.bincount(dataset.test_labels, minlength=len(dataset.class_names))
    for client, reply in zip(clients, ordered, strict=True):
        limits = client.count_held_out(dataset.class_names) if config.own_data else all_images
        try:
            counts.append(check_counts(reply, limits, context.seen_classes))
        except InvalidReply as error:
            report.failures.append({"name": client.name, "reason": f"evaluation: {error}"})
    if len(counts) < config.quorum:
        raise RunError(f"{len(counts)} clients evaluated task {context.task + 1}, the quorum is {config.quorum}.")
    return np.sum(counts, axis=0)
