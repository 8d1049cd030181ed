"""The metrics against numbers worked by hand, against plain loops, and against what must hold for every matrix."""

import itertools
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from task import metrics
from task.metrics import (
    METRICS,
    crop_to_finished,
    fold,
    gaps,
    prototype_distance,
    response_entropy,
    seen_accuracy,
    summarize,
    summarize_measured,
)

WORKED = [[0.80, None, None], [0.90, 0.70, None], [0.60, 0.75, 0.45]]
SAMPLES = [100, 100, 200]
BY_HAND = {
    "final_average_accuracy": 0.60,
    "average_incremental_accuracy": 2.2 / 3,
    "average_seen_accuracy": (0.80 + 0.80 + 0.5625) / 3,
    "last_accuracy": 0.5625,
    "performance_drop": 0.20,
    "forgetting": 0.125,
    "forgetting_never_negative": 0.15,
    "forgetting_since_learned": 0.075,
    "forgetting_stepwise": 0.0125,
    "backward_transfer": -0.075,
    "plasticity": 0.65,
    "stability": 0.675,
    "continual_utility": 0.68125,
}


@st.composite
def matrices(draw, min_tasks=1, max_tasks=7):
    """Valid accuracy matrices as lists, None above the diagonal."""
    size = draw(st.integers(min_tasks, max_tasks))
    fraction = st.floats(0, 1).map(lambda x: round(x, 6))
    return [[draw(fraction) if j <= i else None for j in range(size)] for i in range(size)]


def mean(values):
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def by_loops(a):
    """Every metric but those over samples, straight from the formulas with tasks counted from 0."""
    last = len(a) - 1
    old = range(last)
    faa = mean(a[last])
    plasticity = mean(a[j][j] for j in range(len(a)))
    stability = mean(a[last][j] for j in old) if last else a[0][0]
    steps = (mean(a[i - 1][j] - a[i][j] for j in range(i)) for i in range(1, len(a)))
    return {
        "final_average_accuracy": faa,
        "average_incremental_accuracy": mean(mean(row[: i + 1]) for i, row in enumerate(a)),
        "performance_drop": a[0][0] - faa,
        "forgetting": mean(max(a[i][j] for i in range(j, last)) - a[last][j] for j in old),
        "forgetting_never_negative": mean(max(a[i][j] for i in range(j, last + 1)) - a[last][j] for j in old),
        "forgetting_since_learned": mean(a[j][j] - a[last][j] for j in old),
        "forgetting_stepwise": mean(steps),
        "backward_transfer": mean(a[last][j] - a[j][j] for j in old),
        "plasticity": plasticity,
        "stability": stability,
        "continual_utility": mean((mean(a[t][:t]) + a[t][t]) / 2 for t in range(1, len(a))) if last else a[0][0],
    }


def test_worked_example():
    assert summarize(WORKED, SAMPLES) == pytest.approx(BY_HAND)


def test_docstring_shows_the_worked_example():
    shown = re.findall(r"^    (\w+) .* = +(-?[\d.]+)$", metrics.__doc__, flags=re.MULTILINE)
    assert {name: float(value) for name, value in shown} == pytest.approx(BY_HAND, abs=5e-5)


# task 2 brings no class: after it the accuracy on task 1 is 0.7 instead of 0.9
STAGES = [[0.9, None, None], [0.7, None, None], [0.6, None, 0.4]]


def test_a_task_without_samples_continues_the_one_before():
    """As if the matrix were [[0.7], [0.6, 0.4]]: FAA 0.5, AIA (0.7 + 0.5) / 2, last (0.6 + 3 * 0.4) / 4."""
    matrix, kept = fold(STAGES, [10, 0, 30])
    assert np.array_equal(matrix, [[0.7, np.nan], [0.6, 0.4]], equal_nan=True)
    assert kept.tolist() == [0, 2]
    values = summarize(STAGES, [10, 0, 30])
    expected = {"final_average_accuracy": 0.5, "average_incremental_accuracy": 0.6, "last_accuracy": 0.45}
    expected |= {"forgetting": 0.1, "plasticity": 0.55, "stability": 0.6, "performance_drop": 0.2}
    assert {name: values[name] for name in expected} == pytest.approx(expected)
    assert summarize([row[:2] for row in STAGES[:2]], [10, 0])["final_average_accuracy"] == 0.7


