"""Heads that follow in closed form from class counts, class sums and scatter; nothing here sees an image.

Notation: K classes with n_c images, n in all; class means mu_c; S the pooled scatter about the class means over n - K.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from task.utils.seeding import torch_rng

RIDGES = torch.logspace(-10, 1, 45, dtype=torch.float64)  # that are tried, in shares of the largest eigenvalue
SHRINKAGES = torch.logspace(-5, 1, 13, dtype=torch.float64)  # that are tried
FOLDS = 5  # of the cross-validation
DRAWN_AGAIN_UP_TO = 2000  # features in all, at most, where few images are drawn several times
USUAL_SHRINKAGE = 0.01  # the shrinkage where it is not chosen by cross-validation
MAX_DRAWN = 20_000_000  # numbers in the drawn features, at most


@dataclass(frozen=True)
class Spectrum:
    """A symmetric positive semi-definite A [M, M]: R eigenvalues [R] and eigenvectors [M, R]; the other M - R are 0."""

    values: Tensor
    vectors: Tensor

    @classmethod
    def of_matrix(cls, matrix: Tensor) -> Self:
        """The spectrum of A = ``matrix`` [M, M], whose numbers may have been rounded on the way.

        The lowest negative eigenvalue shows how large the rounding errors are. Eigenvalues below that size are raised
        to it: taken for zero, a direction of rounding errors would let a head grow without end.
        """
        values, vectors = torch.linalg.eigh(matrix)
        return cls(values.clamp(min=max(0.0, -float(values.min()))), vectors)

    @classmethod
    def of_rows(cls, rows: Tensor) -> Self:
        """The spectrum of A = R^T R, where R [N, M] is ``rows``."""
        if len(rows) > rows.shape[1]:
            return cls.of_matrix(rows.T @ rows)
        _, singular, directions = torch.linalg.svd(rows, full_matrices=False)
        return cls(singular.square(), directions.T)

    @classmethod
    def of_sketch(cls, sketch: Tensor, omega: Tensor) -> Self:
        """The spectrum of Y (Omega^T Y)^+ Y^T, Nystrom's approximation of A (Tropp et al. 2017).

        ``sketch`` is Y^T = (A Omega)^T [r, M], ``omega`` is Omega [M, r].
        """
        core = sketch @ omega
        values, vectors = torch.linalg.eigh((core + core.T) / 2)
        kept = values > max(1e-10 * float(values.max()), 1e-30)
        if not kept.any():  # honest clients sent zeros, or a client sent numbers that it should not
            return cls(sketch.new_zeros(1), torch.eye(sketch.shape[1], 1, dtype=sketch.dtype))
        rows = (vectors[:, kept] / values[kept].sqrt()).T @ sketch
        return cls.of_rows(rows)

    def power(self, exponent: float, shift: float, right: Tensor) -> Tensor:
        """(A + shift I)^exponent B for B = ``right`` [M, C]."""
        coordinates = self.vectors.T @ right
        inside = self.vectors @ ((self.values + shift)[:, None] ** exponent * coordinates)
        if self.vectors.shape[0] == self.vectors.shape[1]:
            return inside  # nothing is outside; what rounding leaves of that must not be divided by a small shift
        return inside + shift**exponent * (right - self.vectors @ coordinates)


def choose_ridge(gram: Spectrum, sums: Tensor, images: float) -> float:
    """Lambda that minimises (RSS / n) / (1 - df / n)^2 over RIDGES: generalised cross-validation (Golub et al. 1979).

    With eigenvalues w and eigenvectors V of ``gram`` G = sum h h^T, A = V^T Q and d = 1 / (w + lambda):
    df = sum w d, RSS = n - 2 sum d |A|^2 + sum w d^2 |A|^2. ``sums`` Q^T [K, M]; ``images`` n. A lambda with df above
    0.99 n is no choice: it interpolates the images, and the quotient is that of two roundings.
    """
    w = gram.values
    energy = (gram.vectors.T @ sums.T).square().sum(dim=1)
    ridges = RIDGES * w.max().clamp(min=1e-12)
    d = 1 / (w + ridges[:, None])
    rss = images - 2 * d @ energy + (w * d.square()) @ energy
    freedom = 1 - (d @ w) / images
    return float(ridges[torch.where(freedom > 0.01, rss / freedom.square(), torch.inf).argmin()])


def choose_shrinkage(counts: Tensor, means: Tensor, scatter: Spectrum) -> float:
    """The s of SHRINKAGES with which a linear discriminant is right most often, by cross-validation without images.

    The folds are those of drawn features, see :func:`draw_features`. With few images they are drawn several times, up
    to DRAWN_AGAIN_UP_TO features in all. Among the s within half a standard error of the best, the one nearest to the
    usual s is taken: USUAL_SHRINKAGE, or 1 if there are fewer images than features. This rule is ours. The standard
    error of e errors is sqrt(e + 1), that of a Poisson count but never 0. If no class has two images there is no
    scatter, and with more than MAX_DRAWN numbers it is known well: then nothing is drawn and the usual s is taken.

    Args:
        counts: [K].
        means: [K, M].
        scatter: about the class means, A of [M, M].
    """
    images, dim = int(counts.sum()), means.shape[1]
    usual = USUAL_SHRINKAGE if images > dim else 1.0  # with fewer images the scatter lacks directions
    if counts.max() < 2 or images * dim > MAX_DRAWN:
        return usual
    wrong = torch.zeros(len(SHRINKAGES), dtype=torch.int64)
    generator = torch_rng(0, "features")
    for _ in range(max(1, DRAWN_AGAIN_UP_TO // images)):
        wrong += _cross_validate(*draw_features(counts, means, scatter, generator), len(counts))
    good = SHRINKAGES[wrong <= wrong.min() + (wrong.min() + 1).sqrt() / 2]
    return float(good[(good / usual).log().abs().argmin()])


def draw_features(
    counts: Tensor, means: Tensor, scatter: Spectrum, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Features [N, M] and classes [N], sorted, that have exactly these counts [K], means [K, M] and scatter [M, M].

    mu_y + Q R with R^T R = scatter and Q [N, rank] drawn uniformly from those whose columns are orthonormal and sum to
    zero in each class. The clients' features have the same counts, means and scatter. If the classes are Gaussians with
    one covariance, all features with the same sums are equally likely, so nothing distinguishes the drawn ones from
    the clients' own.
    """
    dim, classes = means.shape[1], torch.arange(len(counts)).repeat_interleave(counts.long())
    rank = min(dim, len(classes) - int((counts > 0).sum()))  # rounding may give the scatter more directions
    rows = (scatter.values.sqrt()[:, None] * scatter.vectors.T)[dim - rank :]
    columns = torch.randn(len(classes), rank, generator=generator).double()
    columns, triangle = torch.linalg.qr(columns - _class_means(columns, classes, len(counts))[classes])
    signs = torch.where(triangle.diagonal() < 0, -1.0, 1.0)  # QR leaves them open; a positive diagonal fixes them
    return means[classes] + columns * signs @ rows, classes


