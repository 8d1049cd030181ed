"""Heads in closed form, against explicit inverses, determinants and hat matrices in NumPy."""

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor

from strategies import closed_form
from strategies.closed_form import (
    RIDGES,
    SHRINKAGES,
    Spectrum,
    choose_ridge,
    choose_shrinkage,
    draw_features,
    solve_discriminant,
    solve_regularised,
    solve_ridge,
)
from task.utils.seeding import torch_rng

RNG = np.random.default_rng(0)


def semi_definite(dim: int, rank: int, seed: int = 0) -> np.ndarray:
    root = np.random.default_rng(seed).normal(size=(rank, dim))
    return root.T @ root


def matrix_of(spectrum: Spectrum) -> np.ndarray:
    return ((spectrum.vectors * spectrum.values) @ spectrum.vectors.T).numpy()


def sketched(matrix: np.ndarray, rank: int) -> Spectrum:
    omega = torch.from_numpy(np.random.default_rng(9).normal(size=(len(matrix), rank)))
    return Spectrum.of_sketch((torch.from_numpy(matrix) @ omega).T, omega)


def dense(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array)


@pytest.mark.parametrize("rank", [6, 2])
@pytest.mark.parametrize("of", ["matrix", "sketch"])
def test_powers_of_a_shifted_matrix(rank: int, of: str) -> None:
    """With all eigenvectors, and with those that are not zero only."""
    matrix, right = semi_definite(6, rank), RNG.normal(size=(6, 3))
    spectrum = Spectrum.of_matrix(dense(matrix)) if of == "matrix" else sketched(matrix, rank)
    shifted = matrix + 0.3 * np.eye(6)
    inverse = np.linalg.inv(shifted)
    assert np.allclose(spectrum.power(-1, 0.3, dense(right)), inverse @ right, rtol=1e-9)
    assert np.allclose(spectrum.power(-0.5, 0.3, dense(right)), scipy.linalg.sqrtm(inverse) @ right, rtol=1e-8)
    assert np.allclose(spectrum.power(2, 0.3, dense(right)), shifted @ shifted @ right, rtol=1e-9)


def test_a_small_shift_costs_no_digits() -> None:
    """There is an eigenvector for each direction, so nothing is divided by the shift alone."""
    matrix, right = semi_definite(6, 6), RNG.normal(size=(6, 3))
    power = Spectrum.of_matrix(dense(matrix)).power(-1, 1e-13, dense(right))
    assert np.allclose(power, np.linalg.inv(matrix) @ right, rtol=1e-9)


def test_no_eigenvalue_is_below_the_error_that_the_negative_ones_show() -> None:
    spectrum = Spectrum.of_matrix(torch.diag(torch.tensor([5.0, 2.0, 0.1, 0.0, -1.0]).double()))
    assert np.allclose(matrix_of(spectrum), np.diag([5.0, 2.0, 1.0, 1.0, 1.0]))
    exact = Spectrum.of_matrix(torch.diag(torch.tensor([5.0, 0.1, 0.0]).double()))
    assert np.allclose(matrix_of(exact), np.diag([5.0, 0.1, 0.0]), atol=1e-15)


@pytest.mark.parametrize("sketch", [3, 5, 8, 12])
def test_a_sketch_is_exact_up_to_its_rank(sketch: int) -> None:
    """A of rank 3; the sketch may be longer than A itself."""
    matrix = semi_definite(8, 3)
    assert np.allclose(matrix_of(sketched(matrix, sketch)), matrix, atol=1e-9)


def test_a_sketch_of_less_is_nystroms_and_never_more_than_the_matrix() -> None:
    matrix = semi_definite(8, 8)
    omega = np.random.default_rng(9).normal(size=(8, 3))
    expected = matrix @ omega @ np.linalg.inv(omega.T @ matrix @ omega) @ omega.T @ matrix
    result = matrix_of(sketched(matrix, 3))
    assert np.allclose(result, expected, atol=1e-9)
    assert np.linalg.eigvalsh(matrix - result).min() > -1e-9


