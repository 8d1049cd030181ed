"""Class means and scatter as clients send them, against sums over images in NumPy."""

import numpy as np
import pytest
import torch

from strategies.closed_form import Spectrum
from task.config.parsing import parse
from task.message import Arrays
from task.method_options import AFCLOptions
from task.prototypes.gaussians import pack_symmetric, unpack_symmetric
from task.prototypes.noise import GaussianMechanism
from task.prototypes.scatter import (
    ScatterStatistics,
    factor_rows,
    restore_scatter,
    scatter_shape,
    sketch_matrix,
)
from task.utils.seeding import numpy_rng

DIM = 12


def drawn(counts: list[int], dim: int = DIM, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Features of classes 3, 4, ... with so many images, in any order, and their labels."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(len(counts)) + 3, counts))
    return rng.normal(size=(len(labels), dim)).astype(np.float32) + labels[:, None].astype(np.float32), labels


def sent(features: np.ndarray, labels: np.ndarray, options: AFCLOptions) -> Arrays:
    return ScatterStatistics().compute(torch.from_numpy(features), torch.from_numpy(labels), options)


def class_scatter(features: np.ndarray, labels: np.ndarray, c: int) -> np.ndarray:
    centred = features[labels == c].astype(np.float64)
    centred -= centred.mean(axis=0)
    return centred.T @ centred


def within(features: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return np.sum([class_scatter(features, labels, c) for c in np.unique(labels)], axis=0)


def restored(statistics: Arrays, options: AFCLOptions, dim: int = DIM) -> np.ndarray:
    """The whole scatter [dim, dim] of a message that is not sketched."""
    scatter, form = restore_scatter(statistics, dim, options)
    matrix = (scatter.T @ scatter if form == "rows" else scatter).numpy()
    factors = statistics.get("factors", np.zeros((0, dim))).astype(np.float64)
    return matrix + statistics["counts"].sum() * factors.T @ factors


EXACT = AFCLOptions(dtype="fp64")
RANK_2 = AFCLOptions(head="regularised", rank=2, dtype="fp64")
RANK_99 = AFCLOptions(head="regularised", rank=99, dtype="fp64")
CASES: dict[str, tuple[list[int], AFCLOptions, tuple[int, int], int]] = {
    # images of each class, options, shape of the scatter, factors; 12 features: up to 6 rows, else 78 numbers
    "rows": ([3, 4], EXACT, (5, DIM), 0),
    "as many rows as are worth it": ([4, 4], EXACT, (6, DIM), 0),
    "triangle": ([4, 5], EXACT, (1, 78), 0),
    "many images": ([40, 50, 60], EXACT, (1, 78), 0),
    "one image": ([1], EXACT, (1, DIM), 0),
    "single images": ([1, 1, 1], EXACT, (1, DIM), 0),
    "a single image beside others": ([1, 4], EXACT, (3, DIM), 0),
    "factors and rows": ([5, 1, 3, 2], RANK_2, (2, DIM), 2 + 1 + 2 + 1),
    "factors and triangle": ([40, 50], RANK_2, (1, 78), 2 + 2),
    "factors alone": ([40, 1, 5], RANK_99, (1, DIM), 12 + 1 + 4),
}


@pytest.mark.parametrize("case", CASES)
def test_the_scatter_comes_back_whole_from_the_announced_shapes(case: str) -> None:
    counts, options, shape, factors = CASES[case]
    features, labels = drawn(counts)
    statistics = sent(features, labels, options)
    assert statistics["class_ids"].tolist() == list(range(3, 3 + len(counts)))
    assert statistics["counts"].tolist() == counts
    assert statistics["scatter"].shape == shape == scatter_shape(np.array(counts), DIM, options)
    config = parse({"method": "afcl", "afcl-head": options.head})
    config = type(config)(**vars(config) | {"options": options})
    expected = ScatterStatistics().expected(np.array(counts), {}, DIM, config)
    assert {n: a.shape for n, a in statistics.items() if a.dtype == np.float64} == expected
    assert expected.get("factors", (0, DIM)) == (factors, DIM)
    for row, c in enumerate(np.unique(labels)):
        assert np.allclose(statistics["means"][row], features[labels == c].astype(np.float64).mean(axis=0), atol=1e-12)
    assert np.allclose(restored(statistics, options), within(features, labels), atol=1e-10)
    assert not ScatterStatistics().invalid(statistics, DIM)


def test_factors_are_the_principal_directions_of_their_class() -> None:
    counts = np.array([7, 1, 30, 2])
    features, labels = drawn(counts.tolist())
    statistics = sent(features, labels, RANK_2)
    sizes = factor_rows(counts, DIM, 2)
    assert sizes.tolist() == [2, 1, 2, 1]
    for c, factors in zip((3, 4, 5, 6), np.split(statistics["factors"], sizes.cumsum()[:-1]), strict=True):
        values, vectors = np.linalg.eigh(class_scatter(features, labels, c) / 40)
        top = (vectors[:, -2:] * values[-2:]) @ vectors[:, -2:].T
        assert np.allclose(factors.T @ factors, top, atol=1e-12)


def test_a_sketch_is_the_scatter_times_known_numbers() -> None:
    """Sent where it is smaller than rows and triangle: 3 of 12 rows; not for a client with two images."""
    options = AFCLOptions(sketch=3, dtype="fp64")
    features, labels = drawn([20, 30])
    statistics = sent(features, labels, options)
    assert statistics["scatter"].shape == (3, DIM) == scatter_shape(np.array([20, 30]), DIM, options)
    expected = (within(features, labels) @ sketch_matrix(DIM, 3).numpy()).T
    scatter, form = restore_scatter(statistics, DIM, options)
    assert form == "sketch"
    assert np.allclose(scatter, expected, atol=1e-9)
    few = drawn([2, 2])
    assert sent(*few, options)["scatter"].shape == (2, DIM)
    assert restore_scatter(sent(*few, options), DIM, options)[1] == "rows"
    assert np.allclose(restored(sent(*few, options), options), within(*few), atol=1e-10)


@pytest.mark.parametrize(
    ("sketch", "counts", "form"), [(3, [2, 3], "sketch"), (6, [9, 9], "matrix"), (7, [9, 9], "matrix")]
)
def test_a_sketch_that_saves_nothing_loses_nothing(sketch: int, counts: list[int], form: str) -> None:
    """A sketch of as many rows as the scatter has directions gives it back; the triangle goes before a longer one."""
    options, (features, labels) = AFCLOptions(sketch=sketch, dtype="fp64"), drawn(counts)
    scatter, came = restore_scatter(sent(features, labels, options), DIM, options)
    assert came == form
    if came == "sketch":
        spectrum = Spectrum.of_sketch(scatter, sketch_matrix(DIM, sketch))
        scatter = (spectrum.vectors * spectrum.values) @ spectrum.vectors.T
    assert np.allclose(scatter, within(features, labels), atol=1e-9)


@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 1e-6), ("fp16", 2e-3)])
@pytest.mark.parametrize("counts", [[3, 4], [40, 50]])
@pytest.mark.parametrize("rank", [0, 2])
def test_rounding_is_small(dtype: str, bound: float, counts: list[int], rank: int) -> None:
    options = AFCLOptions(head="regularised" if rank else "ridge", rank=rank or 1, dtype=dtype)
    features, labels = drawn(counts)
    statistics = sent(features, labels, options)
    number = {"fp32": np.float32, "fp16": np.float16}[dtype]
    assert ScatterStatistics().number_type(options) is number
    assert {a.dtype for n, a in statistics.items() if n not in ("class_ids", "counts")} == {np.dtype(number)}
    expected = within(features, labels)
    error = np.linalg.norm(restored(statistics, options) - expected, 2) / np.linalg.norm(expected, 2)
    assert 0 < error < bound
    assert not ScatterStatistics().invalid(statistics, DIM)


