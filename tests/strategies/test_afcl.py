"""AFCL and FedRDA: the head equals the centralised one, whatever the partition and the order of everything."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

from server_app.rounds.run import run_experiment
from server_app.transport.base import Reply
from server_app.transport.in_process import InProcessTransport
from strategies.afcl import AFCL
from strategies.base import RoundContext, Update
from strategies.closed_form import GRID, Spectrum, choose_shrinkage
from task.config.parsing import parse
from task.message import Arrays, Kind, Packet
from task.method_options import AFCLOptions
from task.models.evaluation import extract_features
from task.models.model import Head, Model, build_model
from task.prompt_kinds import PROMPTS
from task.prototypes.scatter import ScatterStatistics, sketch_matrix
from task.scenario.class_stream import Schedule
from task.scenario.scenario import build_scenario
from tests.helpers.runs import FaultyTransport, Values, model_of, results_of

PARTITIONS: dict[str, Values] = {
    "one client, one task": {"partition": "iid", "num-clients": 1, "num-tasks": 1},
    "dirichlet": {"partition": "dirichlet", "dirichlet-beta": 0.05, "num-clients": 7},
    "quantity": {"partition": "quantity", "classes-per-client": 2, "num-clients": 4, "class-order": "given"},
    "two rounds": {"partition": "iid", "num-clients": 3, "num-tasks": 6, "rounds-per-task": 2},
    "class-share": {"partition": "class-share", "class-share": 0.5, "num-clients": 4},
    "consensus 0.2": {"partition": "consensus", "consensus-rate": 0.2, "num-clients": 3},
    "consensus 0.5": {"partition": "consensus", "consensus-rate": 0.5, "num-clients": 3, "num-tasks": 3},
}
EXACT: Values = {"method": "afcl", "afcl-dtype": "fp64"}


class Pooled:
    """A finished run, and all its training images in one place: features float64 [N, M], head rows [N]."""

    def __init__(self, values: Values) -> None:
        self.config = parse(values)
        self.folder = run_experiment(self.config, InProcessTransport(self.config.flat(), self.config.num_clients))
        self.results = results_of(self.folder)
        self.arrays = safetensors.numpy.load_file(self.folder / "model.safetensors")
        self.model = build_model(self.config, [len(task) for task in self.results["tasks"]])
        self.model.load(self.arrays)
        data = build_scenario(self.config).dataset
        self.features = features_of(self.model, data.train_images)
        self.test_features = features_of(self.model, data.test_images)
        order = self.results["class_order"]
        self.rows = np.array([order.index(c) for c in data.train_labels])
        self.classes = len(order)


def features_of(model: Model, images: Any) -> np.ndarray:
    """Float64 [N, M], what the head takes."""
    return model.head.project(extract_features(model, images, np.arange(len(images)))).numpy().astype(np.float64)


def numpy_ridge(features: np.ndarray, rows: np.ndarray, classes: int, ridge: float) -> np.ndarray:
    """The centralised solution by NumPy's least squares on the augmented system, which forms no Gram matrix."""
    targets, dim = (rows[:, None] == np.arange(classes)).astype(np.float64), features.shape[1]
    stacked = np.concatenate([features, np.sqrt(ridge) * np.eye(dim)])
    return np.linalg.lstsq(stacked, np.concatenate([targets, np.zeros((dim, classes))]), rcond=None)[0].T