def test_a_sketch_of_nothing_is_zero() -> None:
    """Classes of one image each have no scatter."""
    right = torch.ones(4, 1).double()
    assert np.allclose(sketched(np.zeros((4, 4)), 2).power(-1, 0.5, right), 2 * right)


def one_hot(labels: np.ndarray) -> np.ndarray:
    return (labels[:, None] == np.arange(labels.max() + 1)).astype(np.float64)


def chosen(features: np.ndarray, targets: np.ndarray) -> float:
    gram = Spectrum.of_matrix(dense(features.T @ features))
    return choose_ridge(gram, dense(targets.T @ features), len(features))


def ridges_of(features: np.ndarray) -> np.ndarray:
    assert RIDGES[0] == pytest.approx(1e-10)
    assert RIDGES[-1] == pytest.approx(10)
    return RIDGES.numpy() * np.linalg.eigvalsh(features.T @ features).max()


@pytest.mark.parametrize(
    ("images", "dim", "noise"),
    [(40, 6, 0.5), (40, 6, 1.0), (30, 30, 1.0), (20, 50, 1.0), (20, 50, 3.0), (20, 55, 10.0), (30, 70, 10.0)],
)
def test_the_ridge_is_that_of_generalised_cross_validation(images: int, dim: int, noise: float) -> None:
    """(|Y - A Y|^2 / n) / (tr(I - A) / n)^2 with the hat matrix A = H (H^T H + lambda I)^-1 H^T itself.

    With as many features as images the quotient of a tiny ridge is 0 / 0: it is not among the choices. In the last
    three cases it would win, by rounding; in that of 55 features the smallest ridge that is left wins.
    """
    rng = np.random.default_rng(dim)
    labels = rng.permutation(np.arange(images) % 3)
    scales = np.geomspace(1, 1e-2, dim)
    features = (rng.normal(size=(3, dim))[labels] + noise * rng.normal(size=(images, dim))) * scales
    targets, scores = one_hot(labels), []
    for ridge in ridges_of(features):
        hat = features @ np.linalg.inv(features.T @ features + ridge * np.eye(dim)) @ features.T
        rest = np.eye(images) - hat
        freedom = np.trace(rest) / images
        scores.append(np.square(rest @ targets).sum() / images / freedom**2 if freedom > 0.01 else np.inf)
    assert chosen(features, targets) == pytest.approx(ridges_of(features)[np.argmin(scores)])
    assert 0 < np.argmin(scores) < len(scores) - 1


@pytest.mark.parametrize("seed", range(4))
def test_a_ridge_from_rounded_sums_is_one_for_the_images(seed: int) -> None:
    """The scatter travels as a triangle of fp16: rounded so, it has negative eigenvalues, and class sums there."""
    rng = np.random.default_rng(seed)
    labels = np.arange(400) % 4
    scales = np.geomspace(1, 1e-3, 80)
    mixed = np.linalg.qr(rng.normal(size=(80, 80)))[0]
    features = (rng.normal(size=(4, 80))[labels] + 2 * rng.normal(size=(400, 80))) * scales @ mixed
    targets, counts = one_hot(labels), np.bincount(labels)
    means = (targets.T @ features / counts[:, None]).astype(np.float16).astype(np.float64)
    apart = features - (targets.T @ features / counts[:, None])[labels]
    scatter = 400 * (apart.T @ apart / 400).astype(np.float16).astype(np.float64)
    rounded, sums = scatter + (means.T * counts) @ means, means * counts[:, None]
    assert np.linalg.eigvalsh(rounded).min() < 0
    spectrum = Spectrum.of_matrix(dense(rounded))
    weight = solve_ridge(spectrum, dense(sums), choose_ridge(spectrum, dense(sums), 400)).numpy()
    exact = np.linalg.solve(features.T @ features + chosen(features, targets) * np.eye(80), features.T @ targets)
    assert np.square(targets - features @ weight.T).sum() < 1.5 * np.square(targets - features @ exact).sum()


