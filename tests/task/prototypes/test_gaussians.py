"""Class statistics, their merging and their sampling, against numpy.cov, raw samples and numbers worked out by hand."""

import numpy as np
import pytest
import torch

from strategies.base import join_statistics
from task.method_options import CCVROptions, HGPOptions, Options
from task.prototypes.gaussians import (
    Gaussians,
    cholesky,
    cholesky_fails,
    class_means,
    fill_singletons,
    merge_means,
    pack_symmetric,
    prepare_gaussians,
    unpack_symmetric,
)
from task.prototypes.statistics import MeanStatistics
from tests.helpers.prototypes import gaussian_statistics

PACKINGS = ("diagonal", "full", "low-rank")
COUNTS = {7: 9, 2: 6, 11: 5, 4: 1}  # class id -> images; class 4 has a single one
D = 5


def labelled_features(offset=0.0, seed=0):
    """Correlated float32 features of the classes in COUNTS, shuffled, and their labels."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(list(COUNTS), list(COUNTS.values())))
    mixing = {c: rng.normal(size=(D, D)) for c in COUNTS}
    features = np.stack([offset + c + rng.normal(size=D) @ mixing[c] for c in labels]).astype(np.float32)
    return features, labels


def statistics(packing, rank=3, **options):
    features, labels = labelled_features(**options)
    sent = gaussian_statistics(torch.from_numpy(features), torch.from_numpy(labels), packing, rank)
    return features.astype(np.float64), labels, sent


def symmetric(values, dim):
    """Upper triangle, written row by row -> matrix, element by element."""
    matrix, values = np.zeros((dim, dim)), iter(values)
    for i in range(dim):
        for j in range(i, dim):
            matrix[i, j] = matrix[j, i] = next(values)
    return matrix


@pytest.mark.parametrize("packing", PACKINGS)
def test_counts_and_means(packing):
    """NumPy's mean of each class; class ids ascending, types as they travel."""
    features, labels, sent = statistics(packing)
    assert sent["class_ids"].tolist() == [2, 4, 7, 11]
    assert sent["counts"].tolist() == [6, 1, 9, 5]
    assert sent["class_ids"].dtype == sent["counts"].dtype == np.int64
    for c, mean in zip(sent["class_ids"], sent["means"], strict=True):
        assert np.allclose(mean, features[labels == c].mean(axis=0), rtol=1e-5)
    assert all(a.dtype == np.float32 for n, a in sent.items() if n not in ("class_ids", "counts"))


def test_mean_statistics_are_the_same_without_covariance():
    features, labels = labelled_features()
    sent = MeanStatistics().compute(torch.from_numpy(features), torch.from_numpy(labels), Options())
    assert set(sent) == {"class_ids", "counts", "means"}
    for c, n, mean in zip(*sent.values(), strict=True):
        assert n == (labels == c).sum()
        assert np.allclose(mean, features[labels == c].mean(axis=0, dtype=np.float64), rtol=1e-5)


def numpy_covariances(features, labels):
    """numpy.cov of every class, ascending; zero for a single image."""
    return [
        np.cov(features[labels == c], rowvar=False) if (labels == c).sum() > 1 else np.zeros((D, D))
        for c in np.unique(labels)
    ]


def test_diagonal_is_the_diagonal_of_numpy_cov():
    features, labels, sent = statistics("diagonal")
    expected = [c.diagonal() for c in numpy_covariances(features, labels)]
    assert set(sent) == {"class_ids", "counts", "means", "variances"}
    assert np.allclose(sent["variances"], expected, rtol=1e-4)
    assert not sent["variances"][1].any()


def test_full_is_numpy_cov():
    features, labels, sent = statistics("full")
    assert set(sent) == {"class_ids", "counts", "means", "covariances"}
    assert sent["covariances"].shape == (4, 15)
    for packed, expected in zip(sent["covariances"], numpy_covariances(features, labels), strict=True):
        assert np.allclose(symmetric(packed, D), expected, rtol=1e-4, atol=1e-4)
    assert not sent["covariances"][1].any()