@given(matrices(), st.data())
def test_stages_that_bring_nothing_change_no_summary_but_by_their_rows(matrix, data):
    """Each task takes 0 to 2 further stages; whatever was measured before the last of them is left out."""
    extra = [data.draw(st.integers(0, 2)) for _ in matrix]
    starts = np.cumsum([0, *(n + 1 for n in extra)])
    stages, samples = [], [0] * int(starts[-1])
    for i, more in enumerate(extra):
        samples[starts[i]] = 10 + i
        for stage in range(more + 1):
            measured = matrix[i] if stage == more else [None if x is None else 1 - x for x in matrix[i]]
            row = [None] * len(samples)
            for j in range(i + 1):
                row[starts[j]] = measured[j]
            stages.append(row)
    counts = [10 + i for i in range(len(matrix))]
    assert summarize(stages, samples) == pytest.approx(summarize(matrix, counts), nan_ok=True)
    assert crop_to_finished(stages, samples).shape == (len(stages), len(stages))


def test_without_counts_a_null_column_is_a_gap():
    with pytest.raises(ValueError, match="after task 2 on task 2 is missing"):
        summarize(STAGES)
    with pytest.raises(ValueError, match="after task 2 on task 2 is missing"):
        crop_to_finished(STAGES)
    with pytest.raises(ValueError, match="samples_per_task must be 3 positive numbers, or 0 for a task of which no"):
        crop_to_finished(WORKED, [10, 0, 30])
    with pytest.raises(ValueError, match="empty"):
        summarize([[None]], [0])


def test_every_metric_begins_with_its_formula():
    assert all(re.match(r"(U = |mean_|a\[1, 1\])", metric.__doc__) for metric in METRICS.values())


@given(matrices())
def test_agrees_with_plain_loops(matrix):
    values = summarize(matrix)
    assert values.pop("last_accuracy") == pytest.approx(values["final_average_accuracy"])
    assert values.pop("average_seen_accuracy") == pytest.approx(values["average_incremental_accuracy"])
    assert values == pytest.approx(by_loops(matrix), abs=1e-12)


@given(matrices())
def test_identities_and_orderings(matrix):
    v = summarize(matrix)
    tasks = len(matrix)
    drift = (tasks - 1) / tasks * v["backward_transfer"]
    assert v["final_average_accuracy"] == pytest.approx(v["plasticity"] + drift)
    assert v["forgetting_since_learned"] <= v["forgetting"] + 1e-12
    assert v["forgetting"] <= v["forgetting_never_negative"] + 1e-12
    assert v["forgetting_never_negative"] >= 0


@given(matrices(), st.floats(-9, 9))
def test_what_stands_above_the_diagonal_is_never_read(matrix, junk):
    filled = [[junk if x is None else x for x in row] for row in matrix]
    assert summarize(filled) == summarize(matrix)


@given(st.floats(0, 1), st.integers(1, 6))
def test_constant_accuracy_means_nothing_forgotten(level, tasks):
    values = summarize(np.full((tasks, tasks), level))
    for name in ("forgetting", "forgetting_since_learned", "forgetting_stepwise", "performance_drop"):
        assert values[name] == pytest.approx(0, abs=1e-12)
    assert values["continual_utility"] == pytest.approx(level)


def test_one_task():
    values = summarize([[0.8]])
    differences = {name for name in values if "forgetting" in name} | {"performance_drop", "backward_transfer"}
    assert {values[name] for name in differences} == {0.0}
    assert {values[name] for name in values.keys() - differences} == {0.8}
    assert math.copysign(1, values["forgetting_since_learned"]) == 1  # shown as 0, not as -0


def test_utility_weighs_classes_of_earlier_tasks_by_their_samples():
    """After task 2: 0.9 and 0.7. After task 3: (10 * 0.6 + 30 * 0.75) / 40 = 0.7125, and 0.45."""
    assert summarize(WORKED, [10, 30, 5])["continual_utility"] == pytest.approx((0.8 + 0.58125) / 2)


