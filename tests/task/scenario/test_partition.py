import itertools
import math
import time

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from task.scenario.class_stream import class_order, split_tasks
from task.scenario.partition import PARTITIONS, consensus_sizes, consensus_tasks, partition

PARAMETERS = {
    "iid": {},
    "dirichlet": {"dirichlet_beta": 0.5},
    "quantity": {"classes_per_client": 2},
    "class-share": {"class_share": 0.6},
    "split-ratio": {"split_ratio": 0.2, "category_ratio": 0.6, "imbalance_ratio": 0.5, "round": 3},
    "consensus": {"consensus_rate": 0.4},
}
NAMES = list(PARAMETERS)
DISJOINT = [n for n in NAMES if n != "split-ratio"]
PER_TASK = [n for n in NAMES if n != "consensus"]


def balanced(num_classes, per_class, seed=0):
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(num_classes), per_class))


def tasks_of(num_classes, num_tasks):
    return split_tasks(class_order(num_classes, 11, "shuffled"), num_tasks)


def counts(labels, result, num_classes):
    """[M, T, C] samples per client, task and class."""
    return np.array([[np.bincount(labels[a], minlength=num_classes) for a in client] for client in result])


def equal(one, other):
    pairs = zip(itertools.chain(*one), itertools.chain(*other), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


@st.composite
def problems(draw):
    """Labels of up to 9 unequal classes (some empty, some in no task), clients, tasks and a seed."""
    sizes = draw(st.lists(st.integers(0, 25), min_size=2, max_size=9))
    labels = np.random.default_rng(draw(st.integers(0, 99))).permutation(np.repeat(np.arange(len(sizes)), sizes))
    used = draw(st.integers(2, len(sizes)))
    tasks = tasks_of(used, draw(st.integers(1, max(1, used // 2))))
    return labels, draw(st.integers(1, 12)), tasks, draw(st.integers(0, 2**63 - 1))


def possible(name, num_clients, tasks):
    return name != "quantity" or all(len(t) <= 2 * num_clients for t in tasks)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("array", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_arrays_are_as_good_as_lists(name, array):
    labels, tasks = balanced(4, 10), [[2, 0], [3, 1]]
    plain = partition(name, labels, 3, tasks, 5, **PARAMETERS[name])
    assert equal(plain, partition(name, array(labels), 3, array(tasks), 5, **PARAMETERS[name]))
    assert sum(len(samples) for client in plain for samples in client) > 0


def test_a_partition_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="partition='dirichlet-beta': allowed are iid, dirichlet, "):
        partition("dirichlet-beta", [0, 1], 1, [[0, 1]], 0)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_form_of_the_result(name, problem):
    labels, num_clients, tasks, seed = problem
    assume(possible(name, num_clients, tasks))
    result = partition(name, labels, num_clients, tasks, seed, **PARAMETERS[name])
    assert [len(client) for client in result] == [len(tasks)] * num_clients
    for array in itertools.chain(*result):
        assert array.dtype == np.int64
        assert np.all(np.diff(array) > 0), "sorted and without repetition"
    assert equal(result, partition(name, labels.tolist(), num_clients, tasks, seed, **PARAMETERS[name]))


@pytest.mark.parametrize("name", DISJOINT)
@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_every_sample_of_the_tasks_has_one_owner(name, problem):
    labels, num_clients, tasks, seed = problem
    assume(possible(name, num_clients, tasks))
    result = partition(name, labels, num_clients, tasks, seed, **PARAMETERS[name])
    dealt = np.concatenate(list(itertools.chain(*result)))
    wanted = np.flatnonzero(np.isin(labels, np.concatenate(tasks)))
    np.testing.assert_array_equal(np.sort(dealt), wanted)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(problem=problems())
def test_clients_hold_classes_of_their_task_only(name, problem):
    labels, num_clients, tasks, seed = problem
    assume(possible(name, num_clients, tasks))
    result = partition(name, labels, num_clients, tasks, seed, **PARAMETERS[name])
    streams = [tasks] * num_clients
    if name == "consensus":
        streams = consensus_tasks(tasks, num_clients, seed, **PARAMETERS[name])
    for client, client_tasks in zip(result, streams, strict=True):
        for array, classes in zip(client, client_tasks, strict=True):
            assert set(labels[array].tolist()) <= set(classes)


@pytest.mark.parametrize("name", PER_TASK)
@settings(max_examples=30, deadline=None)
@given(problem=problems())
def test_a_task_does_not_depend_on_later_ones(name, problem):
    labels, num_clients, tasks, seed = problem
    assume(possible(name, num_clients, tasks))
    whole = partition(name, labels, num_clients, tasks, seed, **PARAMETERS[name])
    first = partition(name, labels, num_clients, tasks[:1], seed, **PARAMETERS[name])
    assert equal([client[:1] for client in whole], first)


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_matters(name):
    labels, tasks = balanced(12, 20), tasks_of(12, 2)
    one, other = (partition(name, labels, 4, tasks, seed, **PARAMETERS[name]) for seed in (0, 1))
    assert not equal(one, other)


@pytest.mark.parametrize("name", PER_TASK)
def test_two_tasks_are_dealt_independently(name):
    # Task 0 owns the even samples, task 1 the odd ones: with one stream for both the arrays would differ by exactly 1.
    labels = np.tile([0, 1], 60)
    parameters = {"classes_per_client": 1} if name == "quantity" else PARAMETERS[name]
    result = partition(name, labels, 2, [[0], [1]], 5, **parameters)
    assert not all(np.array_equal(client[0] + 1, client[1]) for client in result)


@pytest.mark.parametrize("name", NAMES)
def test_more_clients_than_samples_leaves_empty_clients(name):
    labels = np.repeat(np.arange(4), 3)
    result = partition(name, labels, 100, [[0, 1], [2, 3]], 0, **PARAMETERS[name])
    sizes = np.array([[len(a) for a in client] for client in result])
    assert sizes.shape == (100, 2)
    if name == "split-ratio":
        assert (sizes == 1).all(), "each client draws for itself, at least one sample of each of its classes"
    else:
        assert sizes.sum() == 12
        assert (sizes.sum(axis=1) == 0).sum() >= 88


@pytest.mark.parametrize("name", NAMES)
def test_no_samples_and_empty_tasks_are_legal(name):
    tasks = [[0, 1], [2, 3]]
    result = partition(name, [], 3, tasks, 0, **PARAMETERS[name])
    assert [[a.tolist() for a in client] for client in result] == [[[], []]] * 3
    if name != "consensus":
        labels = balanced(4, 10)
        whole = partition(name, labels, 3, tasks, 0, **PARAMETERS[name])
        second = partition(name, labels, 3, [[], [2, 3]], 0, **PARAMETERS[name])
        assert equal([[np.empty(0), client[1]] for client in whole], second)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("num_clients", "limit"), [(10, 0.5), (1000, 6.0)])
def test_work_is_bounded(name, num_clients, limit):
    labels, tasks = balanced(100, 500), tasks_of(100, 10)
    start = time.process_time()
    partition(name, labels, num_clients, tasks, 0, **PARAMETERS[name])
    assert time.process_time() - start < limit


# iid


@settings(max_examples=50, deadline=None)
@given(problems())
def test_iid_sizes_differ_by_at_most_one(problem):
    labels, num_clients, tasks, seed = problem
    sizes = np.array([[len(a) for a in c] for c in partition("iid", labels, num_clients, tasks, seed)])
    assert np.all(np.ptp(sizes, axis=0) <= 1)


def test_iid_remainders_go_to_random_clients():
    # One sample per task, 400 tasks, 4 clients: 100 each expected, sd = sqrt(400 x 1/4 x 3/4) = 8.7; five are 43.
    result = partition("iid", np.arange(400), 4, [[c] for c in range(400)], 0)
    totals = [sum(map(len, client)) for client in result]
    assert all(abs(n - 100) < 43 for n in totals)


# dirichlet


def test_large_beta_is_nearly_even():
    # A share of Dir(beta 1_M) has sd sqrt((1/M)(1 - 1/M) / (M beta + 1)) = 9.5e-5 at M = 10, beta = 1e6: 0.05 of 500
    # samples. Rounding the two cuts adds less than one sample, so that every count is 50 give or take one.
    labels = balanced(20, 500)
    result = partition("dirichlet", labels, 10, tasks_of(20, 4), 3, dirichlet_beta=1e6)
    assert np.abs(counts(labels, result, 20).sum(axis=1) - 50).max() <= 1


@pytest.mark.parametrize("beta", [0.1, 0.5, 5.0])
def test_spread_of_the_shares_follows_beta(beta):
    # Var = (1/M)(1 - 1/M) / (M beta + 1). 2,000 classes; a share is Beta(a, b), a = beta, b = 9 beta, of kurtosis at
    # most 8.6 (at beta = 0.1), so the mean square has a relative sd of at most sqrt(7.6 / 2000) = 6 %; five are 30 %.
    # Rounding two cuts to 1/200 adds at most 2 / (12 x 200^2) = 4e-6 to a variance of 1.8e-3 or more.
    labels = np.repeat(np.arange(2000), 200)
    result = partition("dirichlet", labels, 10, [list(range(2000))], 0, dirichlet_beta=beta)
    shares = counts(labels, result, 2000)[:, 0] / 200
    assert np.mean((shares - 0.1) ** 2) == pytest.approx(0.09 / (10 * beta + 1), rel=0.3)
    # Every client expects one tenth: sd of the mean over classes is sqrt(0.09 / 2000) = 0.7 % at most.
    assert np.abs(shares.mean(axis=1) - 0.1).max() < 0.035


def test_many_clients_all_expect_the_same():
    # 40 clients, 20 samples per class and beta -> infinity: a client expects half a sample of each of 400 classes,
    # 200 in all. The random cut makes every count Bernoulli(1/2): sd sqrt(400 / 4) = 10; five of them are 50.
    # Cuts rounded down would leave every second client with nothing.
    labels = np.repeat(np.arange(400), 20)
    result = partition("dirichlet", labels, 40, [list(range(400))], 0, dirichlet_beta=1e9)
    totals = np.array([len(client[0]) for client in result])
    assert np.abs(totals - 200).max() < 50


def test_a_class_of_one_sample_may_be_anybodys():
    # With beta -> infinity each of 10 clients gets it in one of ten classes: of 4,000, 400 with sd sqrt(360) = 19.
    result = partition("dirichlet", np.arange(4000), 10, [list(range(4000))], 0, dirichlet_beta=1e9)
    assert all(abs(len(client[0]) - 400) < 100 for client in result)


def test_dirichlet_shuffles_the_samples_of_a_class():
    # Dealt in order, the gaps between a client's samples of one class would all be 1.
    result = partition("dirichlet", np.zeros(100, int), 2, [[0]], 0, dirichlet_beta=1e3)
    assert all(np.diff(client[0]).max() > 1 for client in result)


def test_tiny_beta_gives_each_class_to_one_client():
    labels = balanced(30, 50)
    result = partition("dirichlet", labels, 5, [list(range(30))], 0, dirichlet_beta=1e-9)
    per_class = counts(labels, result, 30)[:, 0]
    assert ((per_class == 50).sum(axis=0) == 1).all()
    assert (per_class.sum(axis=1) > 0).sum() >= 3, "not always the same client"


@pytest.mark.parametrize(("beta", "largest"), [(1e-320, 12), (1e308, 2)])
def test_extreme_beta_is_computed(beta, largest):
    labels = balanced(4, 12)
    result = partition("dirichlet", labels, 6, [[0, 1, 2, 3]], 0, dirichlet_beta=beta)
    per_class = counts(labels, result, 4)[:, 0]
    assert per_class.max() in (largest, largest + 1), "rounding a cut may add one sample to an even share of two"
    assert per_class.sum() == 48


@settings(max_examples=60, deadline=None)
@given(problems(), st.sampled_from([0.01, 0.3, 10.0]), st.data())
def test_min_size_is_met_without_losing_a_sample(problem, beta, data):
    labels, num_clients, tasks, seed = problem
    smallest = min(int(np.isin(labels, t).sum()) for t in tasks)
    min_size = data.draw(st.integers(0, smallest // num_clients))
    result = partition("dirichlet", labels, num_clients, tasks, seed, dirichlet_beta=beta, dirichlet_min_size=min_size)
    free = partition("dirichlet", labels, num_clients, tasks, seed, dirichlet_beta=beta)
    dealt = np.concatenate(list(itertools.chain(*result)))
    assert len(np.unique(dealt)) == len(dealt) == np.isin(labels, np.concatenate(tasks)).sum()
    for array, unconstrained in zip(itertools.chain(*result), itertools.chain(*free), strict=True):
        assert len(array) >= min_size
        if len(unconstrained) <= min_size:
            assert np.isin(unconstrained, array).all(), "clients at or below the minimum give nothing away"


def test_impossible_min_size_is_refused():
    with pytest.raises(ValueError, match="dirichlet-min-size=6: allowed are 0 to 5 for a task of 20 samples and"):
        partition("dirichlet", balanced(2, 10), 4, [[0, 1]], 0, dirichlet_beta=1.0, dirichlet_min_size=6)


# quantity


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 12), st.integers(1, 8), st.integers(0, 2**32), st.data())
def test_quantity_is_exact_and_covers(num_classes, num_clients, seed, data):
    alpha = data.draw(st.integers(math.ceil(num_classes / num_clients), num_classes))
    labels = balanced(num_classes, 20)
    result = partition("quantity", labels, num_clients, [list(range(num_classes))], seed, classes_per_client=alpha)
    per_class = counts(labels, result, num_classes)[:, 0]
    assert ((per_class > 0).sum(axis=1) == alpha).all(), "each client exactly alpha classes"
    assert (per_class.sum(axis=0) == 20).all(), "each class wholly dealt out"
    for column in per_class.T:
        assert np.ptp(column[column > 0]) <= 1, "evenly among its holders"


def test_quantity_has_no_favourites():
    # 300 seeds, 4 clients with 2 of 4 classes: each (client, class) is held with probability 1/2 by symmetry, 150
    # times, sd sqrt(300 / 4) = 8.7; five of them are 44.
    labels = balanced(4, 8)
    per_class = sum(
        counts(labels, partition("quantity", labels, 4, [[0, 1, 2, 3]], seed, classes_per_client=2), 4)[:, 0] > 0
        for seed in range(300)
    )
    assert np.abs(per_class - 150).max() < 44


def test_any_two_classes_may_share_a_client():
    # 2 clients with 2 of 4 classes: class 0 has each of the three others as companion with probability 1/3; of 300
    # seeds 100 expected, sd sqrt(300 x 2/9) = 8.2; five of them are 41.
    labels, companions = balanced(4, 8), np.zeros(4)
    for seed in range(300):
        result = partition("quantity", labels, 2, [[0, 1, 2, 3]], seed, classes_per_client=2)
        per_class = counts(labels, result, 4)[:, 0] > 0
        companions += per_class[per_class[:, 0]][0]
    assert np.abs(companions[1:] - 100).max() < 41


@pytest.mark.parametrize(("num_clients", "alpha"), [(3, 3), (10, 11), (10, 0)])
def test_impossible_quantity_says_what_to_change(num_clients, alpha):
    with pytest.raises(ValueError, match=f"classes-per-client={alpha}: allowed are"):
        partition("quantity", balanced(10, 5), num_clients, [list(range(10))], 0, classes_per_client=alpha)


# class-share


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 12), st.integers(1, 8), st.floats(0.01, 1.0), st.integers(0, 2**32))
def test_class_share_counts(num_classes, num_clients, eta, seed):
    labels = balanced(num_classes, 20)
    result = partition("class-share", labels, num_clients, [list(range(num_classes))], seed, class_share=eta)
    per_class = counts(labels, result, num_classes)[:, 0]
    share = max(1, round(eta * num_classes))
    if num_clients * share >= num_classes:
        assert ((per_class > 0).sum(axis=1) == share).all()
    else:
        assert ((per_class > 0).sum(axis=0) == 1).all(), "too few places: one holder per class"
        assert np.ptp((per_class > 0).sum(axis=1)) <= 1, "as evenly as possible"
    assert (per_class.sum(axis=0) == 20).all()


def test_too_small_a_share_burdens_a_random_client():
    # 2 clients with one of 3 classes each: one must hold two; each 150 times of 300, sd sqrt(300 / 4) = 8.7.
    labels = balanced(3, 4)
    two = sum(
        (counts(labels, partition("class-share", labels, 2, [[0, 1, 2]], seed, class_share=0.1), 3)[0, 0] > 0).sum()
        == 2
        for seed in range(300)
    )
    assert abs(two - 150) < 44


def test_class_share_by_hand():
    # PIP: 60 % of 10 classes are 6; 30 x 6 = 180 places, 18 per class on average, 500 / 18 = 28 samples each.
    labels = balanced(10, 500)
    per_class = counts(labels, partition("class-share", labels, 30, [list(range(10))], 0, class_share=0.6), 10)[:, 0]
    assert ((per_class > 0).sum(axis=1) == 6).all()
    assert (per_class > 0).sum() == 180
    assert per_class.sum() == 5000


# split-ratio


def hepco(labels, num_clients, tasks, seed=0, **changes):
    parameters = {"split_ratio": 0.1, "category_ratio": 0.6, "imbalance_ratio": 1.0, "round": 0} | changes
    return partition("split-ratio", labels, num_clients, tasks, seed, **parameters)


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({}, [50] * 6),
        ({"category_ratio": 1.0, "split_ratio": 1.0}, [500] * 10),
        ({"category_ratio": 0.05}, [50]),
        # 50 x 0.01^(i/5) = 50, 19.91, 7.92, 3.15, 1.26, 0.5 -> rounded, at least 1
        ({"imbalance_ratio": 0.01}, [50, 20, 8, 3, 1, 1]),
        # 100 x 0.5^(i/2) = 100, 70.7, 50
        ({"imbalance_ratio": 0.5, "category_ratio": 0.3, "split_ratio": 0.2}, [100, 71, 50]),
        # 0.29 x 500 = 144.99999999999997 in floating point
        ({"split_ratio": 0.29, "category_ratio": 0.1}, [145]),
    ],
)
def test_split_ratio_sizes_by_hand(changes, sizes):
    labels = balanced(10, 500)
    per_class = counts(labels, hepco(labels, 5, [list(range(10))], **changes), 10)[:, 0]
    for client in per_class:
        assert sorted(client[client > 0].tolist(), reverse=True) == sizes


