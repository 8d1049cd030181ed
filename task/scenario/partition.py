"""Who holds which training sample: the partitions of the federated class-incremental literature.

Every partition is a pure function of (labels, number of clients, tasks, seed, its own parameters) with bounded work.
Each task draws from a stream of its own, so that what it deals out does not depend on the tasks after it. ("consensus"
is the exception: its clients share no tasks.)
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from task.scenario.class_stream import split_tasks
from task.utils.seeding import numpy_rng

IntArray = npt.NDArray[np.int64]
Partition = list[list[IntArray]]
Rng = np.random.Generator


def partition(
    name: str,
    labels: npt.ArrayLike,
    num_clients: int,
    tasks: Sequence[Sequence[int]],
    seed: int,
    **parameters: float,
) -> Partition:
    """Sample indices of every client and task.

    Args:
        name: a key of ``PARTITIONS``.
        labels: [N] integer class id of each sample.
        num_clients: M.
        tasks: T lists of class ids, no class twice; an empty task, or a class without samples, is legal. The samples of
            classes in no task are dealt to nobody.
        seed: the run's seed.
        **parameters: those of the partition, see the function of that name; the run keys say how large they may be.

    Returns:
        List over M clients of lists over T tasks of sorted int64 index arrays; an empty array is legal. No sample is in
        two arrays and none of the tasks' samples is missing, but for "split-ratio", whose clients overlap. For
        "consensus" entry t of a client is its OWN task t (see ``consensus_tasks``).

    Raises:
        ValueError: no partition of this name, or a combination of parameters that cannot be met.
    """
    if name not in PARTITIONS:
        raise ValueError(f"partition={name!r}: allowed are {', '.join(PARTITIONS)}")
    array = np.asarray(labels)
    order = np.argsort(array, kind="stable")
    present, starts = np.unique(array[order], return_index=True)
    samples = dict(zip(present.tolist(), np.split(order, starts[1:]), strict=False))
    class_ids = [[int(c) for c in task] for task in tasks]  # also from arrays, whose numbers are no keys of a dict
    return PARTITIONS[name](Problem(samples, num_clients, class_ids, seed), **parameters)


@dataclass(frozen=True)
class Problem:
    """Input of a partition: the sorted sample indices of each class, the number of clients, the tasks and the seed."""

    samples: dict[int, IntArray]
    num_clients: int
    tasks: Sequence[Sequence[int]]
    seed: int

    def pools(self, task: int) -> list[IntArray]:
        """Sample indices of each class of the task, in the task's class order."""
        return [self.samples.get(c, np.empty(0, np.int64)) for c in self.tasks[task]]


def iid(problem: Problem) -> Partition:
    """Deal each task's samples, shuffled over its classes, in equal parts (sizes differ by at most one)."""

    def owners(rng: Rng, pools: list[IntArray]) -> IntArray:
        return _even_owners(rng, sum(map(len, pools)), np.arange(problem.num_clients))

    return _deal(problem, "iid", owners)


def dirichlet(problem: Problem, *, dirichlet_beta: float, dirichlet_min_size: int = 0) -> Partition:
    """Deal each class of a task in shares p ~ Dir(beta 1_M) (HGP, FPPL and FedProK, experimental settings).

    The shuffled samples of a class are cut at the cumulative p; cuts are rounded at random, so that a client expects
    exactly its share even when there are more clients than samples.

    ``dirichlet_beta`` is beta > 0: small is heterogeneous, large is near iid. Each client gets at least
    ``dirichlet_min_size`` samples of each task; clients that hold more give them away.

    Raises:
        ValueError: a task with fewer than M x dirichlet_min_size samples.
    """

    def owners(rng: Rng, pools: list[IntArray]) -> IntArray:
        drawn = [_dirichlet_owners(rng, len(pool), problem.num_clients, dirichlet_beta) for pool in pools]
        return _raise_to_minimum(rng, _concatenate(drawn), problem.num_clients, dirichlet_min_size)

    return _deal(problem, "dirichlet", owners)


