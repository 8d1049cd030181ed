"""Checking a client's answer before it touches the global model."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import numpy as np

from server_app.clients.client_info import MAX_IMAGES, ClientInfo, failure
from server_app.errors import one_line
from server_app.transport.base import SMALL_ANSWER, Reply
from strategies.base import RoundContext, Update
from task.config.schema import Config
from task.message import Arrays, Packet
from task.methods import load_class
from task.models.model import Model
from task.prototypes.statistics import ClientStatistics

MAX_VALUE = ClientStatistics.largest  # of trained arrays
MAX_METRIC = 1e12  # of loss, accuracy, seconds, images: sums over clients and rounds stay finite
MIN_FOR_MEDIAN = 3  # updates
SLACK = 1.5  # between norms of statistics and of features: for rounding, and for covariances divided by n - 1
Shapes = Mapping[str, tuple[int, ...]]  # by name of the array


class InvalidReply(ValueError):
    """An answer that is not used; the message is the reason, as the results name it."""

    def __init__(self, reason: str) -> None:
        super().__init__(one_line(reason))


class Bounds(NamedTuple):
    """What an honest answer to a train message keeps to."""

    classes: Sequence[int]  # ids of the classes that may be reported
    shapes: Shapes  # of the arrays that clients train
    dim: int  # numbers of a feature under the head
    max_norm: float  # largest L2 norm of such a feature

    @classmethod
    def of(cls, model: Model, classes: Sequence[int]) -> Self:
        """Those of a round's model and of the classes that can be learned in the round."""
        shapes = {name: tuple(value.shape) for name, value in model.trained_state().items()}
        return cls(classes, shapes, model.head.weight.shape[1], model.max_input_norm)


def check_reply(reply: Reply, client: ClientInfo, bounds: Bounds, context: RoundContext, config: Config) -> Update:
    """Check the answer to a train message; returns the update in it.

    The client can report no more images than in its answer to hello. The round decides whether arrays and statistics
    must come.

    Raises:
        InvalidReply: names what is wrong.
    """
    if reason := failure(reply):
        raise InvalidReply(reason)
    packet = reply.packet or Packet()
    for name, value in packet.metrics.items():
        if type(value) not in (int, float) or not abs(value) <= MAX_METRIC:
            advice = "; lower learning-rate" if name == "loss" else ""
            raise InvalidReply(f"{name} is {value!r}; a number of at most {MAX_METRIC:g} was expected{advice}")
        if name.startswith("seconds-") and value < 0:
            raise InvalidReply(f"{name} is {value!r}; seconds are not negative")
    if not 0 <= packet.metrics.get("accuracy", 0) <= 1:
        raise InvalidReply(f"accuracy is {packet.metrics['accuracy']!r}; a share from 0 to 1 was expected")
    examples = packet.metrics.get("num-examples")
    num_held = int(client.class_counts[list(bounds.classes)].sum())
    if type(examples) is not int or not 0 <= examples <= num_held:
        raise InvalidReply(f"num-examples is {examples!r}; a whole number from 0 to {num_held} was expected")
    if examples == 0 and num_held and config.own_data:
        raise InvalidReply(f"it has {num_held} images of the task and used none: its data-dir may have changed")
    if examples == 0:
        return Update(client.name, 0, {}, {})
    expected = bounds.shapes if config.trains_in(context.server_round) else {}
    if set(packet.arrays) != set(expected):
        raise InvalidReply(f"arrays {sorted(packet.arrays)} came; {sorted(expected)} were expected")
    for name, shape in expected.items():
        _check_numbers(name, packet.arrays[name], shape)
    kind = load_class(config.method_row.statistics)()
    due = kind.due(config, context.server_round, context.ends_task)
    if due and (packet.statistics or not config.min_class_count):
        _check_statistics(kind, packet.statistics, client.class_counts, bounds, config)
        _check_norms(kind, packet.statistics, bounds, config)
    elif packet.statistics:
        raise InvalidReply(f"statistics {sorted(packet.statistics)} came; none were expected")
    # a new dict: a method may remove large statistics from it
    return Update(client.name, examples, packet.arrays, dict(packet.statistics), packet.metrics)


