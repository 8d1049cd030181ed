"""Checking a client's answer before it touches the global model."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from server_app.clients.client_info import MOST_IMAGES, Member, failure
from server_app.errors import one_line
from server_app.transport.base import Reply
from strategies.base import Update
from task.config.schema import Config
from task.message import Arrays, Packet
from task.methods import load_half
from task.prototypes.gaussians import cholesky_fails
from task.prototypes.statistics import Nothing

LARGEST = Nothing.largest  # of trained arrays
LARGEST_METRIC = 1e12  # of loss, accuracy, seconds, images: sums over clients and rounds stay finite
FEWEST_FOR_MEDIAN = 3
Spec = Mapping[str, tuple[int, ...]]  # array name -> shape


class Refused(ValueError):
    """An answer is not used; the message is the reason that the results name."""

    def __init__(self, reason: str) -> None:
        super().__init__(one_line(reason))


def check_reply(
    reply: Reply, member: Member, arrays: Spec, classes: Sequence[int], ends_task: bool, config: Config
) -> Update:
    """The update in a reply, or the reason why there is none.

    Args:
        reply: what the transport brought.
        member: who was asked; it cannot have more images than it said at hello that it may.
        arrays: names and shapes of the trained arrays that must come.
        classes: class ids that it may learn in the task.
        ends_task: whether this is the task's last round, in which some statistics travel.
        config: the run keys.

    Raises:
        Refused: names what is wrong.
    """
    if reason := failure(reply):
        raise Refused(reason)
    packet = reply.packet or Packet()
    for name, value in packet.metrics.items():
        if type(value) not in (int, float) or not abs(value) <= LARGEST_METRIC:
            raise Refused(f"{name} is {value!r}; a number of at most {LARGEST_METRIC:g} was expected")
    examples = packet.metrics.get("num-examples")
    most = int(member.class_counts[list(classes)].sum())
    if type(examples) is not int or not 0 <= examples <= most:
        raise Refused(f"num-examples is {examples!r}; a whole number from 0 to {most} was expected")
    if examples == 0 and most and config.own_data:
        raise Refused(f"it has {most} images of the task and used none: its data-dir may have changed")
    if examples == 0:
        return Update(member.name, 0, {}, {})
    _check_arrays(packet.arrays, arrays if config.row.client else {})
    kind = load_half(config.row.statistics)()
    if kind.carries and (ends_task or not kind.at_task_end) and (packet.prototypes or not config.min_class_count):
        _check_statistics(kind, packet.prototypes, member.class_counts, classes, arrays, config)
    elif packet.prototypes:
        raise Refused(f"statistics {sorted(packet.prototypes)} came; none were expected")
    # a method may take what is large out of its own dict
    return Update(member.name, examples, packet.arrays, dict(packet.prototypes), packet.metrics)


def update_norm(update: Update, sent: Arrays) -> float:
    """L2 norm, over all trained arrays together, of what a client changed; ``sent`` are the arrays that it got."""
    return math.sqrt(sum(np.square(a - sent[name].astype(np.float64)).sum() for name, a in update.arrays.items()))


def too_far(updates: Sequence[Update], sent: Arrays, config: Config) -> dict[str, str]:
    """Clients whose update is longer than the run allows, and the reason.

    The median of the run key ``max-update-ratio`` is that of the updates that ``max-update-norm`` lets through.
    """
    if not (config.max_update_norm or config.max_update_ratio):
        return {}
    norms = {u.client: update_norm(u, sent) for u in updates if u.arrays}
    most = config.max_update_norm or math.inf
    found = {name: f"max-update-norm = {most:g}" for name, norm in norms.items() if norm > most}
    left = [norm for name, norm in norms.items() if name not in found]
    if config.max_update_ratio and len(left) >= FEWEST_FOR_MEDIAN:
        median = float(np.median(left))
        words = f"max-update-ratio = {config.max_update_ratio:g} times the median {median:.4g}"
        far = [name for name, norm in norms.items() if norm > config.max_update_ratio * median]
        found = dict.fromkeys(far, words) | found
    return {name: f"its update has the norm {norms[name]:.4g}, which is above {limit}" for name, limit in found.items()}


def _check_arrays(arrays: Arrays, spec: Spec) -> None:
    if set(arrays) != set(spec):
        raise Refused(f"arrays {sorted(arrays)} came; {sorted(spec)} were expected")
    for name, shape in spec.items():
        _check_numbers(name, arrays[name], shape)


def _check_numbers(
    name: str, array: np.ndarray, shape: tuple[int, ...], dtype: type = np.float32, largest: float = LARGEST
) -> None:
    if array.dtype != dtype or array.shape != shape:
        raise Refused(f"{name} is {array.dtype} {list(array.shape)}; {np.dtype(dtype)} {list(shape)} was expected")
    if not np.isfinite(array).all():
        raise Refused(f"{name} holds NaN or infinite values")
    if np.abs(array).max(initial=0) > largest:
        raise Refused(f"{name} holds values above {largest:g}")


def _check_statistics(
    kind: Nothing, found: Arrays, owned: np.ndarray, classes: Sequence[int], arrays: Spec, config: Config
) -> None:
    class_ids, counts = found.get("class_ids", np.empty(0)), found.get("counts", np.empty(0))
    whole = class_ids.dtype == counts.dtype == np.int64
    if not whole or class_ids.ndim != 1 or class_ids.shape != counts.shape or not len(class_ids):
        raise Refused("class_ids and counts must be int64 lists of equal length, not empty")
    if len(set(class_ids.tolist())) < len(class_ids) or not set(class_ids.tolist()) <= set(classes):
        raise Refused(f"class_ids {class_ids.tolist()} are not distinct classes of the task {sorted(classes)}")
    if (counts < 1).any() or (counts > owned[class_ids]).any():
        raise Refused(f"counts {counts.tolist()} are below 1 or above what the client said to hold")
    shapes = kind.expected(len(class_ids), arrays, config.options)
    if set(found) != {"class_ids", "counts", *shapes}:
        raise Refused(f"statistics {sorted(found)} came; class_ids, counts and {sorted(shapes)} were expected")
    for name, shape in shapes.items():
        _check_numbers(name, found[name], shape, kind.dtype, kind.largest)
    for name in kind.not_negative & found.keys():
        if (found[name] < 0).any():
            raise Refused(f"{name} are negative")
    for name in kind.semi_definite & found.keys():
        if cholesky_fails(found[name], arrays["head.weight"][1]):
            raise Refused(f"{name} are not positive semi-definite")


def check_counts(reply: Reply, most: np.ndarray, seen: Sequence[int]) -> np.ndarray:
    """Images of each true class by predicted class, int64 [classes, classes], from an answer to an evaluate message.

    Args:
        reply: what the transport brought.
        most: int64 [classes], images of each class that the client can have been asked about.
        seen: class ids that can be asked for and predicted.

    Raises:
        Refused: names what is wrong.
    """
    if reason := failure(reply):
        raise Refused(reason)
    arrays, classes = (reply.packet or Packet()).arrays, len(most)
    correct, total = arrays.get("correct", np.empty(0)), arrays.get("total", np.empty(0))
    if not correct.dtype == total.dtype == np.int64 or not correct.shape == total.shape == (classes,):
        raise Refused(f"correct and total must be int64 [{classes}] both")
    if (correct < 0).any() or (correct > total).any() or (total > most).any():
        raise Refused("correct and total are no counts of the images that this client evaluates")
    confusion = _dense(arrays.get("confusion", np.empty(0)), classes, seen)
    if (confusion.diagonal() != correct).any() or (confusion.sum(axis=1) != total).any():
        raise Refused("confusion does not add up to correct and total")
    return confusion


def _dense(cells: np.ndarray, classes: int, seen: Sequence[int]) -> np.ndarray:
    """Counts [classes, classes] from the cells that are not zero."""
    if cells.dtype != np.int64 or cells.ndim != 2 or cells.shape[1] != 3:
        raise Refused("confusion must be int64 [K, 3]: true class, predicted class, images")
    true, predicted, images = cells.T
    if not np.isin(cells[:, :2], seen).all() or len(np.unique(cells[:, :2], axis=0)) < len(cells):
        raise Refused("confusion names a class that has not been seen, or a pair of classes twice")
    if ((images < 1) | (images > MOST_IMAGES)).any():
        raise Refused("confusion holds no counts of images")
    counts = np.zeros((classes, classes), np.int64)
    counts[true, predicted] = images
    return counts