def test_forgetting_may_be_negative():
    improving = [[0.5, None], [0.9, 0.7]]
    assert metrics.forgetting(improving) == pytest.approx(-0.4)
    assert metrics.forgetting_never_negative(improving) == 0


@pytest.mark.parametrize("convert", [np.array, lambda m: torch.tensor(m, dtype=torch.float64), tuple])
def test_accepts_arrays_and_tensors(convert):
    matrix = convert([[math.nan if x is None else x for x in row] for row in WORKED])
    assert summarize(matrix, SAMPLES) == pytest.approx(BY_HAND)


def test_input_is_left_as_it_was():
    matrix = np.array([[0.5, 0.25], [0.5, 0.5]])
    summarize(matrix)
    assert matrix.tolist() == [[0.5, 0.25], [0.5, 0.5]]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), min_size=1, max_size=6))
def test_last_accuracy_is_over_samples(counts):
    counts = [(min(correct, total), total) for correct, total in counts]
    last = [correct / total for correct, total in counts]
    matrix = [last[: i + 1] + [None] * (len(last) - i - 1) for i in range(len(last))]
    pooled = sum(correct for correct, _ in counts) / sum(total for _, total in counts)
    assert summarize(matrix, [total for _, total in counts])["last_accuracy"] == pytest.approx(pooled)


def test_without_counts_every_task_weighs_the_same():
    assert summarize(WORKED)["last_accuracy"] == pytest.approx(0.60)
    assert seen_accuracy(WORKED) == pytest.approx([0.80, 0.80, 0.60])
    assert seen_accuracy(WORKED, SAMPLES) == pytest.approx([0.80, 0.80, 0.5625])


@pytest.mark.parametrize("counts", [[1, 2], [1, 2, 0], [1, -2, 3], [[1, 2, 3]], [1, 2, math.nan]])
def test_refuses_impossible_counts(counts):
    with pytest.raises(ValueError, match="samples_per_task must be 3 positive numbers"):
        summarize(WORKED, counts)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ([], "empty"),
        ([[0.5, None]], r"not square: 1 rows, row 1 of shape \(2,\)"),
        ([[0.5, None], [0.5]], r"row 2 of shape \(1,\)"),
        ([0.5, 0.5], r"row 1 of shape \(\)"),
        (np.zeros((2, 2, 2)), "not square"),
        ([[0.5, None], [1.5, 0.5]], r"after task 2 on task 1 is 1.5 .*fractions in 0..1"),
        ([[0.5, None], [0.5, -0.1]], "after task 2 on task 2 is -0.1"),
        ([[0.5, None], [math.inf, 0.5]], "after task 2 on task 1 is inf"),
        ([[None, None], [0.5, 0.5]], "after task 1 on task 1 is missing"),
        ([[0.5, None], [0.5, math.nan]], "after task 2 on task 2 is missing"),
        ([[0.5, None], [None, None]], "after task 2 on task 1 is missing"),
    ],
)
def test_refuses_malformed_matrices_and_says_where(matrix, message):
    for metric in [summarize, seen_accuracy, metrics.forgetting_by_task, *METRICS.values()]:
        with pytest.raises(ValueError, match=message):
            metric(matrix)


@given(matrices(), st.data())
def test_crop_to_finished_cuts_to_the_finished_tasks(matrix, data):
    done = data.draw(st.integers(0, len(matrix)))
    empty = [None] * len(matrix)
    killed = [row if i < done else empty for i, row in enumerate(matrix)]
    expected = np.array([row[:done] for row in matrix[:done]], dtype=float).reshape(done, done)
    assert np.array_equal(crop_to_finished(killed), expected, equal_nan=True)


# after task 2 nobody had test images of task 1; after task 3, in the second matrix, nobody those of tasks 1 and 2
MIDDLE_GAP = [[0.80, None, None], [None, 0.70, None], [0.60, 0.75, 0.45]]
LAST_GAP = [[0.80, None, None], [0.90, 0.70, None], [None, None, 0.45]]