def test_split_ratio_uses_each_class_own_size():
    labels = np.repeat([0, 1, 2], [300, 100, 10])
    per_class = counts(labels, hepco(labels, 4, [[0, 1, 2]], category_ratio=1.0), 3)[:, 0]
    assert per_class.tolist() == [[30, 10, 1]] * 4


def test_the_largest_class_is_a_random_one():
    # 200 clients, 4 classes: 50 expected, sd sqrt(200 x 3/16) = 6.1; five of them are 31.
    labels = balanced(4, 100)
    per_class = counts(labels, hepco(labels, 200, [[0, 1, 2, 3]], imbalance_ratio=0.1, category_ratio=1.0), 4)[:, 0]
    assert np.abs(np.bincount(per_class.argmax(axis=1), minlength=4) - 50).max() < 31


def test_rounds_clients_and_tasks_draw_afresh():
    labels, tasks = balanced(20, 100), [list(range(10)), list(range(10, 20))]
    first, again, second = (hepco(labels, 6, tasks, round=r) for r in (0, 0, 1))
    assert equal(first, again)
    assert len({a.tobytes() for a in itertools.chain(*first, *second)}) == 24


def test_a_client_draws_the_same_whoever_else_takes_part():
    labels, tasks = balanced(20, 50), [list(range(10)), list(range(10, 20))]
    assert equal(hepco(labels, 9, tasks)[:3], hepco(labels, 3, tasks))