def moments(run: Pooled) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Class means [K, M], covariances [K, M, M] and the pooled one [M, M], from the raw features."""
    groups = [run.features[run.rows == c] for c in range(run.classes)]
    covariances = np.stack([np.cov(group.T) for group in groups])
    pooled = sum((len(g) - 1) * s for g, s in zip(groups, covariances, strict=True)) / (len(run.rows) - run.classes)
    return np.stack([group.mean(axis=0) for group in groups]), covariances, pooled


def numpy_discriminant(run: Pooled, shrinkage: float) -> tuple[np.ndarray, np.ndarray]:
    """Weight [K, M] and bias [K] of the linear discriminant with equal priors."""
    means, _, pooled = moments(run)
    dim = len(pooled)
    inverse = np.linalg.inv(pooled + shrinkage * np.trace(pooled) / dim * np.eye(dim))
    return means @ inverse, -0.5 * np.einsum("km,mn,kn->k", means, inverse, means)


def numpy_regularised(run: Pooled, share: float, shrinkage: float) -> np.ndarray:
    """Log density of each test image by class, [N, K], each covariance inverted by itself."""
    means, covariances, pooled = moments(run)
    dim, logits = len(pooled), np.empty((len(run.test_features), run.classes))
    for c, covariance in enumerate(covariances):
        own = share * covariance + (1 - share) * pooled + shrinkage * np.trace(pooled) / dim * np.eye(dim)
        gaps = run.test_features - means[c]
        distance = np.einsum("nm,mk,nk->n", gaps, np.linalg.inv(own), gaps)
        logits[:, c] = -0.5 * distance - 0.5 * np.linalg.slogdet(own)[1]
    return logits


def check_ridge(run: Pooled, ridge: float, bound: float = 1e-5) -> None:
    expected = numpy_ridge(run.features, run.rows, run.classes, ridge)
    assert np.abs(run.arrays["head.weight"] - expected).max() < bound * np.abs(expected).max()
    assert (run.arrays["head.bias"] == 0).all()


def check_regularised(run: Pooled, bound: float = 1e-5) -> None:
    """Up to what all classes of an image have in common; in float64, so that the solution alone is compared."""
    expected = numpy_regularised(run, share=0.1, shrinkage=run.results["rounds"][-1]["server"]["shrinkage"])
    with torch.no_grad():
        raw = torch.from_numpy(run.test_features)  # projected already
        head = run.model.head.double()
        head.projection = None
        logits = head(raw).numpy()
    logits, expected = logits - logits.mean(axis=1, keepdims=True), expected - expected.mean(axis=1, keepdims=True)
    assert np.abs(logits - expected).max() < bound * np.abs(expected).max()
    assert (logits.argmax(1) == expected.argmax(1)).mean() > 0.99


@pytest.mark.parametrize("random_features", [0, 60])
@pytest.mark.parametrize("partition", PARTITIONS)
def test_the_model_is_the_centralised_regression(partition: str, random_features: int, tiny: Values) -> None:
    keys = EXACT | {"afcl-ridge": 2.0, "afcl-random-features": random_features}
    check_ridge(Pooled(tiny | PARTITIONS[partition] | keys), 2.0)


@pytest.mark.parametrize("dtype", [("fp32", 1e-3), ("fp16", 0.2)], ids=lambda pair: pair[0])
def test_rounded_messages_change_little(dtype: tuple[str, float], tiny: Values) -> None:
    check_ridge(Pooled(tiny | EXACT | {"afcl-ridge": 2.0, "afcl-dtype": dtype[0]}), 2.0, dtype[1])


@pytest.mark.parametrize("partition", PARTITIONS)
def test_the_model_is_the_centralised_discriminant(partition: str, tiny: Values) -> None:
    run = Pooled(tiny | PARTITIONS[partition] | EXACT | {"afcl-head": "discriminant", "afcl-shrinkage": 0.05})
    weight, bias = numpy_discriminant(run, 0.05)
    assert np.abs(run.arrays["head.weight"] - weight).max() < 1e-5 * np.abs(weight).max()
    assert np.abs(run.arrays["head.bias"] - bias).max() < 1e-5 * np.abs(bias).max()


@pytest.mark.parametrize("partition", PARTITIONS)
def test_the_model_is_the_centralised_regularised_discriminant(partition: str, tiny: Values) -> None:
    """With room for all directions of each class: 112 features, at most 40 images."""
    keys = EXACT | {"afcl-head": "regularised", "afcl-rank": 40}
    check_regularised(Pooled(tiny | PARTITIONS[partition] | keys))


def test_early_features_stand_behind_the_last_ones(tiny: Values) -> None:
    keys = EXACT | {"afcl-head": "regularised", "afcl-rank": 300, "afcl-depth": 0.75}
    run = Pooled(tiny | PARTITIONS["dirichlet"] | keys)
    assert run.features.shape[1] == 224
    check_regularised(run)


def test_random_features_under_a_regularised_discriminant(tiny: Values) -> None:
    keys = EXACT | {"afcl-head": "regularised", "afcl-rank": 300, "afcl-random-features": 60}
    check_regularised(Pooled(tiny | keys))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_features_are_those_of_the_adapted_prompt(prompt: str, tiny: Values) -> None:
    """Of the final model: nothing moves after the first task's first rounds."""
    keys = EXACT | {"prompt": prompt, "afcl-ridge": 2.0, "local-epochs": 2, "num-tasks": 3}
    run = Pooled(tiny | keys | ({"afcl-adaptation-rounds": 2} if prompt != "none" else {}))
    check_ridge(run, 2.0, bound=1e-3)  # features of other batches are rounded otherwise
    start = build_model(run.config, [4])
    moved = [n for n, a in start.export().items() if n.startswith("prompt.") and (run.arrays[n] != a).any()]
    assert bool(moved) == (prompt != "none")


