"""Whatever a client answers: mutated replies of every method through the server's own checks and its whole round."""

import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server_app.errors import RunError
from server_app.rounds.aggregation import RoundAggregator
from server_app.rounds.run import Run
from server_app.run_files.results import RoundReport
from server_app.transport.base import SMALL_ANSWER, Reply
from server_app.transport.in_process import InProcessTransport
from strategies.base import RoundContext, Update
from strategies.closed_form import Spectrum, solve_ridge
from task.config.parsing import parse
from task.message import Arrays, Kind, Packet
from task.methods import METHODS
from task.prototypes.gaussians import cholesky, cholesky_fails, pack_symmetric, unpack_symmetric
from tests.conftest import QUICK, TINY

# whatever an accepted reply sets off must be quick: it happens hundreds of times
QUICKER: dict[str, dict[str, Any]] = {
    "hgp": {"hgp-samples-per-class": 4, "hgp-epochs": 1},
    "ccvr": {"ccvr-samples-per-class": 4, "ccvr-epochs": 1},
    "fedslca": {"fedslca-samples-per-class": 4, "fedslca-epochs": 1},
    "fppl": {"fppl-debias-epochs": 1},
    "hepco": QUICK["hepco"] | {"hepco-generator-steps": 2, "hepco-prompt-steps": 2, "hepco-head-steps": 2},
}
PACKINGS = {
    "hgp-full": {"method": "hgp", "hgp-covariance": "full"},
    "hgp-low-rank": {"method": "hgp", "hgp-covariance": "low-rank", "hgp-rank": 2},
    "ccvr-diagonal": {"method": "ccvr", "ccvr-covariance": "diagonal"},
    "afcl-regularised": {"method": "afcl", "afcl-head": "regularised", "afcl-rank": 4, "afcl-dtype": "fp16"},
    "afcl-sketch": {"method": "afcl", "afcl-head": "discriminant", "afcl-sketch": 9},
}
EVERY: dict[str, dict[str, Any]] = {name: {"method": name} for name in METHODS} | PACKINGS
VICTIM = 0  # of the clients, the one that a method with pooled data gives them to


@dataclass
class Given:
    """A transport whose clients answer what a test says."""

    replies: Sequence[Reply] = ()

    def nodes(self) -> list[int]:
        return [r.node for r in self.replies]

    def busy(self) -> set[int]:
        return set()

    def exchange(
        self, kind: Kind, packets: Mapping[int, Packet], timeout: float, largest_answer: int = 0
    ) -> Iterable[Reply]:
        return list(self.replies)


class HonestRound:
    """A run before its first round, what its honest clients answer to that, and what the round makes of the others."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.honest = list(run.exchange("train", self.context, run.registry.clients, run.model.export()))
        self.model, self.memory = run.model.export(), copy.copy(vars(run.strategy))
        silent = Reply(run.registry.clients[VICTIM].node, None, "no answer", 0, 0)
        # where data are pooled, nobody but the victim has any
        self.without = self.model if run.config.method_row.pooled else self.play(self.with_one(silent))[1]

    @property
    def context(self) -> RoundContext:
        return RoundContext(self.run.scenario.schedule, 1)

    def with_one(self, bad: Reply) -> list[Reply]:
        return [bad if i == VICTIM else r for i, r in enumerate(self.honest)]

    def reset(self) -> None:
        self.run.model.load(self.model)
        vars(self.run.strategy).clear()
        vars(self.run.strategy).update(self.memory)

    def play(self, replies: Sequence[Reply]) -> tuple[RoundReport, Arrays]:
        """The server's whole round on these replies, and the model afterwards; the run itself is put back."""
        self.run.transport = Given(replies)
        try:
            report = self.run.train_round(self.context)
            return report, self.run.model.export()
        finally:
            self.reset()


def honest_round_of(values: dict[str, Any], folder: Path) -> HonestRound:
    quick = QUICKER.get(str(values["method"]), {})
    # of 12 classes the first task has 6, so that there are unknown ones
    config = parse(TINY | quick | values | {"output-dir": str(folder), "run-name": "run", "backbone": "vit_glyphs"})
    run = Run(config, InProcessTransport(config.num_clients), folder / "run", None, ExitStack())
    return HonestRound(run)