def test_where_all_images_have_the_same_leverage_it_is_leaving_one_out() -> None:
    """Waves at equal distances: then generalised cross-validation is exact, so the regressions without each image."""
    images, rng = 24, np.random.default_rng(5)
    angles = 2 * np.pi * np.outer(np.arange(images), [1, 2, 3]) / images
    features = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * ([1.0, 0.4, 0.1] * 2)
    targets = one_hot((features[:, 0] + 0.8 * rng.normal(size=images) > 0).astype(int))
    errors = []
    for ridge in ridges_of(features):
        missed = 0.0
        for left in range(images):
            others = np.arange(images) != left
            inverse = np.linalg.inv(features[others].T @ features[others] + ridge * np.eye(6))
            predicted = features[left] @ inverse @ features[others].T @ targets[others]
            missed += np.square(targets[left] - predicted).sum()
        errors.append(missed)
    assert chosen(features, targets) == pytest.approx(ridges_of(features)[np.argmin(errors)])
    assert 0 < np.argmin(errors) < len(errors) - 1


def test_ridge_and_discriminant_by_explicit_inverse() -> None:
    matrix, sums = semi_definite(5, 5), RNG.normal(size=(3, 5))
    spectrum = Spectrum.of_matrix(dense(matrix))
    expected = sums @ np.linalg.inv(matrix + 0.7 * np.eye(5))
    assert np.allclose(solve_ridge(spectrum, dense(sums), 0.7), expected, rtol=1e-9)
    weight, bias = solve_discriminant(spectrum, dense(sums), 0.2)
    inverse = np.linalg.inv(matrix + 0.2 * np.trace(matrix) / 5 * np.eye(5))
    assert np.allclose(weight, sums @ inverse, rtol=1e-9)
    assert np.allclose(bias, [-0.5 * mean @ inverse @ mean for mean in sums], rtol=1e-9)