def packed_with(lowest: float, dim: int, dtype: type) -> Arrays:
    """A packed scatter of trace 1 whose lowest eigenvalue is ``lowest``."""
    turn, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((dim, dim)))
    values = np.r_[lowest, np.full(dim - 1, (1 - lowest) / (dim - 1))]
    return {"scatter": pack_symmetric((turn * values @ turn.T)[None]).astype(dtype)}


@pytest.mark.parametrize("dim", [112, 400])
@pytest.mark.parametrize(("dtype", "lowest"), [(np.float64, -1e-5), (np.float32, -1e-5), (np.float16, -3e-3)])
def test_a_packed_scatter_with_a_negative_eigenvalue_is_refused(dtype: type, lowest: float, dim: int) -> None:
    """Beyond what rounding to its type can do: |E| is at most eps / 2 times the trace."""
    assert "not positive semi-definite" in ScatterStatistics().invalid(packed_with(lowest, dim, dtype), dim)
    assert not ScatterStatistics().invalid(packed_with(0.0, dim, dtype), dim)


def test_a_scatter_of_the_smallest_numbers_of_fp16_is_no_negative_one() -> None:
    """Images that are nearly alike: the numbers are multiples of 6e-8, so each is rounded by up to 3e-8."""
    generator = np.random.default_rng(0)
    for spread in (3e-3, 7e-4, 5e-4, 2e-4, 1e-5):
        rows = spread * generator.standard_normal((500, 384))
        scatter = pack_symmetric((rows.T @ rows / 500)[None]).astype(np.float16)
        assert not ScatterStatistics().invalid({"scatter": scatter}, 384), spread


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "fp16"])
@pytest.mark.parametrize("images", [70, 150, 1000])
def test_no_honest_scatter_is_refused(dtype: str, images: int) -> None:
    """Of rank below or above its 112 rows, with directions of very different lengths."""
    for seed, decay in ((0, 0.0), (1, 2.0), (2, 4.0)):
        scales = np.geomspace(1, 10**-decay, 112).astype(np.float32)
        features, labels = drawn([images // 2, images - images // 2], 112, seed)
        statistics = sent(features * scales, labels, AFCLOptions(dtype=dtype))
        assert statistics["scatter"].shape == (1, 112 * 113 // 2)
        assert not ScatterStatistics().invalid(statistics, 112)


def test_with_noise_the_scatter_is_packed_and_semi_definite() -> None:
    """Whatever the client holds: even one image, which without noise sends a row of zeros."""
    mechanism = GaussianMechanism(0.0, 2.0, 5.0, numpy_rng(0, "test").standard_normal)
    keys = {"method": "afcl", "privacy-noise": 5.0, "privacy-feature-clip": 2.0}
    config = parse(keys)
    for counts in ([1], [3, 4], [40, 50]):
        features, labels = drawn(counts)
        clipped = mechanism.features(torch.from_numpy(features))
        statistics = ScatterStatistics().compute(clipped, torch.from_numpy(labels), config.options, mechanism)
        expected = ScatterStatistics().expected(np.array(counts), {}, DIM, config)
        assert expected == {"means": (len(counts), DIM), "scatter": (1, 78)}
        assert {n: a.shape for n, a in statistics.items() if a.dtype == np.float32} == expected
        values = np.linalg.eigvalsh(unpack_symmetric(statistics["scatter"].astype(np.float64), DIM)[0])
        assert values.min() > -1e-6 * values.sum()
        assert values.max() > 0
        assert not ScatterStatistics().invalid(statistics, DIM)
        assert restore_scatter(statistics, DIM, config.options)[1] == "matrix"


def test_vanishing_noise_leaves_means_and_scatter_as_they_are() -> None:
    mechanism = GaussianMechanism(0.0, 100.0, 1e-13, numpy_rng(0, "test").standard_normal)
    features, labels = drawn([40, 50])
    statistics = ScatterStatistics().compute(torch.from_numpy(features), torch.from_numpy(labels), EXACT, mechanism)
    plain = sent(features, labels, EXACT)
    assert np.allclose(statistics["means"], plain["means"], atol=1e-8)
    assert np.allclose(restored(statistics, EXACT), within(features, labels), atol=1e-5)


def test_the_noise_in_sums_of_features_has_the_deviation_z_times_b() -> None:
    """Over messages of the same two images; the mean times their number is the sum."""
    z, bound, number = 0.01, 3.0, 300
    rng = numpy_rng(0, "test").standard_normal
    features, labels = torch.tensor([[1.0, 2.0], [2.0, 1.0]]), torch.zeros(2).long()
    messages = [
        ScatterStatistics().compute(features, labels, EXACT, GaussianMechanism(0.0, bound, z, rng))
        for _ in range(number)
    ]
    sums = np.array([2 * m["means"][0] for m in messages])
    assert sums.mean(axis=0) == pytest.approx([3, 3], abs=0.01)
    assert sums.std(axis=0) == pytest.approx([z * bound] * 2, rel=0.15)
    assert ScatterStatistics().releases == 2


def test_noise_in_means_and_scatter_by_hand() -> None:
    """Two images of features 0, B = 5, z = 1: sums of 5 from draws of 1, and sum f f^T of draws times B^2 / sqrt(2).

    The scatter is half of sum f f^T less the noised sums' outer product over two images, 5 x 5 / 2 in each entry.
    """
    draws = iter([np.ones((1, 2)), np.array([[4.0, 0.0, 4.0]])])  # of the sums, then of the sum of products
    noise = GaussianMechanism(0.0, 5.0, 1.0, lambda shape: next(draws))
    statistics = ScatterStatistics().compute(torch.zeros(2, 2), torch.tensor([4, 4]), EXACT, noise)
    gram, taken = 4 * 25 / 2**0.5, 12.5
    assert statistics["means"] == pytest.approx(np.array([[2.5, 2.5]]))
    assert statistics["scatter"] == pytest.approx(np.array([[gram - taken, -taken, gram - taken]]) / 2)