def _cross_validate(features: Tensor, classes: Tensor, number: int) -> Tensor:
    """How many features [N, M] each of SHRINKAGES classifies wrongly, each held out in one of FOLDS."""
    # the classes begin with different folds: where each has two images, no fold takes the scatter of all away
    fold = torch.cat([torch.arange(c, c + int(n)) for c, n in enumerate(classes.bincount())]) % FOLDS
    # with many images: the product of a fold's other features is that of all less its own, which is cheaper
    product = features.T @ features if len(features) > features.shape[1] else None
    wrong = torch.zeros(len(SHRINKAGES), dtype=torch.int64)
    for held_out in range(FOLDS):
        kept = fold != held_out
        tested, labels = features[~kept], classes[~kept]
        rest, others = features[kept], classes[kept]
        counts, means = others.bincount(minlength=number), _class_means(rest, others, number)
        freedom = max(int(counts.sum()) - int((counts > 0).sum()), 1)
        if product is not None:
            scatter = product - tested.T @ tested - means.T @ (counts[:, None] * means)
            covariance = Spectrum.of_matrix(scatter / freedom)
        else:
            covariance = Spectrum.of_rows((rest - means[others]) / freedom**0.5)
        for i, shrinkage in enumerate(SHRINKAGES.tolist()):
            weight, bias = solve_discriminant(covariance, means, shrinkage)
            logits = torch.where(counts > 0, tested @ weight.T + bias, -torch.inf)
            wrong[i] += (logits.argmax(dim=1) != labels).sum()
    return wrong