@pytest.mark.parametrize("rank", [5, 3, 1])
@pytest.mark.parametrize(("share", "shrinkage"), [(0.3, 0.05), (0.9, 0.5)])
def test_regularised_by_explicit_inverse_and_determinant(rank: int, share: float, shrinkage: float) -> None:
    """Differences of the classes' log densities; rows of zeros and a class without a covariance change nothing."""
    covariance, means = semi_definite(5, 5) / 5, RNG.normal(size=(3, 5))
    factors = RNG.normal(size=(3, rank, 5))
    factors[1, rank // 2 :] = 0
    factors[2] = 0
    solution = solve_regularised(Spectrum.of_matrix(dense(covariance)), dense(means), dense(factors), share, shrinkage)
    points = RNG.normal(size=(7, 5))
    weight, bias, directions, offsets = (value.numpy() for value in solution.values())
    along = np.einsum("kqm,nm->nkq", directions, points) - offsets
    logits = points @ weight.T + bias + 0.5 * np.square(along).sum(axis=2)
    ridge = shrinkage * np.trace(covariance) / 5 * np.eye(5)
    expected = np.empty((7, 3))
    for c in range(3):
        own = share * factors[c].T @ factors[c] + (1 - share) * covariance + ridge
        gaps = points - means[c]
        distance = np.einsum("nm,mk,nk->n", gaps, np.linalg.inv(own), gaps)
        expected[:, c] = -0.5 * distance - 0.5 * np.log(np.linalg.det(own))
    assert np.allclose(logits - logits[:, :1], expected - expected[:, :1], rtol=1e-7, atol=1e-9)


def gaussian_classes(
    images: int | list[int], seed: int, classes: int = 5, dim: int = 30
) -> tuple[np.ndarray, np.ndarray]:
    """Features [N, M] and labels [N] of classes that differ most where each class varies least."""
    means = np.random.default_rng(1).normal(size=(classes, dim)) * 0.7
    scales = np.geomspace(3, 0.3, dim)
    labels = np.arange(classes).repeat(images)
    return means[labels] * scales**0.3 + np.random.default_rng(seed).normal(size=(len(labels), dim)) * scales, labels


def sums_of(features: np.ndarray, labels: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Counts [K], means [K, M], zero of an empty class, and scatter about them [M, M]."""
    groups = [features[labels == c] for c in range(classes)]
    means = np.stack([g.mean(axis=0) if len(g) else np.zeros(features.shape[1]) for g in groups])
    return (
        np.array([len(g) for g in groups]),
        means,
        sum((g - m).T @ (g - m) for g, m in zip(groups, means, strict=True)),
    )


def for_drawing(sums: Sequence[np.ndarray | Tensor]) -> tuple[Tensor, Tensor, Spectrum]:
    counts, means, scatter = (torch.as_tensor(part).double() for part in sums)
    return counts, means, Spectrum.of_matrix(scatter)


@pytest.mark.parametrize("counts", [[40, 50, 3], [4, 0, 1], [1, 1, 1]], ids=str)
def test_drawn_features_have_the_sums_of_the_others_and_are_not_they(counts: list[int]) -> None:
    """More images than features, fewer, and none that differs from its class mean."""
    labels = np.arange(3).repeat(counts)
    features = np.random.default_rng(3).normal(size=(len(labels), 8)) * np.geomspace(1, 1e-3, 8) + labels[:, None]
    expected = sums_of(features, labels, 3)
    drawn, classes = (part.numpy() for part in draw_features(*for_drawing(expected), torch.Generator()))
    for got, wanted in zip(sums_of(drawn, classes, 3), expected, strict=True):
        assert np.allclose(got, wanted, rtol=1e-6, atol=1e-9)
    assert max(counts) == 1 or np.abs(drawn - features).max() > 0.1


def test_drawn_features_favour_no_direction() -> None:
    """Each lies on either side of its class mean equally often, along each direction of the scatter.

    QR alone puts the first feature on the same side of the first direction in every draw.
    """
    sums, generator = for_drawing(sums_of(*gaussian_classes(4, seed=0, dim=6), classes=5)), torch_rng(0, "test")
    drawn = [draw_features(*sums, generator) for _ in range(400)]
    along = torch.stack([features - sums[1][classes] for features, classes in drawn]) @ sums[2].vectors
    positive = (along > 0).double().mean(dim=0)  # [features, directions]
    assert positive.shape == (20, 6)
    assert (positive - 0.5).abs().max() < 4 * 0.5 / 400**0.5


@pytest.mark.parametrize(("images", "limit", "expected"), [(1, 10**6, 1.0), (30, 100, 0.01)])
def test_where_nothing_is_drawn_the_shrinkage_is_the_usual_one(
    images: int, limit: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One image of each class, and more numbers than may be drawn."""
    monkeypatch.setattr(closed_form, "MAX_DRAWN", limit)
    monkeypatch.setattr(closed_form, "draw_features", None)
    sums = sums_of(*gaussian_classes(images, seed=0), classes=5)
    assert choose_shrinkage(*for_drawing(sums)) == expected


@pytest.mark.parametrize(
    ("images", "usual"), [([2] * 5, 1.0), ([4] * 5, 0.01), ([6] * 5, 0.01), ([450] * 5, 0.01), ([1, 1, 1, 6, 6], 0.01)]
)
def test_the_shrinkage_is_that_of_cross_validation(images: list[int], usual: float) -> None:
    """By explicit inverses; every fifth drawn feature is held out in turn; of six images 66 times.

    Of two and of four images the shrinkage with fewest errors is another one, and so is the choice from folds that
    begin at the same place in each class: of two images, these take the scatter of all classes away. A class whose one
    image is held out cannot be predicted.
    """
    sums = [dense(part) for part in sums_of(*gaussian_classes(images, seed=0, dim=12), classes=5)]
    generator, wrong = torch_rng(0, "features"), np.zeros(len(SHRINKAGES))
    for _ in range(max(1, 2000 // sum(images))):
        features, labels = (part.numpy() for part in draw_features(*for_drawing(sums), generator))
        fold = (np.concatenate([np.arange(number) for number in images]) + labels) % 5
        for held_out, (i, shrinkage) in product(range(5), enumerate(SHRINKAGES.tolist())):
            rest, here = fold != held_out, fold == held_out
            counts, means, scatter = sums_of(features[rest], labels[rest], 5)
            covariance = scatter / (rest.sum() - (counts > 0).sum())
            inverse = np.linalg.inv(covariance + shrinkage * np.trace(covariance) / 12 * np.eye(12))
            gaps = features[here][:, None] - means
            distance = np.where(counts > 0, np.einsum("nkm,mj,nkj->nk", gaps, inverse, gaps), np.inf)
            wrong[i] += (distance.argmin(axis=1) != labels[here]).sum()
    near = [
        s
        for s, count in zip(SHRINKAGES.tolist(), wrong, strict=True)
        if count <= wrong.min() + (wrong.min() + 1) ** 0.5 / 2
    ]
    assert choose_shrinkage(*for_drawing(sums)) == pytest.approx(min(near, key=lambda s: abs(np.log(s / usual))))
    assert len(near) < len(wrong)


def test_however_often_features_are_drawn_the_scatter_is_decomposed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 2,000 features that takes three seconds."""
    shapes, eigh = [], torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: shapes.append(matrix.shape) or eigh(matrix))
    choose_shrinkage(*for_drawing(sums_of(*gaussian_classes(4, seed=0), classes=5)))
    assert shapes == [(30, 30)]


def test_where_all_shrinkages_are_equally_good_it_is_the_usual_one() -> None:
    """One class, and classes far apart."""
    for means in (np.zeros((1, 3)), 1000 * np.eye(3)):
        counts = np.full(len(means), 30)
        assert choose_shrinkage(*for_drawing((counts, means, np.eye(3)))) == pytest.approx(0.01)


@pytest.mark.parametrize("images", [8, 16, 200])
def test_the_shrinkage_is_good_for_images_that_nobody_has_seen(images: int) -> None:
    """Few images need much, many need little; the choice is within three points of the best."""
    counts, means, scatter = sums_of(*gaussian_classes(images, seed=0), classes=5)
    fresh, labels = gaussian_classes(400, seed=1)
    spectrum, accuracies = Spectrum.of_matrix(dense(scatter / (counts.sum() - 5))), []
    for shrinkage in SHRINKAGES.tolist():
        weight, bias = (part.numpy() for part in solve_discriminant(spectrum, dense(means), shrinkage))
        accuracies.append(float(((fresh @ weight.T + bias).argmax(axis=1) == labels).mean()))
    chosen = choose_shrinkage(*for_drawing((counts, means, scatter)))
    there = accuracies[int((SHRINKAGES - chosen).abs().argmin())]
    assert there > max(accuracies) - 0.03
    assert there > min(accuracies) + 0.1


def test_regularised_without_any_scatter_is_the_nearest_mean() -> None:
    means = dense(RNG.normal(size=(3, 4)))
    nothing = Spectrum.of_matrix(torch.zeros(4, 4).double())
    solution = solve_regularised(nothing, means, torch.zeros(3, 2, 4).double(), 0.1, 0.01)
    points = dense(RNG.normal(size=(20, 4)))
    logits = points @ solution["weight"].T + solution["bias"]
    assert torch.isfinite(logits).all()
    assert (logits.argmax(1) == torch.cdist(points, means).argmin(1)).all()


def test_what_rounding_leaves_of_no_scatter_counts_for_nothing() -> None:
    """One image a class: sum h h^T - sum mu mu^T is zero but for rounding, which grows with the square of features."""
    images = dense(RNG.normal(size=(40, 8)) + 1000)
    gram = sum(torch.outer(h, h) for h in images.flip(0))
    left = (gram - images.T @ images) / 40
    assert left.abs().max() > 0
    weight, bias = solve_discriminant(Spectrum.of_matrix(left), images, 0.01)
    points = images + 0.5 * dense(RNG.normal(size=(40, 8)))
    assert ((points @ weight.T + bias).argmax(1) == torch.cdist(points, images).argmin(1)).all()