# consensus


@pytest.mark.parametrize(
    ("problem", "sizes"),
    [
        ((100, 3, 0.5), (25, 25, 0)),
        ((100, 3, 0.2), (10, 40, 30)),
        ((10, 3, 0.2), (1, 4, 3)),
        ((100, 1, 0.5), (50, 50, 0)),
        ((100, 3, 1.0), (100, 0, 0)),
        ((100, 2, 0.0), (0, 50, 0)),
        # two clients with half of the classes could not cover them: K = 67 has 34 + 2 x 33 = 100
        ((100, 2, 0.5), (34, 33, 0)),
        ((7, 20, 0.5), (2, 2, 35)),
    ],
)
def test_consensus_sizes_by_hand(problem, sizes):
    assert consensus_sizes(*problem) == sizes


@settings(max_examples=80, deadline=None)
@given(st.integers(2, 30), st.integers(1, 12), st.floats(0, 1), st.integers(0, 2**32), st.data())
def test_consensus_classes(num_classes, num_clients, rate, seed, data):
    sizes = consensus_sizes(num_classes, num_clients, rate)
    num_tasks = data.draw(st.integers(1, sizes.common + sizes.private))
    streams = consensus_tasks(tasks_of(num_classes, num_tasks), num_clients, seed, consensus_rate=rate)
    sets = [{c for task in tasks for c in task} for tasks in streams]
    assert [sum(map(len, tasks)) for tasks in streams] == [len(s) for s in sets] == [sum(sizes[:2])] * num_clients
    assert all(
        [len(t) for t in tasks] == [len(t) for t in split_tasks(range(sum(sizes[:2])), num_tasks)] for tasks in streams
    )
    holders = np.array(sorted(sum(c in s for s in sets) for c in range(num_classes)))
    private = holders[: num_classes - sizes.common]
    assert (holders[num_classes - sizes.common :] == num_clients).all(), "common to all"
    assert (holders >= 1).all(), "no class is lost"
    assert private.sum() - len(private) == sizes.overlap
    assert not len(private) or np.ptp(private) <= 1, "as little overlap as possible"


def test_consensus_clients_shuffle_for_themselves():
    streams = consensus_tasks(tasks_of(100, 5), 3, 0, consensus_rate=1.0)
    assert streams[0] != streams[1] != streams[2] != streams[0]
    assert [sorted(c for t in tasks for c in t) for tasks in streams] == [list(range(100))] * 3


def test_consensus_samples_are_split_evenly_among_the_holders():
    labels, tasks = balanced(100, 30), tasks_of(100, 10)
    result = partition("consensus", labels, 3, tasks, 4, consensus_rate=0.2)
    streams = consensus_tasks(tasks, 3, 4, consensus_rate=0.2)
    per_class = counts(labels, result, 100).sum(axis=1)
    for c in range(100):
        holders = [m for m in range(3) if any(c in t for t in streams[m])]
        assert per_class[:, c].tolist() == [30 // len(holders) if m in holders else 0 for m in range(3)]


def test_more_tasks_than_classes_of_a_client_are_refused():
    with pytest.raises(ValueError, match="num-tasks=6: allowed are 1 to 5"):
        consensus_tasks(tasks_of(10, 6), 3, 0, consensus_rate=0.2)


def test_registry_is_tested_whole():
    assert set(PARTITIONS) == set(NAMES)