@pytest.fixture(scope="module")
def honest_rounds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], HonestRound]:
    made: dict[str, HonestRound] = {}

    def find(name: str) -> HonestRound:
        if name not in made:
            made.clear()  # a trained backbone's are large
            made[name] = honest_round_of(EVERY[name], tmp_path_factory.mktemp(name))
        return made[name]

    return find


VALUES = (np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-45, -1e-45, 1.0, -1.0, 1e6, -1e6, 1.1e6, 1e15, 1e19, -1e30, 3.4e38)
TYPES = ["float16", "float64", ">f4", ">i8", "int8", "int32", "int64", "uint8", "uint64", "bool", "complex64", "object"]
TYPES += ["U8", "S8", "datetime64[s]"]
WHOLE = (-(2**63), -1, 0, 1, 2, 5, 11, 12, 10**6, 2**31, 2**62, 2**63 - 1)


def poisoned(array: np.ndarray, draw: st.DrawFn) -> np.ndarray:
    """One number, a row, every other, or all of them replaced or multiplied."""
    array = array.copy()
    flat = array.reshape(-1)
    place = draw(st.integers(0, max(len(flat) - 1, 0)))
    where = draw(st.sampled_from([slice(place, place + 1), slice(place, None), slice(None, None, 2), slice(None)]))
    with np.errstate(all="ignore"):
        value = np.array(draw(st.sampled_from(WHOLE if array.dtype.kind in "iu" else VALUES))).astype(array.dtype)
        flat[where] = flat[where] * value if draw(st.booleans()) else value
    return array


def retyped(array: np.ndarray, draw: st.DrawFn) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.trunc(array).astype(draw(st.sampled_from(TYPES)))


def reshaped(array: np.ndarray, draw: st.DrawFn) -> np.ndarray:
    change: Callable[[np.ndarray], np.ndarray] = draw(
        st.sampled_from(
            [
                lambda a: a[None],
                lambda a: a[..., None],
                lambda a: a.reshape(-1)[:-1],
                lambda a: a[:0],
                lambda a: a[1:],
                lambda a: np.concatenate([a, a]),
                lambda a: a.T.copy(),
                lambda a: np.array(a.reshape(-1)[:1].sum(), a.dtype),  # of no dimension
                lambda a: np.empty((0, *a.shape), a.dtype),
                lambda a: np.asfortranarray(a),
            ]
        )
    )
    return change(np.atleast_1d(array))


def symmetric(array: np.ndarray, draw: st.DrawFn) -> np.ndarray:
    """Packed matrices with eigenvalues of any sign and scale, or no matrix at all."""
    scale = draw(st.sampled_from([1e-40, 1e-20, 1e-9, 1.0, 1e5, 9e5]))
    drawn = np.random.default_rng(draw(st.integers(0, 2**16))).standard_normal(array.shape)
    return (drawn * scale).astype(array.dtype) if draw(st.booleans()) else -array


CHANGES = (poisoned, poisoned, retyped, reshaped, symmetric)
JUNK = (np.nan, np.inf, -1, 0, 1, 1.0, 1.5, True, False, None, "3", "", "\x1b[31m" + "x" * 600, 10**400, -(10**12))
JUNK += ([], [1.0], {}, 2**63 - 1, np.int64(3), np.float32("nan"), b"\x00", 1e308, -1e308)
METRICS = ("num-examples", "num-examples", "loss", "accuracy", "seconds-train", "seconds-statistics", "other")


class Bad:
    """A reply and what was done to it; the reply itself would fill pages when a test fails."""

    def __init__(self, packet: Packet) -> None:
        self.packet, self.steps = packet, list[str]()

    def __repr__(self) -> str:
        return "; ".join(self.steps)


@st.composite
def mutations(draw: st.DrawFn, honest_round: HonestRound) -> Bad:
    """A reply in which one to three things are otherwise than an honest client sends them."""
    good = honest_round.honest[VICTIM].packet
    assert good
    bad = Packet(dict(good.arrays), dict(good.statistics), dict(good.metrics), dict(good.config))
    made = Bad(bad)
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["arrays", "arrays", "prototypes", "prototypes", "names", "metrics", "config"]))
        if kind in ("metrics", "config"):
            name = draw(st.sampled_from(METRICS if kind == "metrics" else ["error", "name", "classes"]))
            getattr(bad, kind)[name] = draw(st.sampled_from(JUNK))
            made.steps.append(f"{name} {getattr(bad, kind)[name]!r:.40}")
        else:
            made.steps.append(mutate(getattr(bad, kind, bad.statistics or bad.arrays), kind == "names", draw))
    return made