def test_no_metric_guesses_what_was_not_measured():
    known = {name: BY_HAND[name] for name in ("final_average_accuracy", "last_accuracy")}
    assert summarize_measured(MIDDLE_GAP, SAMPLES) == pytest.approx(known)
    assert summarize_measured(LAST_GAP, SAMPLES) == {}
    assert summarize_measured(WORKED, SAMPLES) == pytest.approx(BY_HAND)
    assert summarize_measured([[None]], [0]) == {}


def test_gaps_are_allowed_only_with_counts():
    assert gaps(LAST_GAP).tolist() == [[2, 0], [2, 1]]
    nothing_last = [*LAST_GAP[:2], [None, None, None]]
    for matrix in (MIDDLE_GAP, LAST_GAP, nothing_last):
        block = crop_to_finished(matrix, [100, 100, 200])
        assert np.array_equal(block, np.array(matrix, float), equal_nan=True)
    with pytest.raises(ValueError, match="is missing"):
        crop_to_finished(LAST_GAP)
    with pytest.raises(ValueError, match="samples_per_task must be 3 positive numbers"):
        crop_to_finished(WORKED, [10, 10])


def test_crop_to_finished_of_nothing():
    assert crop_to_finished([[None, None], [None, None]]).shape == (0, 0)
    assert crop_to_finished([]).shape == (0, 0)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ([[0.5, None, None], [None] * 3, [0.5, 0.5, 0.5]], "after task 2 on task 1 is missing"),
        ([[0.5, None, None], [0.5, None, None], [None] * 3], "after task 2 on task 2 is missing"),
        ([[None, None], [0.5, 0.5]], "after task 1 on task 1 is missing"),
        ([[7, None], [None, None]], "after task 1 on task 1 is 7"),
        ([[0.5], [0.5, 0.5]], "not square"),
    ],
)
def test_crop_to_finished_refuses_gaps(matrix, message):
    with pytest.raises(ValueError, match=message):
        crop_to_finished(matrix)


def test_forgetting_by_task():
    assert metrics.forgetting_by_task(WORKED) == pytest.approx([0.30, -0.05])
    assert metrics.forgetting_by_task([[0.8]]).shape == (0,)


@pytest.mark.parametrize("classes", [1, 2, 7])
def test_response_entropy_is_largest_when_all_classes_are_answered_alike(classes):
    assert response_entropy([3] * classes) == pytest.approx(math.log(classes))
    alone = response_entropy([0] * (classes - 1) + [5])
    assert alone == 0
    assert math.copysign(1, alone) == 1


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8).filter(any))
def test_response_entropy_agrees_with_a_plain_loop(counts):
    expected = -sum(n / sum(counts) * math.log(n / sum(counts)) for n in counts if n)
    assert response_entropy(counts) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("counts", [[], [0, 0], [-1, 2], [[1, 2]], [math.nan]])
def test_response_entropy_refuses_what_are_no_answers(counts):
    with pytest.raises(ValueError, match="responses must be"):
        response_entropy(counts)


@pytest.mark.parametrize("far", [0.0, 1e5])
def test_prototype_distance_agrees_with_a_plain_loop(far):
    """Seven clients hold some of five classes each, in any order, near and far from the origin."""
    rng = np.random.default_rng(0)
    class_ids = np.concatenate([rng.choice(5, rng.integers(1, 6), replace=False) for _ in range(7)])
    means = (far + rng.normal(size=(len(class_ids), 3))).astype(np.float32)
    by_class = [means[class_ids == c].astype(np.float64) for c in range(5)]
    pairs = [[math.dist(a, b) for a, b in itertools.combinations(held, 2)] for held in by_class]
    assert prototype_distance(class_ids, means) == pytest.approx(mean(mean(p) for p in pairs if p), rel=1e-9)


def test_prototype_distance_of_equal_ones_and_of_single_holders():
    assert prototype_distance([4, 4, 4], np.full((3, 2), 0.1)) == pytest.approx(0, abs=1e-12)
    assert math.isnan(prototype_distance([4, 2], np.eye(2)))
    assert math.isnan(prototype_distance([], np.empty((0, 2))))