def _class_means(features: Tensor, classes: Tensor, number: int) -> Tensor:
    sums = features.new_zeros(number, features.shape[1]).index_add_(0, classes, features)
    return sums / classes.bincount(minlength=number).clamp(min=1)[:, None]


def solve_ridge(gram: Spectrum, sums: Tensor, ridge: float) -> Tensor:
    """Weights [K, M] that minimise sum |onehot(y) - W h|^2 + lambda |W|^2 over all images.

    One feature: value 1 in class 0, value 2 in class 1.

    >>> solve_ridge(Spectrum.of_matrix(torch.tensor([[5.0]])), sums=torch.tensor([[1.0], [2.0]]), ridge=3.0)
    tensor([[0.1250],
            [0.2500]])

    ``gram`` sum h h^T; ``sums`` sum onehot(y) h^T, [K, M]; ``ridge`` lambda > 0.
    """
    return gram.power(-1, ridge, sums.T).T


def solve_discriminant(covariance: Spectrum, means: Tensor, shrinkage: float) -> tuple[Tensor, Tensor]:
    """Linear discriminant with equal priors: weight [K, M] mu_c^T (S + s t I)^-1 and bias [K] -w_c mu_c / 2.

    As in Friedman 1989 with one covariance for all classes, but that his mix of S and t I is convex.

    ``covariance`` is S, t the mean of its eigenvalues, ``shrinkage`` s; ``means`` [K, M].
    """
    return _linear(covariance, _shift(covariance, means, shrinkage), means)


def _linear(covariance: Spectrum, shift: float, means: Tensor) -> tuple[Tensor, Tensor]:
    weight = covariance.power(-1, shift, means.T).T
    return weight, -0.5 * (weight * means).sum(dim=1)


def solve_regularised(
    covariance: Spectrum, means: Tensor, factors: Tensor, share: float, shrinkage: float
) -> dict[str, Tensor]:
    """Regularised discriminant (Friedman 1989): class covariances a F_c^T F_c + (1 - a) S + s t I, equal priors.

    With B = (1 - a) S + s t I and Z_c = sqrt(a) F_c B^-1/2 = U diag(z) V^T, the inverse of a class covariance is
    B^-1 - B^-1/2 V diag(e / (1 + e)) V^T B^-1/2, e = z^2, and its determinant that of B times prod (1 + e).

    So logit_c(h) = weight_c h + bias_c + |directions_c h - offsets_c|^2 / 2, with weight [K, M], bias [K],
    directions [K, q, M] and offsets [K, q], by these names.

    Args:
        covariance: S.
        means: [K, M].
        factors: F_c [K, q, M], F_c^T F_c the covariance of class c or its largest part; rows may be zero.
        share: a.
        shrinkage: s; t is the mean of S's eigenvalues.
    """
    shift = _shift(covariance, means, shrinkage)
    base = Spectrum((1 - share) * covariance.values, covariance.vectors)
    classes, q, dim = factors.shape
    flat = share**0.5 * factors.reshape(-1, dim)
    whitened = base.power(-0.5, shift, flat.T).T.reshape(classes, q, dim)
    e, rotation = torch.linalg.eigh(whitened @ whitened.mT)  # Z Z^T = U diag(e) U^T
    e = e.clamp(min=0)
    unwhitened = base.power(-1, shift, flat.T).T.reshape(classes, q, dim)  # Z B^-1/2
    directions = (rotation / (1 + e).sqrt()[:, None]).mT @ unwhitened
    weight, bias = _linear(base, shift, means)
    offsets = (directions @ means[:, :, None])[:, :, 0]
    bias -= 0.5 * torch.log1p(e).sum(dim=1)
    return {"weight": weight, "bias": bias, "directions": directions, "offsets": offsets}


def _shift(covariance: Spectrum, means: Tensor, shrinkage: float) -> float:
    """Shrinkage s t, but more than what rounding leaves of the means [K, M] where the covariance is zero."""
    mean = float(covariance.values.sum()) / len(covariance.vectors)  # over all M, those of zero included
    return max(shrinkage * mean, 1e-9 * float(means.square().mean()), 1e-12)