@pytest.mark.parametrize("prompt", ["shared", "lora"])
def test_regularised_features_are_those_of_the_adapted_prompt(prompt: str, tiny: Values) -> None:
    keys = {"fedrda-dtype": "fp64", "fedrda-rank": 40, "fedrda-adaptation-rounds": 2, "local-epochs": 2}
    check_regularised(Pooled(tiny | PARTITIONS["dirichlet"] | keys | {"method": "fedrda", "prompt": prompt}), 1e-3)


@pytest.mark.parametrize("sketch", [20, 150])
def test_a_sketch_is_that_of_the_centralised_matrix(sketch: int, tiny: Values) -> None:
    """Y (Omega^T Y)^+ Y^T with Y = A Omega; with 150 columns for 112 rows it is A itself."""
    run = Pooled(tiny | PARTITIONS["dirichlet"] | EXACT | {"afcl-head": "discriminant", "afcl-sketch": sketch})
    omega = sketch_matrix(112, sketch).numpy()

    def nystrom(matrix: np.ndarray) -> np.ndarray:
        core = omega.T @ matrix @ omega
        return matrix @ omega @ np.linalg.pinv(core, rcond=1e-10, hermitian=True) @ omega.T @ matrix

    means, _, pooled = moments(run)
    pooled = nystrom(pooled)
    weight = means @ np.linalg.inv(pooled + 0.01 * np.trace(pooled) / 112 * np.eye(112))
    assert np.abs(run.arrays["head.weight"] - weight).max() < 1e-4 * np.abs(weight).max()


def test_the_ridge_is_chosen_from_the_images_of_all_clients(tiny: Values) -> None:
    """By the hat matrix of all features, see test_closed_form.py; the results name the choice."""
    run = Pooled(tiny | PARTITIONS["dirichlet"] | EXACT)
    chosen = run.results["rounds"][-1]["server"]["ridge"]
    features, targets = run.features, (run.rows[:, None] == np.arange(run.classes)).astype(np.float64)
    gram, images = features.T @ features, len(run.rows)
    ridges, scores = GRID.numpy() * np.linalg.eigvalsh(gram).max(), []
    for ridge in ridges:
        hat = features @ np.linalg.solve(gram + ridge * np.eye(len(gram)), features.T)
        scores.append(np.square(targets - hat @ targets).sum() / (1 - np.trace(hat) / images) ** 2)
    assert chosen == pytest.approx(ridges[np.argmin(scores)], rel=1e-6)
    check_ridge(run, chosen, bound=1e-3)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_the_shrinkage_is_chosen_from_the_images_of_all_clients(partition: str, tiny: Values) -> None:
    run = Pooled(tiny | PARTITIONS[partition] | EXACT | {"afcl-head": "discriminant"})
    means, _, pooled = moments(run)
    counts = np.bincount(run.rows)
    scatter = pooled * (len(run.rows) - run.classes)
    counts, means, scatter = map(torch.from_numpy, (counts, means, scatter))
    expected = choose_shrinkage(counts, means, Spectrum.of_matrix(scatter))
    assert run.results["rounds"][-1]["server"] == {"shrinkage": pytest.approx(expected)}