def quantity(problem: Problem, *, classes_per_client: int) -> Partition:
    """Give each client exactly alpha of the task's classes, each class to at least one client (HGP, experiments).

    The samples of a class are split evenly among its holders. A holder gets none when a class has more holders than
    samples.

    ``classes_per_client`` is alpha, 1 to the number of classes of every task, with M x alpha at least that number.

    Raises:
        ValueError: alpha out of that range, with what to change.
    """
    for t, classes in enumerate(problem.tasks):
        fewest = math.ceil(len(classes) / problem.num_clients)
        if classes and not fewest <= classes_per_client <= len(classes):
            raise ValueError(
                f"classes-per-client={classes_per_client}: allowed are {fewest} to {len(classes)} for the "
                f"{len(classes)} classes of task {t + 1} and {problem.num_clients} clients, so that every class has a "
                "holder; change classes-per-client, the number of clients or the number of tasks"
            )
    return _deal_by_class(problem, "quantity", lambda num_classes: classes_per_client)


def class_share(problem: Problem, *, class_share: float) -> Partition:
    """Give each client a random share eta of the task's classes (PIP, experimental setting: eta = 0.6).

    A client holds max(1, round(eta |C|)) of the task's |C| classes. Every class has a holder, so that no sample is
    lost: each is first given to one client, in turn; a client's other classes are drawn uniformly. (Classes are then a
    little more evenly held than if one drew anew until all are.) Where the clients' classes cannot cover the task (M x
    round(eta |C|) < |C|), all classes are dealt out evenly instead, each to one client: some then hold more than their
    share. The samples of a class are divided evenly among its holders, without overlap.
    """
    return _deal_by_class(problem, "class-share", lambda num_classes: _share_of(class_share, num_classes))


def split_ratio(
    problem: Problem, *, split_ratio: float, category_ratio: float, imbalance_ratio: float, round: int = 0
) -> Partition:
    """Stateless clients (HePCo, experimental setting): a fresh draw per round, clients may overlap.

    Each client draws n = max(1, round(kappa |C|)) of the task's |C| classes in random order; of the i-th (from 0) it
    draws round(gamma N_c beta^(i / (n - 1))) of the class's N_c samples without replacement, at least one, so that a
    client really has n classes. A client's draw depends on no other client. A caller that wants one task of the round
    leaves the other tasks empty.

    Args:
        problem: what is dealt out.
        split_ratio: gamma in (0, 1], share of a class's samples.
        category_ratio: kappa in (0, 1], share of the task's classes.
        imbalance_ratio: beta in (0, 1], smallest over largest class of a client; 1 is balanced.
        round: index of the draw, from 0; the same index gives the same draw.
    """

    def draw(task: int, client: int) -> IntArray:
        rng = numpy_rng(problem.seed, "partition/split-ratio", task, round, client)
        pools = problem.pools(task)
        chosen = rng.permutation(len(pools))[: _share_of(category_ratio, len(pools))]
        tail = imbalance_ratio ** (np.arange(len(chosen)) / max(len(chosen) - 1, 1))
        sizes = np.maximum(1, np.rint([split_ratio * f * len(pools[j]) for j, f in zip(chosen, tail, strict=True)]))
        drawn = [_subset(rng, pools[j], int(size)) for j, size in zip(chosen, sizes, strict=True)]
        return np.sort(_concatenate(drawn))

    return [[draw(t, client) for t in range(len(problem.tasks))] for client in range(problem.num_clients)]


def consensus(problem: Problem, *, consensus_rate: float) -> Partition:
    """Asynchronous clients (FedProK, asynchronous setting): common and private classes in each client's OWN tasks.

    Who holds which class in which task is ``consensus_tasks``. The samples of a class are split evenly at random among
    all its holders, a private class that overlap gave to several clients included.

    ``consensus_rate`` is gamma in [0, 1], common classes over classes of a client.

    Raises:
        ValueError: fewer classes per client than tasks.
    """
    streams = consensus_tasks(problem.tasks, problem.num_clients, problem.seed, consensus_rate=consensus_rate)
    num_tasks = len(problem.tasks)
    holders: dict[int, list[int]] = defaultdict(list)  # by class; task t of client m is holder m * num_tasks + t
    for holder, classes in enumerate(classes for tasks in streams for classes in tasks):
        for label in classes:
            holders[label].append(holder)
    pools = {label: problem.samples[label] for label in sorted(holders.keys() & problem.samples.keys())}
    owners = [
        _even_owners(numpy_rng(problem.seed, "partition/consensus", label), len(pool), np.array(holders[label]))
        for label, pool in pools.items()
    ]
    dealt = _gather(_concatenate(list(pools.values())), _concatenate(owners), problem.num_clients * num_tasks)
    return [dealt[m * num_tasks : (m + 1) * num_tasks] for m in range(problem.num_clients)]


