"""Clipping, noise and thresholds: numbers by hand, sensitivities, whole runs."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from client_app.client import Node, handle
from server_app.privacy.account import releases_per_message
from server_app.privacy.accountant import epsilon
from task.config.parsing import parse
from task.config.schema import Config
from task.keys import ConfigError
from task.message import Packet
from task.method_options import AFCLOptions, HGPOptions
from task.methods import METHODS
from task.models.evaluation import extract_features
from task.models.model import build_model
from task.prototypes.gaussians import cholesky_fails, pack_symmetric, unpack_symmetric
from task.prototypes.noise import GaussianMechanism, nearest_semi_definite, system_normal
from task.prototypes.scatter import ScatterStatistics
from task.prototypes.statistics import GaussianStatistics, MeanStatistics, VarianceStatistics
from task.scenario.client_data import client_task_data
from task.scenario.scenario import build_scenario
from task.utils.seeding import numpy_rng
from tests.helpers.prototypes import gaussian_statistics
from tests.helpers.runs import PRIVATE, model_of, run, train_message, without_times

SENDS_FEATURES = {
    m.name
    for m in METHODS.values()
    if m.statistics.split(":")[1] in ("MeanStatistics", "GaussianStatistics", "VarianceStatistics")
}


def mechanism(clip: float = 0, feature_clip: float = 0, noise: float = 0, seed: int = 0) -> GaussianMechanism:
    return GaussianMechanism(clip, feature_clip, noise, numpy_rng(seed, "test").standard_normal)


def test_an_update_is_scaled_down_as_one_vector() -> None:
    """By hand: (3, 0) and (4) together have the norm 5; at most 2.5 leaves half of each."""
    sent = {"a": np.float32([1, 1]), "b": np.float32([0]), "kept": np.float32([7])}
    trained = {"a": np.float32([4, 1]), "b": np.float32([4])}
    clipped = mechanism(clip=2.5).arrays(trained, sent)
    assert clipped["a"].tolist() == [2.5, 1]
    assert clipped["b"].tolist() == [2]
    assert {a.dtype for a in clipped.values()} == {np.dtype(np.float32)}
    assert all((mechanism(clip=6).arrays(trained, sent)[n] == a).all() for n, a in trained.items())
    assert mechanism().arrays(trained, sent) is trained
    assert (mechanism(clip=1).arrays(sent, sent)["a"] == sent["a"]).all()


def test_features_are_scaled_down_row_by_row() -> None:
    clipped = mechanism(feature_clip=2.5).features(torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]]))
    assert torch.allclose(clipped, torch.tensor([[1.5, 2.0], [0.3, 0.4], [0.0, 0.0]]))


def test_noise_in_arrays_has_the_deviation_z_times_c() -> None:
    sent = {"a": np.zeros((300, 200), np.float32), "b": np.zeros(60_000, np.float32)}
    noised = mechanism(clip=2, noise=1.5).arrays(sent, sent)
    for array in noised.values():
        assert array.std() == pytest.approx(3, rel=0.01)
        assert abs(array.mean()) < 0.06
    assert abs(np.corrcoef(noised["a"].ravel(), noised["b"])[0, 1]) < 0.02


def test_head_rows_that_training_cannot_move_stay_as_they_were_sent() -> None:
    """Where a method moves them nevertheless, nothing leaves the client."""
    sent = {"head.weight": np.ones((3, 2), np.float32), "head.bias": np.zeros(3, np.float32), "prompt": np.zeros(3)}
    trained = sent | {"head.weight": sent["head.weight"] + np.float32([[9], [0], [0]])}
    with pytest.raises(ValueError, match="head rows that the objective's learned_rows leaves out"):
        mechanism(clip=2, noise=1.5).arrays(trained, sent, np.array([0, 1]))
    assert mechanism(clip=2).arrays(trained, sent, np.array([0, 1]))["head.weight"][0, 0] > 1
    noised = mechanism(clip=2, noise=1.5).arrays(sent, sent, np.array([0, 1]))
    for name in ("head.weight", "head.bias"):
        assert (noised[name][:2] == sent[name][:2]).all()
        assert (noised[name][2] != sent[name][2]).all()
    assert (noised["prompt"] != 0).all()


def test_noise_in_statistics_has_the_deviations_of_the_docstring() -> None:
    """B = 10, z = 0.5: 0.5 x 10 / n in means, 0.5 x 100 / (sqrt(2) n) in squares."""
    counts = torch.tensor([100, 400]).repeat_interleave(500)
    means = mechanism(feature_clip=10, noise=0.5).means(torch.zeros(1000, 40), counts)
    squares = mechanism(feature_clip=10, noise=0.5).squares(torch.zeros(1000, 40), counts)
    for rows, n in ((slice(0, 500), 100), (slice(500, None), 400)):
        assert means[rows].std() == pytest.approx(5 / n, rel=0.02)
        assert squares[rows].std() == pytest.approx(35.355 / n, rel=0.02)
    assert (mechanism(feature_clip=10, noise=9).means(torch.zeros(5, 40), torch.ones(5)).norm(dim=1) <= 10.001).all()


def moments(images: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return images.mean(0), (images**2).mean(0), pack_symmetric((images.T @ images)[None])[0] / len(images)


def test_one_other_image_moves_nothing_further_than_the_sensitivities() -> None:
    """2 B / n for means, sqrt(2) B^2 / n for squares and products; both are reached."""
    rng, B, n = np.random.default_rng(0), 3.0, 7
    furthest = np.zeros(3)
    for trial in range(300):
        images = rng.standard_normal((n + 1, 4)) * rng.choice([0.1, 1, 30])
        images = mechanism(feature_clip=B).features(torch.from_numpy(images)).numpy()
        if trial == 0:
            images[0], images[-1] = [B, 0, 0, 0], [-B, 0, 0, 0]
        if trial == 1:
            images[0], images[-1] = [B, 0, 0, 0], [0, B, 0, 0]
        gaps = [np.linalg.norm(a - b) for a, b in zip(moments(images[:-1]), moments(images[1:]), strict=True)]
        furthest = np.maximum(furthest, gaps)
    assert furthest == pytest.approx([2 * B / n, math.sqrt(2) * B**2 / n, math.sqrt(2) * B**2 / n])


@pytest.mark.parametrize("packing", ["diagonal", "full"])
def test_without_noise_the_way_through_moments_changes_nothing(packing: str) -> None:
    """Noise so small that only the algebra shows: mean squares and back."""
    rng = np.random.default_rng(1)
    features, labels = torch.from_numpy(rng.standard_normal((23, 5))).float(), torch.tensor([0] * 10 + [1] * 12 + [2])
    exact = gaussian_statistics(features, labels, packing, 1)
    tiny = mechanism(feature_clip=1e4, noise=1e-16)
    noised = GaussianStatistics().compute(features, labels, HGPOptions(covariance=packing), tiny)
    name = "variances" if packing == "diagonal" else "covariances"
    assert np.allclose(noised[name], exact[name], atol=1e-5)
    assert np.allclose(noised["means"], exact["means"], atol=1e-6)
    assert not noised[name][2].any()  # a single image has no covariance


@pytest.mark.parametrize(("kind", "expected"), [("hgp", 25 / math.sqrt(2)), ("pip", 25 / math.sqrt(2) / 2)])
def test_noise_in_variances_is_divided_like_them(kind: str, expected: float) -> None:
    """Two images of features 0, B = 5, z = 1, draw 1: B^2 / sqrt(2) / 2 in the mean square, HGP's times n / (n - 1)."""
    draws = iter([np.ones((1, 3)), np.zeros((1, 3))])  # of the mean squares, then of the means
    noise = GaussianMechanism(0, 5.0, 1.0, lambda shape: next(draws))
    statistics = GaussianStatistics() if kind == "hgp" else VarianceStatistics()
    sent = statistics.compute(torch.zeros(2, 3), torch.tensor([4, 4]), HGPOptions(covariance="diagonal"), noise)
    assert sent["variances"].tolist() == [pytest.approx([expected] * 3)]