@pytest.mark.parametrize("rank", [8, 12])
def test_low_rank_is_exact_when_the_rank_suffices(rank):
    """At most n - 1 = 8 directions exist, fewer where D is smaller; the rest of the factors is padding."""
    features, labels, sent = statistics("low-rank", rank)
    assert sent["factors"].shape == (4, rank, D)
    for factor, rest, expected in zip(
        sent["factors"], sent["variances"], numpy_covariances(features, labels), strict=True
    ):
        assert np.allclose(factor.T @ factor + np.diag(rest), expected, rtol=1e-4, atol=1e-4)
        assert np.all(rest <= 1e-5 * max(np.trace(expected), 1))
    assert not sent["factors"][1].any()
    assert not sent["variances"][1].any()


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_low_rank_is_the_best_approximation_with_an_exact_diagonal(rank):
    """The r leading eigenpairs of numpy.cov, by NumPy's symmetric eigensolver; what they miss is on the diagonal."""
    features, labels, sent = statistics("low-rank", rank)
    assert sent["factors"].shape == (4, rank, D)
    for factor, rest, full in zip(sent["factors"], sent["variances"], numpy_covariances(features, labels), strict=True):
        values, vectors = np.linalg.eigh(full)
        best = (vectors[:, -rank:] * values[-rank:]) @ vectors[:, -rank:].T
        assert np.allclose(factor.T @ factor, best, rtol=1e-3, atol=1e-4)
        assert np.allclose(rest, (full - best).diagonal(), rtol=1e-3, atol=1e-4)
        assert (rest >= 0).all()


@pytest.mark.parametrize("packing", PACKINGS)
def test_statistics_keep_their_digits_far_from_the_origin(packing):
    """Features near 1000 with a spread of about 2: E[x^2] - E[x]^2 in float32 would be off by more than a tenth."""
    features, labels, sent = statistics(packing, rank=8, offset=1000.0)
    spread = sent.get("variances", 0.0)
    if packing == "full":
        spread = np.stack([symmetric(p, D).diagonal() for p in sent["covariances"]])
    if packing == "low-rank":
        spread = spread + np.square(sent["factors"]).sum(axis=1)
    expected = np.stack([c.diagonal() for c in numpy_covariances(features, labels)])
    assert np.allclose(spread, expected, rtol=2e-3)


@pytest.mark.parametrize("packing", PACKINGS)
def test_one_image_in_all(packing):
    sent = gaussian_statistics(torch.full((1, D), 2.5), torch.tensor([3]), packing, 2)
    assert (sent["class_ids"].tolist(), sent["counts"].tolist()) == ([3], [1])
    assert sent["means"].tolist() == [[2.5] * D]
    assert not any(np.any(a) for n, a in sent.items() if n in ("variances", "covariances", "factors"))


def test_packing_is_the_upper_triangle_row_by_row():
    matrices = np.array([[[1, 2, 3], [2, 4, 5], [3, 5, 6]], [[7, 8, 9], [8, 1, 2], [9, 2, 3]]], np.float32)
    packed = pack_symmetric(matrices)
    assert packed.tolist() == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 1, 2, 3]]
    assert packed.dtype == np.float32
    assert np.array_equal(unpack_symmetric(packed, 3), matrices)
    assert unpack_symmetric(packed, 3).dtype == np.float32