class ConsensusSizes(NamedTuple):
    """Class counts of the asynchronous setting: common to all clients, private to one, private places taken twice."""

    common: int
    private: int
    overlap: int


def consensus_sizes(num_classes: int, num_clients: int, consensus_rate: float) -> ConsensusSizes:
    """How many common and private classes each client has, and how often a "private" class cannot be private.

    A client has K classes, round(gamma K) of them common. K is half of all classes, as in FedProK's CIFAR-100 setting,
    or the smallest larger number with which every class is held by somebody. ``overlap`` is the number of private
    places beyond one per class. CIFAR-100 with three clients: gamma = 0.5 needs 25 + 3 x 25 = 100 classes;
    gamma = 0.2 needs 10 + 3 x 40 = 130, so 30 classes are held by a second client.

    >>> consensus_sizes(100, 3, 0.2)
    ConsensusSizes(common=10, private=40, overlap=30)
    """

    def sizes(per_client: int) -> ConsensusSizes:
        common = round(consensus_rate * per_client)
        private = per_client - common
        return ConsensusSizes(common, private, common + num_clients * private - num_classes)

    half = math.ceil(num_classes / 2)
    return next(s for s in map(sizes, range(half, num_classes + 1)) if s.overlap >= 0)


def consensus_tasks(
    tasks: Sequence[Sequence[int]], num_clients: int, seed: int, *, consensus_rate: float
) -> list[list[list[int]]]:
    """Each client's own class sequence in the asynchronous setting of FedProK.

    The common classes are drawn at random; the others are dealt out as private ones with as little overlap as possible
    (the numbers of holders of any two differ by at most one). Each client shuffles its classes into T tasks of its own.

    Args:
        tasks: T lists of class ids; only T and the union of the classes matter.
        num_clients: M.
        seed: the run's seed; ``partition("consensus", ...)`` with it deals samples for these sequences.
        consensus_rate: gamma in [0, 1], see ``consensus_sizes``.

    Returns:
        List over M clients of lists over T tasks of class ids, as even as ``class_stream.split_tasks`` makes them.

    Raises:
        ValueError: a client would have fewer classes than tasks.
    """
    classes = sorted(c for task in tasks for c in task)
    sizes = consensus_sizes(len(classes), num_clients, consensus_rate)
    if len(tasks) > sizes.common + sizes.private:
        raise ValueError(
            f"num-tasks={len(tasks)}: allowed are 1 to {sizes.common + sizes.private}, the number of classes of a "
            f"client when {num_clients} clients share {len(classes)} classes at consensus-rate={consensus_rate}"
        )
    drawn = numpy_rng(seed, "partition/consensus-classes").permutation(classes)
    common, rest = np.split(drawn, [sizes.common])
    private = np.resize(rest, (num_clients, sizes.private))
    streams = [
        numpy_rng(seed, "partition/consensus-order", m).permutation(np.concatenate([common, private[m]])).tolist()
        for m in range(num_clients)
    ]
    return [split_tasks(stream, len(tasks)) for stream in streams]


PARTITIONS: dict[str, Callable[..., Partition]] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "quantity": quantity,
    "class-share": class_share,
    "split-ratio": split_ratio,
    "consensus": consensus,
}


def _deal(problem: Problem, name: str, owners: Callable[[Rng, list[IntArray]], IntArray]) -> Partition:
    """Deal each task's samples to their owners: ``owners`` gives a client for each entry of the concatenated pools."""
    dealt = []
    for t in range(len(problem.tasks)):
        pools = problem.pools(t)
        owner = owners(numpy_rng(problem.seed, f"partition/{name}", t), pools)
        dealt.append(_gather(_concatenate(pools), owner, problem.num_clients))
    return [[task[m] for task in dealt] for m in range(problem.num_clients)]


