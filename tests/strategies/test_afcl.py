"""AFCL: the head equals the centralised one, whatever the partition and the order of everything."""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from server_app.rounds.run import run_experiment
from server_app.transport.in_process import InProcessTransport
from strategies.afcl import AFCL
from strategies.base import RoundContext, Update
from strategies.closed_form import RIDGES, Spectrum, choose_shrinkage
from task.config.parsing import parse
from task.method_options import AFCLOptions
from task.models.head import Head
from task.models.model import build_model
from task.prompt_kinds import PROMPTS
from task.prototypes.scatter import ScatterStatistics, sketch_matrix
from task.scenario.class_stream import Schedule
from tests.helpers.marks import rest_in_ci
from tests.helpers.pooled import PARTITIONS, Pooled, check_regularised, moments
from tests.helpers.runs import Values, results_of
from tests.helpers.small_models import head_alone

EXACT: Values = {"method": "afcl", "afcl-dtype": "fp64"}
SPLITS = rest_in_ci(PARTITIONS, ["dirichlet", "class-share"])


def numpy_ridge(features: np.ndarray, rows: np.ndarray, classes: int, ridge: float) -> np.ndarray:
    """The centralised solution by NumPy's least squares on the augmented system, which forms no Gram matrix."""
    targets, dim = (rows[:, None] == np.arange(classes)).astype(np.float64), features.shape[1]
    stacked = np.concatenate([features, np.sqrt(ridge) * np.eye(dim)])
    return np.linalg.lstsq(stacked, np.concatenate([targets, np.zeros((dim, classes))]), rcond=None)[0].T


def numpy_discriminant(run: Pooled, shrinkage: float) -> tuple[np.ndarray, np.ndarray]:
    """Weight [K, M] and bias [K] of the linear discriminant with equal priors."""
    means, _, pooled = moments(run)
    dim = len(pooled)
    inverse = np.linalg.inv(pooled + shrinkage * np.trace(pooled) / dim * np.eye(dim))
    return means @ inverse, -0.5 * np.einsum("km,mn,kn->k", means, inverse, means)


def check_ridge(run: Pooled, ridge: float, bound: float = 1e-5) -> None:
    expected = numpy_ridge(run.features, run.rows, run.classes, ridge)
    assert np.abs(run.arrays["head.weight"] - expected).max() < bound * np.abs(expected).max()
    assert (run.arrays["head.bias"] == 0).all()


@pytest.mark.parametrize("random_features", [0, 60])
@pytest.mark.parametrize("partition", SPLITS)
def test_the_model_is_the_centralised_regression(partition: str, random_features: int, tiny: Values) -> None:
    keys = EXACT | {"afcl-ridge": 2.0, "afcl-random-features": random_features}
    check_ridge(Pooled(tiny | PARTITIONS[partition] | keys), 2.0)


@pytest.mark.parametrize("dtype", [("fp32", 1e-3), ("fp16", 0.2)], ids=lambda pair: pair[0])
def test_rounded_messages_change_little(dtype: tuple[str, float], tiny: Values) -> None:
    check_ridge(Pooled(tiny | EXACT | {"afcl-ridge": 2.0, "afcl-dtype": dtype[0]}), 2.0, dtype[1])


@pytest.mark.parametrize("partition", SPLITS)
def test_the_model_is_the_centralised_discriminant(partition: str, tiny: Values) -> None:
    run = Pooled(tiny | PARTITIONS[partition] | EXACT | {"afcl-head": "discriminant", "afcl-shrinkage": 0.05})
    weight, bias = numpy_discriminant(run, 0.05)
    assert np.abs(run.arrays["head.weight"] - weight).max() < 1e-5 * np.abs(weight).max()
    assert np.abs(run.arrays["head.bias"] - bias).max() < 1e-5 * np.abs(bias).max()


@pytest.mark.parametrize("partition", SPLITS)
def test_the_model_is_the_centralised_regularised_discriminant(partition: str, tiny: Values) -> None:
    """With room for all directions of each class: 112 features, at most 40 images."""
    keys = EXACT | {"afcl-head": "regularised", "afcl-rank": 40, "afcl-own-covariance": 0.3}
    check_regularised(Pooled(tiny | PARTITIONS[partition] | keys))