def largest_answer(clients: Sequence[ClientInfo], bounds: Bounds, config: Config) -> int:
    """Bytes that no honest answer of these clients to a train message exceeds."""
    kind = load_class(config.method_row.statistics)()
    counts = np.max([client.class_counts[list(bounds.classes)] for client in clients], axis=0)
    statistics = kind.expected(counts, bounds.shapes, bounds.dim, config)
    numbers = sum(map(math.prod, statistics.values())) * np.dtype(kind.number_type(config.options)).itemsize
    return SMALL_ANSWER + 4 * sum(map(math.prod, bounds.shapes.values())) + numbers


def check_sum(answer: Packet, clients: Sequence[ClientInfo], bounds: Bounds, config: Config) -> Update | None:
    """The update that a sum over ``clients`` stands for; None if they have no images.

    What each client sent is hidden. Only a sum that honest clients cannot have produced is refused.

    Raises:
        InvalidReply: names what is wrong.
    """
    held = np.sum([client.class_counts[list(bounds.classes)] for client in clients], axis=0)
    images, statistics = int(answer.metrics["num-examples"]), answer.statistics
    if not 0 <= images <= held.sum():
        raise InvalidReply(f"the sum is of {images} images; 0 to {held.sum()} were expected")
    if not images:
        return None
    # a sum is rounded, so a mean accuracy may be a little above 1
    for name, least, largest in (("loss", -MAX_METRIC, MAX_METRIC), ("accuracy", 0, SLACK)):
        if not least <= (mean := answer.metrics.get(name, 0)) <= largest:
            raise InvalidReply(f"the mean {name} is {mean:g}; {least:g} to {largest:g} were expected")
    for name, array in (answer.arrays | statistics).items():
        largest = MAX_VALUE if name in answer.arrays else math.inf
        if not (np.abs(array) <= largest).all():
            raise InvalidReply(f"the mean of {name} holds values above {largest:g}")
    kind = load_class(config.method_row.statistics)()
    if negative := [name for name in kind.not_negative & statistics.keys() if (statistics[name] < 0).any()]:
        raise InvalidReply(f"the mean of {negative[0]} is negative")
    if "counts" in statistics and (statistics["counts"] > held[np.isin(bounds.classes, statistics["class_ids"])]).any():
        raise InvalidReply("the sum is of more images of a class than the clients hold")
    _check_norms(kind, statistics, bounds, config)
    return Update(f"sum of {len(clients)} clients", images, answer.arrays, statistics, answer.metrics)


def update_norm(update: Update, sent: Arrays) -> float:
    """L2 norm, over all trained arrays together, of the change that a client made to the arrays it was sent."""
    return math.sqrt(sum(np.square(a - sent[name].astype(np.float64)).sum() for name, a in update.arrays.items()))


def find_excessive(updates: Sequence[Update], sent: Arrays, config: Config) -> dict[str, str]:
    """Name and reason of each client whose update has a larger norm than the run allows.

    The median of the run key ``max-update-ratio`` is over the updates that ``max-update-norm`` accepts.
    """
    if not (config.max_update_norm or config.max_update_ratio):
        return {}
    norms = {u.client: update_norm(u, sent) for u in updates if u.arrays}
    max_norm = config.max_update_norm or math.inf
    limits = {name: f"max-update-norm = {max_norm:g}" for name, norm in norms.items() if norm > max_norm}
    accepted = [norm for norm in norms.values() if norm <= max_norm]
    if config.max_update_ratio and len(accepted) >= MIN_FOR_MEDIAN:
        median = float(np.median(accepted))
        limit = f"max-update-ratio = {config.max_update_ratio:g} times the median {median:.4g}"
        excessive = [name for name, norm in norms.items() if norm > config.max_update_ratio * median]
        limits = dict.fromkeys(excessive, limit) | limits
    return {
        name: f"its update has the norm {norms[name]:.4g}, which is above {limit}" for name, limit in limits.items()
    }


def _check_numbers(
    name: str, array: np.ndarray, shape: tuple[int, ...], dtype: type = np.float32, largest: float = MAX_VALUE
) -> None:
    if array.dtype != dtype or array.shape != shape:
        raise InvalidReply(f"{name} is {array.dtype} {list(array.shape)}; {np.dtype(dtype)} {list(shape)} was expected")
    if not np.isfinite(array).all():
        raise InvalidReply(f"{name} holds NaN or infinite values")
    if float(np.abs(array).max(initial=0)) > largest:
        raise InvalidReply(f"{name} holds values above {largest:g}")