def mutate(arrays: Arrays, rename: bool, draw: st.DrawFn) -> str:
    """One array changed, dropped, under another name, or one too many; says which."""
    if not arrays or rename:
        extra = draw(st.sampled_from(["backbone", "means", "scatter", "counts", "\x1b[2J" + "y" * 600, ""]))
        value = np.zeros(draw(st.sampled_from([(), (1,), (0, 4), (2, 64)])), np.float32)
        arrays[extra] = arrays.pop(min(arrays)) if arrays and draw(st.booleans()) else value
        return f"an array {extra[:20]!r}"
    name = draw(st.sampled_from(sorted(arrays)))
    if arrays[name].dtype.kind not in "fiu" or draw(st.integers(0, 9)) == 0:
        del arrays[name]
        return f"no {name}"
    change = draw(st.sampled_from(CHANGES))
    arrays[name] = np.asarray(change(arrays[name], draw))
    return f"{name} {change.__name__}: {arrays[name].reshape(-1)[:4]}"


def same(ours: Arrays, theirs: Arrays) -> bool:
    return ours.keys() == theirs.keys() and all(ours[n].tobytes() == theirs[n].tobytes() for n in ours)


def check(honest_round: HonestRound, bad: Reply, seen: list[Reply]) -> None:
    """A refused reply is named and touches nothing; one that gets through leaves a finite model."""
    run, name = honest_round.run, honest_round.run.registry.clients[VICTIM].name
    report = RoundReport(1, 1, [m.name for m in run.registry.clients])
    aggregator, shown = (
        RoundAggregator(run.config, run.strategy, run.model, honest_round.context, run.registry.clients),
        list[Update](),
    )
    aggregator.collect(
        honest_round.with_one(bad),
        report,
        lambda update: shown.append(replace(update, statistics={**update.statistics})) or [],
    )
    honest_round.reset()
    assert [u.client for u in aggregator.updates] == [u.client for u in shown]
    others = [u for u in shown if u.client != name]
    assert [u.client for u in others] == [m.name for m in run.registry.clients if m.name not in [name, *report.idle]]
    for update in others:
        packet = honest_round.honest[[m.name for m in run.registry.clients].index(update.client)].packet
        assert packet
        assert update.arrays is packet.arrays
        assert update.statistics.keys() == packet.statistics.keys()
        assert all(array is packet.statistics[name] for name, array in update.statistics.items())
    if not report.failures:
        report, model = honest_round.play(honest_round.with_one(bad))
        assert all(np.isfinite(a).all() for a in model.values())
        json.dumps(run.results.as_dict(), allow_nan=False)
        assert not report.failures
    else:
        (failure,) = report.failures
        assert failure["name"] == name
        assert 0 < len(failure["reason"]) <= 300
        assert failure["reason"].isprintable()
        seen.append(bad)


def attack(honest_round: HonestRound, examples: int) -> None:
    refused: list[Reply] = []

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True, suppress_health_check=HealthCheck)
    @given(mutations(honest_round))
    def one(bad: Bad) -> None:
        check(honest_round, replace(honest_round.honest[VICTIM], packet=bad.packet), refused)

    one()
    assert len(refused) > examples / 3  # most mutations must be bad ones, or this shows little
    for bad in refused[:: len(refused) // 5]:
        whole_rounds(honest_round, bad)


def whole_rounds(honest_round: HonestRound, bad: Reply) -> None:
    """One bad reply of several: as if it had never come. Nothing but bad ones: nothing changes, and the run says so."""
    if not honest_round.run.config.method_row.pooled:
        report, model = honest_round.play(honest_round.with_one(bad))
        assert [f["name"] for f in report.failures] == [honest_round.run.registry.clients[VICTIM].name]
        assert same(model, honest_round.without)
    honest_round.run.transport = Given([replace(bad, node=m.node) for m in honest_round.run.registry.clients])
    with pytest.raises(RunError, match="0 of 3 clients answered, the quorum is 1"):
        honest_round.run.train_round(honest_round.context)
    assert same(honest_round.run.model.export(), honest_round.model)
    assert all(vars(honest_round.run.strategy)[n] is value for n, value in honest_round.memory.items())


def covariance_with(lowest: float) -> np.ndarray:
    """Packed float32 [1, D (D + 1) / 2] of trace 1 and D = 112, whose lowest eigenvalue is ``lowest``."""
    turn, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((112, 112)))
    values = np.r_[lowest, np.full(111, (1 - lowest) / 111)]
    return pack_symmetric((turn * values @ turn.T)[None]).astype(np.float32)