def test_noise_in_full_covariances_is_divided_like_them() -> None:
    """As above with draws of 4, 1, 4 in the mean of f f^T, a semi-definite matrix: times 25 / sqrt(2) / 2, times 2."""
    draws = iter([np.array([[4.0, 1.0, 4.0]]), np.zeros((1, 2))])  # of the mean products, then of the means
    noise = GaussianMechanism(0, 5.0, 1.0, lambda shape: next(draws))
    sent = GaussianStatistics().compute(torch.zeros(2, 2), torch.tensor([4, 4]), HGPOptions(covariance="full"), noise)
    assert sent["covariances"] == pytest.approx(np.array([[4.0, 1.0, 4.0]]) * 25 / math.sqrt(2))


def test_statistics_stay_valid_under_any_noise() -> None:
    rng = np.random.default_rng(2)
    features, labels = torch.from_numpy(rng.standard_normal((30, 6))).float(), torch.arange(30) % 4
    heavy = mechanism(feature_clip=5, noise=50)
    for packing in ("full", "diagonal"):
        exact = gaussian_statistics(features, labels, packing, 1)
        noised = GaussianStatistics().compute(features, labels, HGPOptions(covariance=packing), heavy)
        assert {n: (a.dtype, a.shape) for n, a in noised.items()} == {n: (a.dtype, a.shape) for n, a in exact.items()}
        assert (noised.get("variances", np.zeros(1)) >= 0).all()
        assert "covariances" not in noised or not cholesky_fails(noised["covariances"], 6)
    assert (VarianceStatistics().compute(features, labels, Config().options, heavy)["variances"] >= 0).all()
    scatter = ScatterStatistics().compute(features, labels, AFCLOptions(), heavy)
    assert not ScatterStatistics().invalid(scatter, 6)
    assert {n: a.shape for n, a in scatter.items() if a.dtype == np.float32} == {"means": (4, 6), "scatter": (1, 21)}