@pytest.mark.parametrize("dim", [1, 2, 7])
def test_packing_round_trip(dim):
    rng = np.random.default_rng(dim)
    packed = rng.normal(size=(4, dim * (dim + 1) // 2))
    assert np.array_equal(pack_symmetric(unpack_symmetric(packed, dim)), packed)
    assert np.array_equal(unpack_symmetric(packed, dim)[2], symmetric(packed[2], dim))


def test_merge_means_by_hand():
    """Class 5: (2 * 1 + 3 * 6) / 5 = 4; class 3 and 9 are held by one client each."""
    means = np.array([[1, 0], [7, 7], [6, 10], [-1, 2]], np.float32)
    joined = {"class_ids": np.array([5, 9, 5, 3]), "counts": np.array([2, 1, 3, 4]), "means": means}
    classes, means = merge_means(joined)
    assert classes.tolist() == [3, 5, 9]
    assert means.tolist() == [[-1, 2], [4, 6], [7, 7]]
    assert means.dtype == torch.float32


def test_fill_singletons_by_hand():
    """Class 1 borrows (2 * 1 + 6 * 5) / 8 = 4 from its own; class 2 has none, so (2*1 + 6*5 + 4*20) / 12 = 28/3."""
    class_ids, counts = np.array([1, 1, 1, 2, 3]), np.array([2, 1, 6, 1, 4])
    spread = np.array([[1.0, 10], [0, 0], [5, 2], [0, 0], [20, 0]], np.float32)
    filled = fill_singletons(class_ids, counts, spread)
    expected = [[1, 10], [4, 4], [5, 2], [112 / 12, 32 / 12], [20, 0]]  # second column: (2*10 + 6*2) / 8 and / 12
    assert np.allclose(filled, expected, rtol=1e-6)
    assert filled.dtype == np.float32
    assert np.array_equal(filled[[0, 2, 4]], spread[[0, 2, 4]])


@pytest.mark.parametrize("counts", [[1, 1, 1], [2, 3, 2]], ids=["nobody to borrow from", "nobody in need"])
def test_fill_singletons_leaves_alone_what_it_cannot_or_need_not_fill(counts):
    spread = np.arange(6, dtype=np.float32).reshape(3, 2)
    assert np.array_equal(fill_singletons(np.array([4, 4, 8]), np.array(counts), spread), spread)


def replies(packing, rank=2):
    """Two clients: classes 1 (4 images), 2 (one image); classes 2 (6 images), 3 (one image)."""
    rng = np.random.default_rng(8)
    sent, raw = [], []
    for classes in ([1] * 4 + [2], [2] * 6 + [3]):
        features = rng.normal(size=(len(classes), 3)).astype(np.float32) @ rng.normal(size=(3, 3)).astype(np.float32)
        sent.append(gaussian_statistics(torch.from_numpy(features), torch.tensor(classes), packing, rank))
        raw.append(features.astype(np.float64))
    return sent, raw


def implied_covariances(bank):
    """Covariance of mean + deviation * noise + noise @ factor."""
    factors, deviations = bank.factors.double().numpy(), bank.deviations.double().numpy()
    return factors.transpose(0, 2, 1) @ factors + np.stack([np.diag(d**2) for d in deviations])


@pytest.mark.parametrize("packing", PACKINGS)
def test_prepare_gaussians_joins_and_fills(packing):
    """Covariances from numpy.cov; the single images of class 2 and 3 take class 2's from the other client, else all."""
    sent, raw = replies(packing)
    bank = prepare_gaussians(join_statistics(sent), packing)
    assert bank.class_ids.tolist() == [1, 2, 2, 3]
    assert bank.counts.tolist() == [4, 1, 6, 1]
    means = [raw[0][:4].mean(axis=0), raw[0][4], raw[1][:6].mean(axis=0), raw[1][6]]
    assert np.allclose(bank.means, means, rtol=1e-5, atol=1e-6)
    one, two = np.cov(raw[0][:4], rowvar=False), np.cov(raw[1][:6], rowvar=False)
    both = (4 * one + 6 * two) / 10
    for ours, full, single in zip(
        implied_covariances(bank), [one, two, two, both], [False, True, False, True], strict=True
    ):
        reference = expected_covariance(full, packing, single)
        assert np.allclose(ours, reference, rtol=2e-4, atol=2e-5 * np.trace(full))


def expected_covariance(full, packing, single):
    """What a packing keeps of a covariance: rank 2 and the whole diagonal; a borrowed low-rank one is its diagonal."""
    diagonal = np.diag(full.diagonal())
    if packing == "full":
        return full
    if packing == "diagonal" or single:
        return diagonal
    values, vectors = np.linalg.eigh(full)
    best = (vectors[:, -2:] * values[-2:]) @ vectors[:, -2:].T
    return best + np.diag((full - best).diagonal())


def test_pick_and_join():
    bank = prepare_gaussians(join_statistics(replies("low-rank")[0]), "low-rank")
    picked, rest = bank.pick(bank.class_ids == 2), bank.pick(bank.class_ids != 2)
    assert (len(bank), len(picked), len(rest)) == (4, 2, 2)
    joined = picked.join(rest)
    for name, value in vars(joined).items():
        assert torch.equal(value, vars(bank)[name][[1, 2, 0, 3]]), name


def test_cholesky_of_a_definite_matrix_by_hand():
    """[[4, 2], [2, 5]] = L L^T with L = [[2, 0], [1, 2]]."""
    factor, failed = cholesky(torch.tensor([[[4.0, 2.0], [2.0, 5.0]]]))
    assert failed.tolist() == [False]
    assert torch.allclose(factor, torch.tensor([[[2.0, 0.0], [1.0, 2.0]]]), atol=1e-5)


def test_cholesky_takes_rank_deficient_covariances_and_flags_indefinite_ones():
    """Three directions in 8 dimensions, zero, and a matrix with an eigenvalue of minus a hundredth of its trace."""
    rng = np.random.default_rng(3)
    deficient = [(lambda a: a.T @ a)(rng.normal(size=(3, 8)).astype(np.float32)) for _ in range(4)]
    turn = np.linalg.qr(rng.normal(size=(8, 8)))[0]
    indefinite = turn @ np.diag([-0.08, 1, 1, 1, 1, 1, 1, 2]) @ turn.T
    matrices = np.stack([*deficient, np.zeros((8, 8)), indefinite]).astype(np.float32)
    factor, failed = cholesky(torch.from_numpy(matrices))
    assert failed.tolist() == [False] * 5 + [True]
    for lower, full in zip(factor[:5].double().numpy(), matrices, strict=False):
        assert np.array_equal(lower, np.tril(lower))
        assert np.abs(lower @ lower.T - full).max() <= 3e-6 * np.trace(full) + 1e-11
    packed = np.stack([m[np.triu_indices(8)] for m in matrices])
    assert not cholesky_fails(packed[:5], 8)
    assert cholesky_fails(packed, 8)


def test_a_covariance_that_a_client_computed_never_fails():
    """Fewer images than dimensions, in float32 and far from the origin: rounding makes eigenvalues below zero."""
    features = torch.randn(12, 64, generator=torch.Generator().manual_seed(4)) + 30
    sent = gaussian_statistics(features, torch.zeros(12, dtype=torch.int64), "full", 1)
    assert np.linalg.eigvalsh(symmetric(sent["covariances"][0], 64)).min() < 0
    assert not cholesky_fails(sent["covariances"], 64)


def bank_of_three():
    """Classes 4, 4, 9 with means, deviations and factors that make every entry of the covariance matter."""
    return Gaussians(
        torch.tensor([4, 4, 9]),
        torch.tensor([1, 3, 4]),
        torch.tensor([[100.0, 0, 0], [0, -100, 0], [0, 0, 50]]),
        torch.tensor([[1.0, 2, 3], [0.5, 0, 1], [0, 1, 0]]),
        torch.tensor([[[1.0, -1, 2], [0, 0, 1]], [[2, 1, 0], [0, 1, 1]], [[0, 3, 1], [1, 1, 1]]]),
    )


@pytest.mark.parametrize("packing", PACKINGS)
def test_samples_have_the_mean_and_scaled_covariance(packing):
    """Bounds: 5 standard errors; of a mean sqrt(S_jj / n), of a covariance sqrt((S_ii S_jj + S_ij^2) / (n - 1))."""
    bank, scale = bank_of_three(), 3.0
    factors = bank.factors[:, :0] if packing == "diagonal" else bank.factors
    deviations = torch.zeros(3, 3) if packing == "full" else bank.deviations
    bank = Gaussians(bank.class_ids, bank.counts, bank.means, deviations, factors)
    weights = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    drawn, class_ids = bank.sample(weights, 30_000, scale, torch.Generator().manual_seed(5))
    drawn = drawn.double().numpy()
    source = np.argmin(np.square(drawn[:, None] - bank.means.numpy()).sum(axis=2), axis=1)  # the means are far apart
    assert np.array_equal(bank.class_ids.numpy()[source], class_ids.numpy())
    for p, covariance in enumerate(implied_covariances(bank)):
        samples, expected = drawn[source == p], scale * covariance
        n, spread = len(samples), expected.diagonal()
        assert np.all(np.abs(samples.mean(axis=0) - bank.means[p].numpy()) <= 5 * np.sqrt(spread / n) + 1e-5)
        error = np.sqrt((np.outer(spread, spread) + expected**2) / (n - 1))
        assert np.all(np.abs(np.cov(samples, rowvar=False) - expected) <= 5 * error + 1e-5)


def test_samples_come_in_the_shares_of_the_weights():
    """Multinomial: each prototype's count is within 5 sqrt(n p (1 - p)); weights need not sum to 1."""
    bank, n = bank_of_three(), 20_000
    drawn, class_ids = bank.sample(torch.tensor([1.0, 3.0, 6.0]), n, 0.01, torch.Generator().manual_seed(6))
    source = np.argmin(np.square(drawn[:, None].numpy() - bank.means.numpy()).sum(axis=2), axis=1)
    for times, p in zip(np.bincount(source, minlength=3), (0.1, 0.3, 0.6), strict=True):
        assert abs(times - n * p) <= 5 * np.sqrt(n * p * (1 - p))
    assert drawn.shape == (n, 3)
    assert class_ids.bincount().tolist()[4] + class_ids.bincount().tolist()[9] == n


def test_a_prototype_of_weight_zero_is_never_drawn():
    _, class_ids = bank_of_three().sample(torch.tensor([0.5, 0.5, 0.0]), 500, 3.0, torch.Generator().manual_seed(7))
    assert set(class_ids.tolist()) == {4}


@pytest.mark.parametrize("rank", [0, 2])
def test_samples_repeat_with_the_generator_and_only_then(rank):
    bank = bank_of_three()
    bank = Gaussians(bank.class_ids, bank.counts, bank.means, bank.deviations, bank.factors[:, :rank])
    weights = torch.ones(3)
    one, again, other = (bank.sample(weights, 40, 3.0, torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(one[0], again[0])
    assert torch.equal(one[1], again[1])
    assert not torch.equal(one[0], other[0])
    rng = torch.Generator().manual_seed(1)
    assert not torch.equal(bank.sample(weights, 40, 3.0, rng)[0], bank.sample(weights, 40, 3.0, rng)[0])


def test_every_sample_uses_its_own_factor():
    """150 prototypes without noise of their own and one direction each: x - mean must lie along that direction."""
    rng = torch.Generator().manual_seed(8)
    P, means = 150, 1000 * torch.eye(150)
    factors = torch.randn(P, 1, P, generator=rng)
    bank = Gaussians(torch.arange(P), torch.ones(P).long(), means, torch.zeros(P, P), factors)
    weights = torch.rand(P, generator=rng) ** 3
    drawn, class_ids = bank.sample(weights, 900, 2.0, rng)
    assert len(drawn) == 900
    apart, along = (drawn - means[class_ids]).double(), factors[class_ids, 0].double()
    length = (apart * along).sum(1) / along.square().sum(1)
    assert torch.allclose(apart, length[:, None] * along, atol=1e-3)
    assert float(length.std()) == pytest.approx(2**0.5, rel=5 / 1800**0.5)  # standard error of a deviation: 1/sqrt(2n)
    assert length.unique().numel() == 900  # nobody shares a draw


def test_samples_of_a_class_follow_the_mixture():
    """Eq. 6 by the law of total covariance: within plus between, shares 1/4 and 3/4; 6 standard errors."""
    bank = bank_of_three().pick(torch.tensor([True, True, False]))
    bank = Gaussians(bank.class_ids, bank.counts, bank.means / 20, bank.deviations, bank.factors)
    shares, scale = np.array([0.25, 0.75]), 3.0
    n, means = 40_000, bank.means.double().numpy()
    drawn = bank.sample(torch.from_numpy(shares), n, scale, torch.Generator().manual_seed(9))[0].double().numpy()
    centre = shares @ means
    between = (shares[:, None] * (means - centre)).T @ (means - centre)
    expected = scale * np.tensordot(shares, implied_covariances(bank), 1) + between
    spread = expected.diagonal()
    error = np.sqrt((np.outer(spread, spread) + expected**2) / (n - 1))
    assert np.all(np.abs(drawn.mean(axis=0) - centre) <= 6 * np.sqrt(spread / n))
    assert np.all(np.abs(np.cov(drawn, rowvar=False) - expected) <= 6 * error)


def test_the_tests_of_packings_have_all_that_the_run_keys_allow() -> None:
    """Another one would be taken for low-rank, and its statistics and samples would be tested by nobody."""
    allowed = [
        options.__dataclass_fields__["covariance"].metadata["rule"].choices for options in (HGPOptions, CCVROptions)
    ]
    assert set().union(*allowed) == set(PACKINGS)


def test_means_of_many_images_keep_their_digits() -> None:
    """300,000 numbers of 0.1: their sum in float32 is wrong in the third digit."""
    _, _, means = class_means(torch.full((300_000, 1), 0.1), torch.zeros(300_000, dtype=torch.int64))
    assert means.item() == pytest.approx(0.1, rel=1e-6)