def test_a_covariance_that_passes_is_one_for_all_that_follows() -> None:
    """The check leaves room for rounding, so that no factor is ever that of an indefinite matrix."""
    assert cholesky_fails(covariance_with(-7e-7), 112)
    near = covariance_with(-4e-7)
    assert not cholesky_fails(near, 112)
    factor, failed = cholesky(torch.from_numpy(unpack_symmetric(near * np.float32(1 / 3) * 3, 112)))
    assert not failed
    assert np.allclose(factor[0] @ factor[0].T, unpack_symmetric(near, 112)[0], atol=2e-6)


def test_a_regression_on_an_indefinite_sum_does_not_grow_in_its_bad_directions() -> None:
    """By hand: (3 + 1)^-1 4 = 1, and (2 + 1)^-1 5 instead of (-2 + 1)^-1 5: an error of 2 is seen, so it may be 2."""
    indefinite = Spectrum.of_matrix(torch.diag(torch.tensor([3.0, -2.0]).double()))
    weight = solve_ridge(indefinite, torch.tensor([[4.0, 5.0]]).double(), 1.0)
    assert weight.numpy() == pytest.approx(np.array([[1.0, 5 / 3]]))


def test_slightly_indefinite_sums_of_one_client_do_not_end_the_run(honest_rounds: Callable[[str], HonestRound]) -> None:
    """Rounding cannot be told from this much, so it passes the checks; Cholesky would raise on it."""
    honest_round = honest_rounds("afcl")
    good = honest_round.honest[VICTIM].packet
    assert good
    scatter = pack_symmetric(np.diag(np.r_[np.full(100, 10.0), np.full(12, -1e-8)])[None]).astype(np.float32)
    bad = replace(honest_round.honest[VICTIM], packet=replace(good, statistics=good.statistics | {"scatter": scatter}))
    report, model = honest_round.play(honest_round.with_one(bad))
    assert not report.failures
    assert not report.dropped
    assert all(np.isfinite(a).all() for a in model.values())


@pytest.mark.parametrize("name", ["hgp", "afcl", "ncm"])
def test_means_ten_times_as_large_as_any_feature_are_refused(
    name: str, honest_rounds: Callable[[str], HonestRound]
) -> None:
    """They are well-formed, and would outweigh those of all other clients."""
    honest_round = honest_rounds(name)
    good = honest_round.honest[VICTIM].packet
    assert good
    statistics = good.statistics | {"means": 10 * good.statistics["means"]}
    bad = replace(honest_round.honest[VICTIM], packet=replace(good, statistics=statistics))
    report, _ = honest_round.play(honest_round.with_one(bad))
    (failure,) = report.failures
    assert failure["reason"].startswith("means are those of features of norm ")


@pytest.mark.ci
@pytest.mark.parametrize("name", EVERY)
def test_mutated_replies_are_refused_or_harmless(name: str, honest_rounds: Callable[[str], HonestRound]) -> None:
    honest_round = honest_rounds(name)
    assert_below_the_largest_answer(honest_round)
    attack(honest_round, 40)


def assert_below_the_largest_answer(honest_round: HonestRound) -> None:
    run, clients = honest_round.run, honest_round.run.registry.clients
    aggregator = RoundAggregator(run.config, run.strategy, run.model, honest_round.context, clients)
    names_and_metrics = 10_000
    sizes = [reply.bytes_up for reply in honest_round.honest]
    assert 0 < max(sizes) <= aggregator.largest_answer() - SMALL_ANSWER + names_and_metrics


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_two_thousand_mutated_replies_are_refused_or_harmless(
    name: str, honest_rounds: Callable[[str], HonestRound]
) -> None:
    attack(honest_rounds(name), 2000)