@pytest.mark.parametrize("head", ["discriminant", "regularised"])
def test_priors_may_be_the_shares_of_the_classes(head: str, tiny: Values, tmp_path: Path) -> None:
    """log(n_c / n) is added to the logits, and nothing else changes."""
    labels = np.arange(6).repeat([10, 20, 30, 40, 50, 60])
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 16, 16, 3), np.uint8)
    np.savez(tmp_path / "uneven.npz", images=images, labels=labels)
    keys = tiny | EXACT | {"dataset": "npz", "data-dir": str(tmp_path / "uneven.npz"), "afcl-head": head}
    equal, counted = (Pooled(keys | {"afcl-priors": priors, "run-name": priors}) for priors in ("equal", "counts"))
    shares = np.bincount(counted.rows) / len(counted.rows)
    assert shares.max() > 4 * shares.min()
    bias = equal.arrays["head.bias"].astype(np.float64)
    assert np.abs(counted.arrays["head.bias"] - bias - np.log(shares)).max() < 1e-6 * np.abs(bias).max()
    assert np.log(shares.max() / shares.min()) > 1e-3 * np.abs(bias).max()
    others = set(equal.arrays) - {"head.bias"}
    assert all((equal.arrays[name] == counted.arrays[name]).all() for name in others)


def test_early_features_stand_behind_the_last_ones(tiny: Values) -> None:
    keys = EXACT | {"afcl-head": "regularised", "afcl-rank": 300, "afcl-depth": 0.75}
    run = Pooled(tiny | PARTITIONS["dirichlet"] | keys)
    assert run.features.shape[1] == 224
    check_regularised(run)


def test_random_features_under_a_regularised_discriminant(tiny: Values) -> None:
    keys = EXACT | {"afcl-head": "regularised", "afcl-rank": 300, "afcl-random-features": 60}
    check_regularised(Pooled(tiny | keys))


@pytest.mark.parametrize("prompt", rest_in_ci(PROMPTS, ["lora", "shared"]))
def test_features_are_those_of_the_adapted_prompt(prompt: str, tiny: Values) -> None:
    """Of the final model: nothing moves after the first task's first rounds."""
    keys = EXACT | {"prompt": prompt, "afcl-ridge": 2.0, "local-epochs": 2, "num-tasks": 3}
    run = Pooled(tiny | keys | ({"afcl-adaptation-rounds": 2} if prompt != "none" else {}))
    check_ridge(run, 2.0, bound=1e-3)  # features of other batches are rounded otherwise
    start = build_model(run.config, [4])
    moved = [n for n, a in start.export().items() if n.startswith("prompt.") and (run.arrays[n] != a).any()]
    assert bool(moved) == (prompt != "none")


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
    ridges, scores = RIDGES.numpy() * np.linalg.eigvalsh(gram).max(), []
    for ridge in ridges:
        hat = features @ np.linalg.solve(gram + ridge * np.eye(len(gram)), features.T)
        scores.append(np.square(targets - hat @ targets).sum() / (1 - np.trace(hat) / images) ** 2)
    assert chosen == pytest.approx(ridges[np.argmin(scores)], rel=1e-6)
    check_ridge(run, chosen, bound=1e-3)


@pytest.mark.parametrize("partition", SPLITS)
def test_the_shrinkage_is_chosen_from_the_images_of_all_clients(partition: str, tiny: Values) -> None:
    run = Pooled(tiny | PARTITIONS[partition] | EXACT | {"afcl-head": "discriminant"})
    means, _, pooled = moments(run)
    counts = np.bincount(run.rows)
    scatter = pooled * (len(run.rows) - run.classes)
    counts, means, scatter = map(torch.from_numpy, (counts, means, scatter))
    by_class = np.argsort(run.results["class_order"])
    expected = choose_shrinkage(counts[by_class], means[by_class], Spectrum.of_matrix(scatter))
    assert run.results["rounds"][-1]["server"] == {"shrinkage": pytest.approx(expected)}