@pytest.mark.parametrize("keys", [{"afcl-sketch": 20}, {"afcl-random-features": 2001}], ids=lambda k: next(iter(k)))
def test_with_a_sketch_or_very_many_features_the_shrinkage_is_fixed(keys: Values, tiny: Values) -> None:
    config = parse(tiny | EXACT | {"afcl-head": "discriminant", "num-tasks": 1, "num-clients": 1} | keys)
    folder = run_experiment(config, InProcessTransport(config.flat(), config.num_clients))
    assert results_of(folder)["rounds"][-1]["server"] == {"shrinkage": 0.01}


def update(client: str, features: np.ndarray, labels: list[int], options: AFCLOptions | None = None) -> Update:
    statistics = ScatterStatistics().compute(
        torch.from_numpy(features), torch.tensor(labels), options or AFCLOptions(dtype="fp64")
    )
    return Update(client, len(labels), {}, statistics)


def bare_model(dim: int, classes: int) -> Any:
    """All that refinement needs of a model."""
    head = Head(dim, 0, trained=False)
    head.grow(classes)
    return type("Model", (), {"head": head, "device": torch.device("cpu")})()


def test_a_client_counts_once_per_task_and_an_unreported_class_never_wins() -> None:
    rng = np.random.default_rng(1)
    first, second = rng.normal(size=(6, 4)).astype(np.float32), rng.normal(size=(3, 4)).astype(np.float32)
    schedule, model = Schedule([[4, 9, 1]], 2), bare_model(4, 3)
    server = AFCL(parse(EXACT | {"afcl-ridge": 1.0}))
    updates = [update("a", first, [9, 4, 9, 4, 9, 9])]
    server.refine(model, updates, RoundContext(schedule, 1))
    assert model.head.bias[:2].tolist() == [0, 0]
    assert model.head.bias[2] < -1e20
    server.refine(model, [*updates, update("b", second, [4, 4, 9])], RoundContext(schedule, 2))
    rows = np.array([1, 0, 1, 0, 1, 1, 0, 0, 1])
    expected = numpy_ridge(np.concatenate([first, second]).astype(np.float64), rows, 3, 1.0)
    assert np.allclose(model.head.weight.detach(), expected, atol=1e-5)


def test_a_round_without_reports_changes_nothing() -> None:
    model, context = bare_model(4, 2), RoundContext(Schedule([[4, 9]], 2), 1)
    before = model.head.weight.clone()
    assert AFCL(parse(EXACT)).refine(model, [Update("a", 3, {}, {})], context) == {}
    assert torch.equal(model.head.weight, before)


# Who sends what in which round


class Recording(FaultyTransport):
    """Notes, by server round, the arrays that go down and what comes up."""

    def __init__(self, *arguments: Any, **faults: Any) -> None:
        super().__init__(*arguments, **faults)
        self.down: dict[int, list[Arrays]] = defaultdict(list)
        self.up: dict[int, list[Packet]] = defaultdict(list)

    def exchange(self, kind: Kind, packets: Mapping[int, Packet], timeout: float) -> Iterable[Reply]:
        for reply in super().exchange(kind, packets, timeout):
            if kind == "train":
                server_round = int(str(packets[reply.node].config["server-round"]))
                self.down[server_round].append({n: a.copy() for n, a in packets[reply.node].arrays.items()})
                assert reply.packet
                self.up[server_round].append(reply.packet)
            yield reply


