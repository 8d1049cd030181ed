"""Accuracy, forgetting and their relatives, each one a pure function of the accuracy matrix.

a[i, j] is the accuracy on the test samples of task j after learning task i, tasks counted from 1 to T, a fraction in
0..1. Only j <= i is ever read; None or NaN may stand above the diagonal. The literature calls at least four different
formulas "forgetting"; here each has a name of its own, and one matrix tells them all apart:

                          on task 1   on task 2   on task 3
    after task 1             0.80         -           -
    after task 2             0.90        0.70         -
    after task 3             0.60        0.75        0.45          test samples per task: 100, 100, 200

    final_average_accuracy        (0.60 + 0.75 + 0.45) / 3                                           =  0.60
    average_incremental_accuracy  (0.80 + (0.90 + 0.70) / 2 + 0.60) / 3                              =  0.7333
    average_seen_accuracy         (0.80 + (100 * 0.90 + 100 * 0.70) / 200 + 0.5625) / 3              =  0.7208
    last_accuracy                 (100 * 0.60 + 100 * 0.75 + 200 * 0.45) / 400                       =  0.5625
    performance_drop              0.80 - 0.60                                                        =  0.20
    forgetting                    ((0.90 - 0.60) + (0.70 - 0.75)) / 2                                =  0.125
    forgetting_never_negative     ((0.90 - 0.60) + (0.75 - 0.75)) / 2                                =  0.15
    forgetting_since_learned      ((0.80 - 0.60) + (0.70 - 0.75)) / 2                                =  0.075
    forgetting_stepwise           ((0.80 - 0.90) + ((0.90 - 0.60) + (0.70 - 0.75)) / 2) / 2          =  0.0125
    backward_transfer             ((0.60 - 0.80) + (0.75 - 0.70)) / 2                                = -0.075
    plasticity                    (0.80 + 0.70 + 0.45) / 3                                           =  0.65
    stability                     (0.60 + 0.75) / 2                                                  =  0.675
    continual_utility             ((0.90 + 0.70) / 2 + ((0.60 + 0.75) / 2 + 0.45) / 2) / 2           =  0.68125

A task without test samples has no accuracy: its whole column is null. An asynchronous run has such a task if a stage
brings no new class; ``fold`` counts it as a part of the task before. Where nodes that hold test samples were away,
another value on or below the diagonal is missing, a gap: ``summarize_measured`` leaves out what cannot be known then,
as it does where a task of new classes has no test samples.
"""

from collections.abc import Callable, Sequence

import numpy as np

Matrix = np.ndarray | Sequence[Sequence[float | None]]


def summarize(accuracy_matrix: Matrix, samples_per_task: Sequence[int] | None = None) -> dict[str, float]:
    """Every metric of this module by name.

    Args:
        accuracy_matrix: [T, T], T >= 1; cut the matrix of an unfinished run with ``crop_to_finished`` first.
        samples_per_task: number of test samples of each task, [T], for ``last_accuracy``, its mean over time,
            ``average_seen_accuracy``, and ``continual_utility``; without them tasks count alike. Where they change
            during a run, those at its end. A task with 0 of them is folded, see ``fold``.

    Raises:
        ValueError: the matrix or the counts are malformed; the message says where.
    """
    matrix, samples = accuracy_matrix, samples_per_task
    if samples is not None:
        matrix, kept = fold(matrix, samples)
        samples = np.asarray(samples)[kept]
    values = {name: metric(matrix) for name, metric in METRICS.items()}
    seen = seen_accuracy(matrix, samples)
    values |= {"last_accuracy": float(seen[-1]), "average_seen_accuracy": float(seen.mean())}
    return values | {"continual_utility": continual_utility(matrix, samples)}


def summarize_measured(
    accuracy_matrix: Matrix, samples_per_task: Sequence[int], new_classes: Sequence[int] = ()
) -> dict[str, float]:
    """``summarize``, or only the final average and last accuracy where the others cannot be known.

    So it is with a gap in the matrix, if the last row is complete: a metric of the tasks that are left would look like
    one of all tasks. And so it is if a task of ``new_classes`` [T] has no test samples: to fold it would hide what it
    made the model forget. Empty if no task has test samples.

    >>> summarize_measured([[None, None], [0.75, 0.25]], [10, 30])
    {'final_average_accuracy': 0.5, 'last_accuracy': 0.375}
    >>> summarize_measured([[0.9, None], [None, 0.6]], [10, 30])
    {}
    >>> summarize_measured([[1.0, None], [0.5, None]], [10, 0], new_classes=[2, 2])
    {'final_average_accuracy': 0.5, 'last_accuracy': 0.5}
    """
    matrix, kept = fold(accuracy_matrix, samples_per_task)
    if not kept.size:
        return {}
    if not untested_tasks(samples_per_task, new_classes) and not gaps(matrix).size:
        return summarize(accuracy_matrix, samples_per_task)
    last = matrix[-1]
    values = {
        "final_average_accuracy": last.mean(),
        "last_accuracy": np.average(last, weights=np.asarray(samples_per_task)[kept]),
    }
    return {name: float(value) for name, value in values.items() if np.isfinite(value)}