def _check_statistics(
    kind: ClientStatistics, statistics: Arrays, class_counts: np.ndarray, bounds: Bounds, config: Config
) -> None:
    """Check names, types, shapes and numbers; ``class_counts`` are the client's images by class id, int64 [classes]."""
    class_ids, counts = statistics.get("class_ids", np.empty(0)), statistics.get("counts", np.empty(0))
    integers = class_ids.dtype == counts.dtype == np.int64
    if not integers or class_ids.ndim != 1 or class_ids.shape != counts.shape or not len(class_ids):
        raise InvalidReply("class_ids and counts must be int64 lists of equal length, not empty")
    if len(set(class_ids.tolist())) < len(class_ids) or not set(class_ids.tolist()) <= set(bounds.classes):
        known = sorted(bounds.classes)
        raise InvalidReply(f"class_ids {class_ids.tolist()} are not distinct classes of the task {known}")
    for c, count, held in zip(class_ids.tolist(), counts.tolist(), class_counts[class_ids].tolist(), strict=True):
        if not 1 <= count <= held:
            raise InvalidReply(
                f"counts has {count} images of class id {c}, below 1 or above what the client said to hold, {held}: "
                "its data-dir may have changed during the run"
            )
    shapes = kind.expected(counts, bounds.shapes, bounds.dim, config)
    if set(statistics) != {"class_ids", "counts", *shapes}:
        raise InvalidReply(
            f"statistics {sorted(statistics)} came; class_ids, counts and {sorted(shapes)} were expected"
        )
    for name, shape in shapes.items():
        _check_numbers(name, statistics[name], shape, kind.number_type(config.options), kind.largest)
    for name in kind.not_negative & statistics.keys():
        if (statistics[name] < 0).any():
            raise InvalidReply(f"{name} are negative")
    if problem := kind.invalid(statistics, bounds.dim):
        raise InvalidReply(problem)


def _check_norms(kind: ClientStatistics, statistics: Arrays, bounds: Bounds, config: Config) -> None:
    """Refuse statistics that need features of a larger norm than any image has: a few would outweigh all others."""
    if config.privacy_noise:
        return
    largest = min(bounds.max_norm, config.privacy_feature_clip or math.inf)
    for name, norm in kind.norms(statistics, bounds.dim, config.options).items():
        if norm > SLACK * largest:
            raise InvalidReply(
                f"{name} are those of features of norm {norm:.3g}; with this backbone none is above {largest:.3g}"
            )


def check_counts(reply: Reply, limits: np.ndarray, seen: Sequence[int]) -> np.ndarray:
    """Check the answer to an evaluate message; returns images by true and predicted class, int64 [classes, classes].

    ``limits`` int64 [classes] are the test images that the client can have; only classes ``seen`` so far can be true or
    predicted.

    Raises:
        InvalidReply: names what is wrong.
    """
    if reason := failure(reply):
        raise InvalidReply(reason)
    arrays, classes = (reply.packet or Packet()).arrays, len(limits)
    correct, total = arrays.get("correct", np.empty(0)), arrays.get("total", np.empty(0))
    if not correct.dtype == total.dtype == np.int64 or not correct.shape == total.shape == (classes,):
        raise InvalidReply(f"correct and total must be int64 [{classes}] both")
    if (correct < 0).any() or (correct > total).any() or (total > limits).any():
        raise InvalidReply("correct and total are no counts of the images that this client evaluates")
    confusion = _count_cells(arrays.get("confusion", np.empty(0)), classes, seen)
    if (confusion.diagonal() != correct).any() or (confusion.sum(axis=1) != total).any():
        raise InvalidReply("confusion does not add up to correct and total")
    return confusion


def _count_cells(cells: np.ndarray, classes: int, seen: Sequence[int]) -> np.ndarray:
    """int64 [classes, classes] from its cells that are not zero: int64 [K, 3], true class, predicted class, images."""
    if cells.dtype != np.int64 or cells.ndim != 2 or cells.shape[1] != 3:
        raise InvalidReply("confusion must be int64 [K, 3]: true class, predicted class, images")
    true, predicted, images = cells.T
    if not np.isin(cells[:, :2], seen).all() or len(np.unique(cells[:, :2], axis=0)) < len(cells):
        raise InvalidReply("confusion names a class that has not been seen, or a pair of classes twice")
    if ((images < 1) | (images > MAX_IMAGES)).any():
        raise InvalidReply("confusion holds no counts of images")
    counts = np.zeros((classes, classes), np.int64)
    counts[true, predicted] = images
    return counts