def _deal_by_class(problem: Problem, name: str, classes_of: Callable[[int], int]) -> Partition:
    """Each client holds ``classes_of(C)`` of a task's C classes; the holders of a class share its samples evenly."""

    def owners(rng: Rng, pools: list[IntArray]) -> IntArray:
        holds = _assign_classes(rng, problem.num_clients, len(pools), classes_of(len(pools)))
        return _concatenate([_even_owners(rng, len(p), np.flatnonzero(holds[:, j])) for j, p in enumerate(pools)])

    return _deal(problem, name, owners)


def _assign_classes(rng: Rng, num_clients: int, num_classes: int, per_client: int) -> npt.NDArray[np.bool_]:
    """Bool [M, C]: which client holds which class; ``per_client`` classes each, and every class has a holder.

    A client holds more than ``per_client`` classes only if the classes cannot be covered otherwise.
    """
    # Every class first gets a guardian, the clients in turn, so that nobody guards more than per_client classes if
    # that can cover all. A client's other classes are a uniform choice: those with the smallest keys.
    guardians = np.resize(rng.permutation(num_clients), num_classes)
    guarded = rng.permutation(num_classes)
    keys = rng.random((num_clients, num_classes))
    keys[guardians, guarded] = -1
    holds = np.zeros(keys.shape, bool)
    np.put_along_axis(holds, np.argsort(keys, axis=1)[:, :per_client], True, axis=1)
    holds[guardians, guarded] = True
    return holds


def _even_owners(rng: Rng, size: int, holders: IntArray) -> IntArray:
    """[size] random owners among the holders, as even as possible."""
    # The holders are permuted too: otherwise the first ones would get the remainder of every class.
    return rng.permutation(np.resize(rng.permutation(holders), size))


def _dirichlet_owners(rng: Rng, size: int, num_clients: int, beta: float) -> IntArray:
    """[size] owners of a class's samples, in shares p ~ Dir(beta)."""
    # Beyond 1e12 nothing changes any more, except that the sum of NumPy's gamma draws would overflow.
    shares = rng.dirichlet(np.full(num_clients, min(beta, 1e12)))
    quantiles = (np.arange(size) + rng.random()) / size
    return rng.permutation(np.searchsorted(np.cumsum(shares)[:-1], quantiles, side="right"))


def _raise_to_minimum(rng: Rng, owner: IntArray, num_clients: int, min_size: int) -> IntArray:
    """Owners 0 .. M - 1, [N]: each client has ``min_size`` samples, moved from a random choice of what others spare."""
    if len(owner) < num_clients * min_size:
        raise ValueError(
            f"dirichlet-min-size={min_size}: allowed are 0 to {len(owner) // num_clients} for a task of {len(owner)} "
            f"samples and {num_clients} clients"
        )
    counts = np.bincount(owner, minlength=num_clients)
    receivers = np.repeat(np.arange(num_clients), np.maximum(min_size - counts, 0))
    shuffled = rng.permutation(len(owner))
    by_owner = shuffled[np.argsort(owner[shuffled], kind="stable")]
    rank = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    moved = rng.choice(by_owner[rank >= min_size], len(receivers), replace=False)
    lifted = owner.copy()
    lifted[moved] = receivers
    return lifted


def _subset(rng: Rng, pool: IntArray, size: int) -> IntArray:
    return rng.choice(pool, min(size, len(pool)), replace=False, shuffle=False) if len(pool) else pool


def _gather(samples: IntArray, owner: IntArray, num_clients: int) -> list[IntArray]:
    """Sorted samples of each owner 0 .. num_clients - 1."""
    counts = np.bincount(owner, minlength=num_clients)
    return np.split(samples[np.lexsort((samples, owner))], np.cumsum(counts)[:-1])


def _concatenate(arrays: list[IntArray]) -> IntArray:
    return np.concatenate([np.empty(0, np.int64), *arrays])


def _share_of(share: float, number: int) -> int:
    return min(number, max(1, round(share * number)))