def untested_tasks(samples_per_task: Sequence[int], new_classes: Sequence[int]) -> list[int]:
    """Tasks, counted from 1, that bring ``new_classes`` [T] and have no test samples; counts [T] of finished tasks.

    >>> untested_tasks([10, 0, 0], new_classes=[2, 0, 2])
    [3]
    """
    counts = enumerate(zip(samples_per_task, new_classes, strict=False), start=1)
    return [task for task, (samples, classes) in counts if classes and not samples]


def fold(accuracy_matrix: Matrix, samples_per_task: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merge each task without test samples into the task before it.

    Its column is left out, and its row replaces the row before: the state at the end of the merged task.

    >>> fold([[0.9, None, None], [0.8, None, None], [0.7, None, 0.6]], [10, 0, 10])
    (array([[0.8, nan],
           [0.7, 0.6]]), array([0, 2]))

    Matrix [T, T] and counts [T] -> float64 [K, K] for the K tasks with samples, and their indices, int64 [K].

    Raises:
        ValueError: not T counts, or an accuracy where there is no sample.
    """
    matrix, counts = _square(accuracy_matrix), np.asarray(samples_per_task, dtype=np.float64)
    if counts.shape != (len(matrix),) or not np.isnan(matrix[:, counts == 0]).all():
        raise ValueError(
            f"samples_per_task must be {len(matrix)} positive numbers, or 0 for a task of which no accuracy is known, "
            f"not {samples_per_task}"
        )
    kept = np.flatnonzero(counts)
    ends = np.append(kept[1:], len(counts))[: len(kept)] - 1
    return matrix[np.ix_(ends, kept)], kept


def check_matrix(accuracy_matrix: Matrix) -> np.ndarray:
    """The matrix as float64 [T, T] with NaN above the diagonal.

    Raises:
        ValueError: no row at all, not square, or on or below the diagonal a value that is missing or not in 0..1.
    """
    matrix = _square(accuracy_matrix)
    if len(matrix) == 0:
        raise ValueError("the accuracy matrix is empty: no task has been finished")
    for i, j in gaps(matrix):
        raise ValueError(f"the accuracy after task {i + 1} on task {j + 1} is missing (row {i + 1}, column {j + 1})")
    return matrix


def crop_to_finished(accuracy_matrix: Matrix, samples_per_task: Sequence[int] = ()) -> np.ndarray:
    """Cut the [T, T] matrix of a run that stopped after k tasks to its finished block, float64 [k, k], 0 <= k <= T.

    Columns of tasks with 0 of the ``samples_per_task`` [k] are null. Only where these counts are given may there be
    gaps, as nodes with test images may have been away.

    Raises:
        ValueError: not square, a value that is not in 0..1, an accuracy where there is no sample; or, without
            counts, a missing value in a row that was begun, or an empty row before a filled one.
    """
    matrix = _square(accuracy_matrix)
    begun = np.flatnonzero(~np.isnan(matrix).all(axis=1))
    k = max(int(begun.max(initial=-1)) + 1, len(samples_per_task))
    block = matrix[:k, :k]
    if samples_per_task:
        fold(block, samples_per_task)  # it checks
    elif k:
        check_matrix(block)
    return block


def _square(accuracy_matrix: Matrix) -> np.ndarray:
    """Float64 [T, T] with NaN above the diagonal; values below it may be missing, but not out of range."""
    rows = [np.asarray(row, dtype=np.float64) for row in accuracy_matrix]
    for i, row in enumerate(rows):
        if row.shape != (len(rows),):
            raise ValueError(f"the accuracy matrix is not square: {len(rows)} rows, row {i + 1} of shape {row.shape}")
    matrix = np.array(rows).reshape(len(rows), len(rows))
    matrix[~_lower(matrix)] = np.nan
    for i, j in np.argwhere((matrix < 0) | (matrix > 1)):
        raise ValueError(
            f"the accuracy after task {i + 1} on task {j + 1} is {matrix[i, j]:g} (row {i + 1}, column {j + 1}); "
            "accuracies are fractions in 0..1"
        )
    return matrix


def gaps(accuracy_matrix: Matrix) -> np.ndarray:
    """Row and column, from 0, of each missing value on or below the diagonal, int64 [K, 2].

    >>> gaps([[0.9, None], [None, 0.7]]).tolist()
    [[1, 0]]
    """
    matrix = _square(accuracy_matrix)
    return np.argwhere(np.isnan(matrix) & _lower(matrix))


def _lower(matrix: np.ndarray) -> np.ndarray:
    """Mask [T, T] of the entries on or below the diagonal."""
    return np.tri(len(matrix), dtype=bool)


def seen_accuracy(accuracy_matrix: Matrix, samples_per_task: Sequence[int] | None = None) -> np.ndarray:
    """Accuracy on all classes seen so far after each task, float64 [T]: sum_{j<=i} n_j a[i, j] / sum_{j<=i} n_j.

    ``samples_per_task`` [T] are the numbers n_j of test samples; without them every task counts equally.

    Raises:
        ValueError: the matrix is malformed, or the counts are not T positive numbers.
    """
    matrix = check_matrix(accuracy_matrix)
    counts = np.ones(len(matrix)) if samples_per_task is None else np.asarray(samples_per_task, dtype=np.float64)
    if counts.shape != (len(matrix),) or not (counts > 0).all():
        raise ValueError(f"samples_per_task must be {len(matrix)} positive numbers, not {samples_per_task}")
    return np.nansum(matrix * counts, axis=1) / counts.cumsum()


def final_average_accuracy(accuracy_matrix: Matrix) -> float:
    """mean_j a[T, j]: accuracy after the last task, averaged over the tasks (FAA; Chaudhry et al. 2018)."""
    return float(check_matrix(accuracy_matrix)[-1].mean())


def average_incremental_accuracy(accuracy_matrix: Matrix) -> float:
    """mean_i mean_{j<=i} a[i, j]: FAA averaged over the time after each task (AIA; Rebuffi et al. 2017)."""
    return float(seen_accuracy(accuracy_matrix).mean())


def performance_drop(accuracy_matrix: Matrix) -> float:
    """a[1, 1] - mean_j a[T, j]: what was lost between the first task and the end (PD; Zhang et al. 2021)."""
    matrix = check_matrix(accuracy_matrix)
    return float(matrix[0, 0] - matrix[-1].mean())


def forgetting(accuracy_matrix: Matrix) -> float:
    """mean_{j<T} (max_{j<=i<T} a[i, j] - a[T, j]): best earlier minus final accuracy (Chaudhry et al. 2018).

    Negative when old tasks are better at the end than ever before; 0 when T = 1.
    """
    return _mean_or_zero(forgetting_by_task(accuracy_matrix))


def forgetting_by_task(accuracy_matrix: Matrix) -> np.ndarray:
    """The terms of ``forgetting``, one for each task but the last, float64 [T - 1]."""
    matrix = check_matrix(accuracy_matrix)
    return np.nanmax(matrix[:-1, :-1], axis=0, initial=0) - matrix[-1, :-1]


def forgetting_never_negative(accuracy_matrix: Matrix) -> float:
    """mean_{j<T} (max_{j<=i<=T} a[i, j] - a[T, j]): the last row takes part in the maximum (Mammoth's code).

    An old task that ends at its best counts as 0, not as negative; 0 when T = 1.
    """
    matrix = check_matrix(accuracy_matrix)[:, :-1]
    return _mean_or_zero(np.nanmax(matrix, axis=0) - matrix[-1])


def forgetting_since_learned(accuracy_matrix: Matrix) -> float:
    """mean_{j<T} (a[j, j] - a[T, j]): accuracy when just learned minus final accuracy (Avalanche).

    0 when T = 1.
    """
    return 0.0 - backward_transfer(accuracy_matrix)  # a unary minus would turn 0 into -0


def forgetting_stepwise(accuracy_matrix: Matrix) -> float:
    """mean_{i>1} mean_{j<i} (a[i-1, j] - a[i, j]): the mean loss per task learned (CODA-Prompt's code).

    On long streams far below the others, being a loss per step and not one since the best; 0 when T = 1.
    """
    matrix = check_matrix(accuracy_matrix)
    steps = matrix[:-1] - matrix[1:]
    return _mean_or_zero(np.array([step[: i + 1].mean() for i, step in enumerate(steps)]))


def backward_transfer(accuracy_matrix: Matrix) -> float:
    """mean_{j<T} (a[T, j] - a[j, j]): what later tasks did to earlier ones (BWT; Lopez-Paz and Ranzato 2017).

    0 when T = 1.
    """
    matrix = check_matrix(accuracy_matrix)
    return _mean_or_zero((matrix[-1] - matrix.diagonal())[:-1])


def plasticity(accuracy_matrix: Matrix) -> float:
    """mean_j a[j, j]: accuracy on each task when just learned ("learning accuracy"; Riemer et al. 2019)."""
    return float(check_matrix(accuracy_matrix).diagonal().mean())


def stability(accuracy_matrix: Matrix) -> float:
    """mean_{j<T} a[T, j]: final accuracy on the tasks before the last.

    With T = 1 there is none, and a[1, 1] is returned.
    """
    final = check_matrix(accuracy_matrix)[-1]
    return float((final[:-1] if len(final) > 1 else final).mean())


def continual_utility(accuracy_matrix: Matrix, samples_per_task: Sequence[int] | None = None) -> float:
    """U = mean_{t>1} [(A^{t-1} + A^t) / 2] (Gao et al. 2024, FedProK, eq. 1, with the lambda of its table 2, 0.5).

    Both are measured after task t: A^{t-1} on the classes of all tasks before t, A^t on those of task t. With T = 1 it
    is a[1, 1].

    Task 3 has two earlier tasks, of 100 and 300 test samples: A^{t-1} = (100 * 0.6 + 300 * 0.8) / 400 = 0.75, so
    U = ((0.9 + 0.7) / 2 + (0.75 + 0.5) / 2) / 2:

    >>> round(continual_utility([[0.8, None, None], [0.9, 0.7, None], [0.6, 0.8, 0.5]], [100, 300, 50]), 4)
    0.7125

    ``samples_per_task`` [T] are the numbers of test samples; without them every task counts equally.

    Raises:
        ValueError: the matrix is malformed, or the counts are not T positive numbers.
    """
    matrix = check_matrix(accuracy_matrix)
    counts = np.ones(len(matrix)) if samples_per_task is None else np.asarray(samples_per_task)
    seen_accuracy(matrix, samples_per_task)  # it checks the counts
    earlier = [np.average(row[:t], weights=counts[:t]) for t, row in enumerate(matrix) if t]
    if not earlier:
        return float(matrix[0, 0])
    return float(np.mean(earlier + matrix.diagonal()[1:]) / 2)


def _mean_or_zero(differences: np.ndarray) -> float:
    return float(differences.mean()) if differences.size else 0.0


METRICS: dict[str, Callable[[Matrix], float]] = {
    metric.__name__: metric
    for metric in (
        final_average_accuracy,
        average_incremental_accuracy,
        forgetting,
        performance_drop,
        stability,
        plasticity,
        continual_utility,
        forgetting_never_negative,
        forgetting_since_learned,
        forgetting_stepwise,
        backward_transfer,
    )
}


def response_entropy(responses: Sequence[int] | np.ndarray) -> float:
    """H = -sum_c p_c ln p_c in nats, p_c the share of a model's answers that name class c.

    Before aggregation, a local model answers test images of all seen classes: the less it knows of the classes that it
    does not hold, the fewer different answers it gives (federated bias; HGP section 2). At most ln C, for C classes.

    p = (1/2, 1/4, 1/4, 0), so H = (1/2) ln 2 + 2 (1/4) ln 4:

    >>> round(response_entropy([100, 50, 50, 0]), 4)
    1.0397

    Raises:
        ValueError: negative counts, or no answer at all.
    """
    counts = np.asarray(responses, dtype=np.float64)
    if counts.ndim != 1 or (counts < 0).any() or not counts.sum() > 0:
        raise ValueError(f"responses must be [C] counts, not all 0, instead of {responses}")
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum() + 0.0)  # one class alone would give -0


def prototype_distance(class_ids: Sequence[int] | np.ndarray, means: np.ndarray) -> float:
    """Mean over classes of the mean Euclidean distance of two clients' prototypes of the class (HGP section 4.3).

    Classes that a single client holds are left out; NaN if there is no other class.

    Three clients hold class 7 at (0, 0), (3, 4) and (6, 8): distances 5, 10 and 5. Two hold class 2, at distance 1.

    >>> round(prototype_distance([7, 2, 7, 7, 2], np.array([[0, 0], [0, 1], [3, 4], [6, 8], [0, 2]])), 4)
    3.8333

    Args:
        class_ids: class of each prototype, [P]; every client names a class at most once.
        means: prototypes, [P, D].
    """
    from torch import as_tensor, float64  # late: reports, which need the rest of this file, do without torch
    from torch.nn.functional import pdist

    ids, rows = np.asarray(class_ids), as_tensor(means, dtype=float64)
    several = [c for c, holders in zip(*np.unique(ids, return_counts=True), strict=True) if holders > 1]
    return float(np.mean([pdist(rows[ids == c]).mean() for c in several])) if several else float("nan")