@pytest.mark.ci
def test_the_order_of_classes_does_not_change_the_shrinkage() -> None:
    """Three images of each of 12 classes, so few that other draws choose other shrinkages."""
    rng = np.random.default_rng(0)
    labels = np.arange(12).repeat(3)
    features = (0.6 * rng.normal(size=(12, 20))[labels] + rng.normal(size=(36, 20))).astype(np.float32)
    server_keys, chosen = EXACT | {"afcl-head": "discriminant"}, set()
    for _ in range(8):
        order = rng.permutation(12)
        server = AFCL(parse(server_keys))
        context = RoundContext(Schedule([order.tolist()], 1), 1)
        chosen.add(server.refine(head_alone(20, 12), [update("a", features, labels.tolist())], context)["shrinkage"])
    assert len(chosen) == 1


@pytest.mark.parametrize(
    "keys",
    [{"afcl-sketch": 20}, pytest.param({"afcl-random-features": 2401}, marks=pytest.mark.ci)],
    ids=lambda k: next(iter(k)),
)
def test_with_a_sketch_or_very_many_features_the_shrinkage_is_fixed(keys: Values, tiny: Values) -> None:
    config = parse(tiny | EXACT | {"afcl-head": "discriminant", "num-tasks": 1, "num-clients": 1} | keys)
    folder = run_experiment(config, InProcessTransport(config.num_clients))
    assert results_of(folder)["rounds"][-1]["server"] == {"shrinkage": 0.01}


def update(client: str, features: np.ndarray, labels: list[int], options: AFCLOptions | None = None) -> Update:
    statistics = ScatterStatistics().compute(
        torch.from_numpy(features), torch.tensor(labels), options or AFCLOptions(dtype="fp64")
    )
    return Update(client, len(labels), {}, statistics)


def test_a_client_counts_once_per_task_and_an_unreported_class_never_wins() -> None:
    rng = np.random.default_rng(1)
    first, second = rng.normal(size=(6, 4)).astype(np.float32), rng.normal(size=(3, 4)).astype(np.float32)
    schedule, model = Schedule([[4, 9, 1]], 2), head_alone(4, 3)
    server = AFCL(parse(EXACT | {"afcl-ridge": 1.0}))
    updates = [update("a", first, [9, 4, 9, 4, 9, 9])]
    server.refine(model, updates, RoundContext(schedule, 1))
    assert model.head.bias[:2].tolist() == [0, 0]
    assert model.head.bias[2] < -1e20
    server.refine(model, [*updates, update("b", second, [4, 4, 9])], RoundContext(schedule, 2))
    rows = np.array([1, 0, 1, 0, 1, 1, 0, 0, 1])
    expected = numpy_ridge(np.concatenate([first, second]).astype(np.float64), rows, 3, 1.0)
    assert np.allclose(model.head.weight.detach(), expected, atol=1e-5)


def test_a_class_that_nobody_reports_leaves_the_others_as_they_are() -> None:
    """The scatter of twelve images of two classes is divided by 12 - 2, also where a third class is known."""
    features, heads = np.random.default_rng(2).normal(size=(12, 4)).astype(np.float32), []
    for classes in ([4, 9], [4, 9, 1]):
        server = AFCL(parse(EXACT | {"afcl-head": "discriminant", "afcl-shrinkage": 0.1}))
        model = head_alone(4, len(classes))
        server.refine(model, [update("a", features, [4, 9] * 6)], RoundContext(Schedule([classes], 1), 1))
        heads.append(model.head)
    assert torch.equal(heads[0].weight, heads[1].weight[:2])
    assert torch.equal(heads[0].bias, heads[1].bias[:2])


def test_rounds_without_reports_change_nothing_and_a_task_of_them_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, server, schedule = head_alone(4, 2), AFCL(parse(EXACT)), Schedule([[4, 9]], 2)
    before = model.head.weight.clone()
    for server_round in (1, 2):
        assert not caplog.messages
        assert server.refine(model, [Update("a", 3, {}, {})], RoundContext(schedule, server_round)) == {}
    assert caplog.messages == ["no client has reported a class: the head is still as it was drawn"]
    assert torch.equal(model.head.weight, before)


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
    gaussians = Head(100, 3, projection=400).projection.double().numpy()  # 40,000: errors of 0.005 and 0.0035
    assert abs(gaussians.mean()) < 0.02
    assert gaussians.std() == pytest.approx(1, abs=0.02)
    assert stats.kstest(gaussians.ravel(), "norm").pvalue > 1e-6