MOVING = {"prompt.down", "prompt.up", "local_head.weight", "local_head.bias"}


def test_clients_train_first_and_send_statistics_then(tiny: Values) -> None:
    """Two rounds of adaptation, then two rounds for each of two tasks."""
    values = tiny | {"method": "fedrda", "fedrda-adaptation-rounds": 2, "rounds-per-task": 2, "local-epochs": 2}
    config = parse(values)
    transport = Recording(config.flat(), 3)
    results = results_of(run_experiment(config, transport))
    assert [(r["task"], r["round"]) for r in results["rounds"]] == [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2)]
    assert not any(r["failures"] or r["dropped"] for r in results["rounds"])
    assert [r["train_loss"] is not None for r in results["rounds"]] == [True] * 2 + [False] * 4
    for server_round in range(1, 7):
        adapts = server_round <= 2
        assert len(transport.up[server_round]) == 3
        for packet in transport.up[server_round]:
            assert set(packet.arrays) == (MOVING if adapts else set())
            sent = {"class_ids", "counts", "means", "factors", "scatter"}
            assert set(packet.statistics) == (set() if adapts else sent)
        for arrays in transport.down[server_round]:
            assert set(arrays) == MOVING  # the head never travels down
            last = transport.down[3][0]
            assert all((arrays[n] == last[n]).all() for n in MOVING) == (not adapts)
    saved = model_of(values)
    assert all((saved[n] == transport.down[3][0][n]).all() for n in MOVING)


def test_arrays_in_a_round_of_statistics_are_refused(tiny: Values) -> None:
    """And statistics in a round of training; the other clients' count."""

    def tamper(node: int, kind: Kind, answer: Packet) -> Packet:
        if kind == "train" and node == 1:
            if answer.statistics:
                answer.arrays = {"prompt.down": np.zeros((5, 4, 112), np.float32)}
            else:
                answer.statistics = {"means": np.zeros((1, 112), np.float32)}
        return answer

    config = parse(tiny | {"method": "fedrda", "fedrda-adaptation-rounds": 1})
    results = results_of(run_experiment(config, FaultyTransport(config.flat(), 3, tamper=tamper)))
    reasons = [[(f["name"], f["reason"]) for f in r["failures"]] for r in results["rounds"]]
    assert reasons == [
        [("client-0001", "statistics ['means'] came; none were expected")],
        [("client-0001", "arrays ['prompt.down'] came; [] were expected")],
        [("client-0001", "arrays ['prompt.down'] came; [] were expected")],
    ]
    assert results["status"] == "finished"


def test_without_a_prompt_there_is_no_round_of_adaptation(tiny: Values) -> None:
    config = parse(tiny | {"method": "fedrda", "prompt": "none"})
    assert (config.adaptation_rounds, config.trains_locally, config.trains_in(1)) == (0, False, False)
    config = parse(tiny | {"method": "fedrda", "fedrda-adaptation-rounds": 3})
    assert config.adaptation_rounds == 3
    assert [config.trains_in(server_round) for server_round in (1, 3, 4, 9)] == [True, True, False, False]
    assert parse(tiny | {"method": "fedavg"}).adaptation_rounds == 0
    assert parse(tiny | {"method": "fedavg"}).trains_in(99)
    assert not parse(tiny | {"method": "ncm"}).trains_in(1)


def test_random_features_are_a_relu_of_fixed_gaussians() -> None:
    """RanPAC: h = max(0, W^T f) with W the same on every machine."""
    head, again, other = Head(5, 3, projection=8), Head(5, 3, projection=8), Head(5, 4, projection=8)
    assert torch.equal(head.projection, again.projection)
    assert not torch.equal(head.projection, other.projection)
    features = torch.randn(4, 5)
    expected = np.maximum(features.numpy().astype(np.float64) @ head.projection.numpy(), 0)
    assert np.allclose(head.project(features), expected, atol=1e-5)
    head.grow(3)
    assert head.weight.shape == (3, 8)
    assert head(features).shape == (4, 3)
