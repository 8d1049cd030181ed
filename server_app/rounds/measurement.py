"""What is measured after training: the global model on test images, and how far the local models are apart."""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from server_app.clients.client_info import ClientInfo
from server_app.errors import RunError
from server_app.rounds.reply_checks import InvalidReply, check_counts
from server_app.run_files.results import Results, RoundReport
from server_app.secure_aggregation.secure_sum import SecureSum, SpoiledSum, TooFewClients
from server_app.transport.base import Reply, sort_replies
from strategies.base import RoundContext, Update
from task.config.schema import Config
from task.data.images import Dataset
from task.message import Packet
from task.metrics import prototype_distance, response_entropy
from task.models.evaluation import confusion_counts, count_pairs, predict_classes
from task.models.model import Model
from task.scenario.client_data import evaluated_part


def count_on_server(model: Model, dataset: Dataset, context: RoundContext, results: Results) -> np.ndarray:
    """Test images of all seen classes by true and predicted class, int64 [classes, classes].

    ``results`` is told of each whether it was right.
    """
    seen, labels = np.array(context.seen_classes), dataset.test_labels
    tested = dataset.test_positions(seen, np.arange(len(labels)))
    predicted = predict_classes(model, dataset, seen, tested)
    results.note_correct(labels[tested], predicted == labels[tested])
    return count_pairs(labels[tested], predicted, len(dataset.class_names))


def sum_client_counts(
    replies: Iterable[Reply],
    clients: Sequence[ClientInfo],
    dataset: Dataset,
    context: RoundContext,
    config: Config,
    report: RoundReport,
) -> tuple[np.ndarray, set[str]]:
    """Test images of all clients by true and predicted class, int64 [classes, classes]; names of those that answered.

    The replies to the evaluate messages come from ``clients`` in any order; ``report`` gets bytes and failures.

    Raises:
        RunError: fewer usable answers than the quorum.
    """
    ordered = sort_replies(replies, [client.node for client in clients])
    report.bytes_up += sum(reply.bytes_up for reply in ordered)
    report.bytes_down += sum(reply.bytes_down for reply in ordered)
    usable, counts = set[str](), np.zeros((len(dataset.class_names),) * 2, np.int64)
    for client, reply in zip(clients, ordered, strict=True):
        if config.own_data:
            limits = client.by_class_id(client.test_counts, dataset.class_names)
        else:
            part = evaluated_part(client.partition, len(dataset.test_labels), config.num_clients)
            limits = np.bincount(dataset.test_labels[part], minlength=len(dataset.class_names))
        try:
            counts += check_counts(reply, limits, context.seen_classes)
            usable.add(client.name)
        except InvalidReply as error:
            report.failures.append({"name": client.name, "reason": f"evaluation: {error}"})
    if len(usable) < config.quorum:
        raise RunError(f"{len(usable)} clients evaluated task {context.task + 1}, the quorum is {config.quorum}.")
    return counts, usable


def sum_hidden_counts(
    secure_sum: SecureSum, evaluate: Packet, dataset: Dataset, context: RoundContext, config: Config
) -> tuple[np.ndarray, set[str]]:
    """As :func:`sum_client_counts`, where only the sum of the answers is known.

    Raises:
        RunError: too few clients for the sum, or a sum that cannot be right.
    """
    seen = np.array(context.seen_classes)
    try:
        total, survivors = secure_sum.collect("evaluate", evaluate, len(seen) ** 2, config.secure_aggregation_range)
        if len(survivors) < config.quorum:
            raise TooFewClients(f"{len(survivors)} clients evaluated it, the quorum is {config.quorum}")
        counts = np.zeros((len(dataset.class_names),) * 2, np.int64)
        counts[np.ix_(seen, seen)] = np.rint(total).reshape(len(seen), len(seen))
        if config.own_data:
            held = [client.by_class_id(client.test_counts, dataset.class_names) for client in survivors]
            limits = np.sum(held, axis=0)
        else:
            limits = np.bincount(dataset.test_labels, minlength=len(counts))
        if (counts < 0).any() or (counts.sum(axis=1) > limits).any():
            raise InvalidReply("the sum is no count of the images that these clients evaluate")
        return counts, {client.name for client in survivors}
    except (TooFewClients, SpoiledSum, InvalidReply) as error:
        raise RunError(f"evaluation of task {context.task + 1}: {error}.") from error


def response_entropies(model: Model, update: Update, dataset: Dataset, order: np.ndarray) -> list[float]:
    """Entropy, in nats, of the classes that a local model predicts for the test images of all seen classes.

    It shows federated bias (HGP sections 2 and 4.3), as :func:`local_distance` does.
    The model holds the update's arrays meanwhile; ``order`` int64 [seen] is the class id of each head row. Empty where
    no test image is of a seen class.
    """
    before = model.export()
    model.load(update.arrays)
    counts = confusion_counts(model, dataset, order, np.arange(len(dataset.test_labels)))
    model.load(before)
    return [response_entropy(counts.sum(axis=0))] if counts.any() else []


def local_distance(updates: Sequence[Update]) -> float:
    """Distance between the clients' prototypes of a class, see :func:`task.metrics.prototype_distance`.

    NaN where the method sends no class means, or no two clients hold the same class.
    """
    statistics = [u.statistics for u in updates if "means" in u.statistics]
    if not statistics:
        return math.nan
    class_ids, means = (np.concatenate([s[name] for s in statistics]) for name in ("class_ids", "means"))
    return prototype_distance(class_ids, means)