def test_the_nearest_semi_definite_matrix_by_hand() -> None:
    """[[0, 2], [2, 0]] has the eigenvalues 2 and -2; without the latter it is [[1, 1], [1, 1]]."""
    nearest = nearest_semi_definite(torch.tensor([[0.0, 2.0, 0.0]]), 2)
    assert unpack_symmetric(nearest, 2)[0] == pytest.approx(np.ones((2, 2)))


def test_the_systems_noise_is_normal_and_never_the_same() -> None:
    noise = system_normal((200, 500))
    assert noise.shape == (200, 500)
    assert stats.kstest(noise.ravel(), "norm").pvalue > 1e-6
    assert noise.std() == pytest.approx(1, abs=0.015)
    assert (system_normal((5,)) != system_normal((5,))).all()
    assert system_normal(()).shape == ()


@pytest.mark.parametrize("kind", [MeanStatistics, VarianceStatistics, GaussianStatistics, ScatterStatistics])
def test_every_number_of_the_statistics_is_noised(kind: type, tiny: dict) -> None:
    """And without noise none is: a mean that left as it is would make the named epsilon a lie."""
    config = parse(tiny | {"method": "hgp", **PRIVATE})
    features, labels = torch.randn(40, 6, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 4
    options = AFCLOptions() if kind is ScatterStatistics else config.options
    exact = kind().compute(features, labels, options)
    noised = kind().compute(features, labels, options, GaussianMechanism.of(config, 0, 1))
    numbers = exact.keys() - {"class_ids", "counts"}
    assert numbers
    for name in numbers:
        assert (noised[name] != exact[name]).all(), name


def test_what_is_not_finite_is_never_sent_unclipped() -> None:
    mechanism = GaussianMechanism(1.0, 0.0, 0.0, system_normal)
    sent = {"a": np.zeros(3, np.float32), "b": np.zeros(3, np.float32)}
    trained = {"a": np.full(3, 9.0, np.float32), "b": np.full(3, np.nan, np.float32)}
    with pytest.raises(ValueError, match="NaN"):
        mechanism.arrays(trained, sent)


def test_every_client_and_round_draws_its_own_seeded_noise(tiny: dict) -> None:
    """Noise that all clients share would not average out."""
    config = parse(tiny | PRIVATE)
    places = [(0, 1), (0, 1), (1, 1), (0, 2)]
    first, again, client, later = (GaussianMechanism.of(config, *place).draw((4,), 1.0) for place in places)
    assert (first == again).all()
    assert (first != client).all()
    assert (first != later).all()


# Whole answers and runs


@pytest.mark.ci
@pytest.mark.parametrize("method", ["hgp", "pip", "afcl", "ncm", "fppl", "hepco", "fedslca", "ccvr"])
def test_runs_with_noise_refuse_nothing_and_name_their_epsilon(method: str, tiny: dict) -> None:
    values = tiny | PRIVATE | {"method": method, "rounds-per-task": 2 if method == "hgp" else 1}
    trains = parse({"method": method}).trains_locally
    needs = {"privacy-clip": trains, "privacy-feature-clip": method in SENDS_FEATURES | {"afcl"}}
    results = run({n: v for n, v in values.items() if needs.get(n, True)})
    assert results["status"] == "finished"
    assert not any(r["failures"] or r["dropped"] for r in results["rounds"])
    assert not any(r["train_loss"] for r in results["rounds"])  # it would tell of the images
    each = releases_per_message(parse({"method": method}), 1, True)
    privacy = results["privacy"]
    assert privacy["releases"] == ([each, 2 * each, 2 * each, 2 * each] if method == "hgp" else [each] * 2)
    assert privacy["epsilon"][-1] == pytest.approx(epsilon(0.5, privacy["releases"][-1], 1e-5))
    assert privacy["delta"] == 1e-5
    assert privacy["seeded"] is True


@pytest.mark.ci
def test_seeded_noise_is_the_same_again_and_the_systems_is_not(tiny: dict) -> None:
    values = tiny | PRIVATE | {"num-tasks": 1}
    first, again = (run(values | {"run-name": name}) for name in ("first", "again"))
    assert without_times(first) == without_times(again)
    for name in ("one", "two"):
        run(values | {"run-name": name, "privacy-seeded": False})
    models = [model_of(values | {"run-name": name})["head.weight"] for name in ("first", "again", "one", "two")]
    assert (models[0] == models[1]).all()
    assert (models[2] != models[3]).any()
    assert (models[0] != models[2]).any()


def answer_of(config: Config) -> Packet:
    return handle("train", train_message(config), Node({"partition-id": 0}))


def features_behind(answer: Packet, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of the client's images by the model that it has sent back, and their labels."""
    model, dataset = build_model(config, build_scenario(config).task_sizes(0)), build_scenario(config).dataset
    model.load(answer.arrays or train_message(config).arrays)
    model.prompt.train()
    positions = client_task_data(config, 0, 0, 0).positions
    features = extract_features(model, dataset.train_images, positions)
    return features, torch.from_numpy(dataset.train_labels[positions])


@pytest.mark.parametrize("method", ["hgp", "ncm", "afcl"])
def test_a_client_clips_features_before_it_takes_their_statistics(method: str, tiny: dict) -> None:
    config = parse(tiny | {"method": method, "privacy-feature-clip": 0.5})
    answer = answer_of(config)
    features, labels = (values.numpy() for values in features_behind(answer, config))
    norms = np.linalg.norm(features.astype(np.float64), axis=1, keepdims=True)
    assert norms.min() > 0.5
    expected = [(0.5 * features / norms)[labels == c].mean(axis=0) for c in answer.statistics["class_ids"]]
    assert np.allclose(answer.statistics["means"], expected, atol=1e-4)


def test_statistics_are_taken_with_the_arrays_that_are_sent(tiny: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features of a model that nobody noised would carry one image's influence into all means."""
    monkeypatch.setattr(GaussianMechanism, "means", lambda self, means, counts: means)
    config = parse(tiny | PRIVATE | {"privacy-feature-clip": 1e6})
    answer = answer_of(config)
    expected = gaussian_statistics(*features_behind(answer, config), "diagonal", 1)
    assert np.allclose(answer.statistics["means"], expected["means"], atol=1e-4)


def test_an_answer_with_noise_tells_neither_loss_nor_accuracy(tiny: dict) -> None:
    assert set(answer_of(parse(tiny | PRIVATE)).metrics) == {"num-examples", "seconds-train", "seconds-statistics"}


def test_clipping_alone_bounds_the_update(tiny: dict) -> None:
    plain, clipped = parse(tiny), parse(tiny | {"privacy-clip": 0.01})
    sent = train_message(plain).arrays

    def norm(answer: Packet) -> float:
        return math.sqrt(sum(float(np.square(a - sent[n]).sum()) for n, a in answer.arrays.items()))

    assert norm(answer_of(plain)) > 0.05
    assert norm(answer_of(clipped)) == pytest.approx(0.01, rel=1e-3)
    assert "privacy" not in run(tiny | {"privacy-clip": 0.01})


def test_classes_of_few_images_are_not_reported(tiny: dict) -> None:
    values = tiny | {"partition": "dirichlet", "dirichlet-beta": 0.3}
    every, few = answer_of(parse(values)), answer_of(parse(values | {"min-class-count": 10}))
    enough = every.statistics["counts"] >= 10
    assert 0 < enough.sum() < len(enough)
    assert all((few.statistics[n] == a[enough]).all() for n, a in every.statistics.items())
    assert few.metrics["num-examples"] == every.metrics["num-examples"]
    assert all((few.arrays[n] == a).all() for n, a in every.arrays.items())
    largest = every.statistics["counts"].max()
    exactly = answer_of(parse(values | {"min-class-count": int(largest)})).statistics["counts"]
    assert set(exactly.tolist()) == {largest}
    assert answer_of(parse(values | {"min-class-count": 10**6})).statistics == {}


WITH_STATISTICS = ["hgp", "pip", "fppl", "fedprok", "ccvr", "hepco", "ncm", "afcl", "fedrda", "fedewc"]
NOTHING_AT_ALL = ["hgp", "fppl", "hepco", "ncm", "afcl", "fedrda"]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("method", "fewest"), [(m, 12) for m in WITH_STATISTICS] + [(m, 10**6) for m in NOTHING_AT_ALL]
)
def test_methods_live_with_missing_classes(method: str, fewest: int, tiny: dict) -> None:
    """Some classes that no client reports, or none that any does."""
    values = {"method": method, "partition": "dirichlet", "dirichlet-beta": 0.3, "min-class-count": fewest}
    results = run(tiny | values)
    assert results["status"] == "finished"
    assert not any(r["failures"] or r["dropped"] for r in results["rounds"])
    if fewest == 12 and method in ("ncm", "afcl"):
        assert results["metrics"]["last_accuracy"] > 0.1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"privacy-noise": 1.0, "privacy-feature-clip": 1.0}, ["privacy-noise", "privacy-clip"]),
        ({"privacy-noise": 1.0, "privacy-clip": 1.0}, ["privacy-noise", "privacy-feature-clip", "'hgp'"]),
        ({**PRIVATE, "hgp-covariance": "low-rank"}, ["privacy-noise", "low-rank"]),
        ({**PRIVATE, "method": "fedrda"}, ["privacy-noise", "'fedrda'", "principal directions"]),
        (
            {
                "method": "afcl",
                "privacy-noise": 1.0,
                "privacy-feature-clip": 1.0,
                "afcl-sketch": 9,
                "afcl-head": "discriminant",
            },
            ["privacy-noise", "'afcl'", "a sketch"],
        ),
        (
            {"method": "afcl", "prompt": "lora", "privacy-noise": 1.0, "privacy-feature-clip": 1.0},
            ["privacy-noise", "privacy-clip above 0"],
        ),
        ({"method": "fedewc", "privacy-noise": 1.0, "privacy-clip": 1.0}, ["privacy-noise", "Fisher"]),
        ({"method": "joint", "privacy-noise": 1.0, "privacy-clip": 1.0}, ["privacy-noise", "'joint'"]),
        ({**PRIVATE, "partition": "split-ratio"}, ["privacy-noise", "'split-ratio'"]),
        (
            {**PRIVATE, "method": "fedprok", "backbone": "resnet18_cifar", "backbone-weights": "random"},
            ["privacy-noise", "resnet18_cifar"],
        ),
        ({"method": "ncm", "privacy-clip": 1.0}, ["privacy-clip", "ignored", "'ncm'"]),
        ({"method": "fedavg", "privacy-feature-clip": 1.0}, ["privacy-feature-clip", "ignored", "'fedavg'"]),
        ({"method": "fedavg", "min-class-count": 3}, ["min-class-count", "ignored", "'fedavg'"]),
        ({"privacy-seeded": True}, ["privacy-seeded", "ignored", "privacy-noise"]),
        ({"privacy-delta": 1e-6}, ["privacy-delta", "ignored", "privacy-noise"]),
        ({"privacy-delta": 0.0}, ["privacy-delta", "above 0"]),
    ],
)
def test_what_makes_no_sense_is_refused(values: dict, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(values)
    assert all(word in str(caught.value) for word in words), caught.value
