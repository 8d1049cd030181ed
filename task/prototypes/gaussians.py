"""Class statistics: computing, packing, joining and sampling them.

Arrays of one message, K classes of dimension D: class_ids int64 [K], counts int64 [K], means [K, D] and, for Gaussians,
the covariance in the run's packing:

- diagonal: variances [K, D]
- full: covariances [K, D (D + 1) / 2], the upper triangle row by row
- low-rank: factors [K, r, D] and variances [K, D]; covariance = factors^T factors + diag(variances)
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from task.message import Arrays

_ROWS = 1024  # rows drawn at once, few enough for the processor's cache
_SLACK = 1e-6  # times the trace: float32 rounding makes eigenvalues of a covariance as low as about -1e-7 of the trace
_CHUNK = 64  # prototypes in one batched product, so that little of it is padding


def class_means(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Features [N, D], labels int64 [N] -> class ids [K] ascending, counts [K], means [K, D] of the features' type."""
    class_ids, index, counts = labels.unique(return_inverse=True, return_counts=True)
    # in float32 the sum of many images would lose the digits that covariances need
    sums = torch.zeros(len(class_ids), features.shape[1], dtype=torch.float64, device=features.device)
    sums.index_add_(0, index, features.double())
    return class_ids, counts, (sums / counts[:, None]).to(features.dtype)


def class_gaussians(features: Tensor, labels: Tensor, packing: str, rank: int = 1, ddof: int = 1) -> dict[str, Tensor]:
    """Class ids, counts, means and packed covariances of the classes present, those of n = 1 zero.

    Features float32 [N, D], labels int64 [N]; ``packing`` and ``rank`` as in the module's docstring. Covariances are
    divided by n - ``ddof``.
    """
    class_ids, counts, means = class_means(features, labels)
    index = torch.searchsorted(class_ids, labels)
    centred = features - means[index]
    scaled = centred / (counts.to(centred)[index] - ddof).clamp(min=1).sqrt()[:, None]
    arrays = {"class_ids": class_ids, "counts": counts, "means": means}
    if packing == "full":
        rows = by_class(scaled, index, len(class_ids))
        return arrays | {"covariances": pack_symmetric(rows.mT @ rows)}
    variances = torch.zeros_like(means).index_add_(0, index, scaled.square())
    if packing == "diagonal":
        return arrays | {"variances": variances}
    factors = principal_rows(by_class(scaled, index, len(class_ids)))[:, :rank]
    factors = F.pad(factors, (0, 0, 0, rank - factors.shape[1]))
    return arrays | {"factors": factors, "variances": (variances - factors.square().sum(dim=1)).clamp(min=0)}


def principal_rows(rows: Tensor) -> Tensor:
    """R [..., min(n, M), M] with R^T R = rows^T rows, longest row first; ``rows`` [..., n, M].

    Computed on the CPU: a GPU takes longer for many small matrices in float64 (pytorch issue 86234).
    """
    _, singular, directions = torch.linalg.svd(rows.cpu(), full_matrices=False)
    return (singular[..., None] * directions).to(rows.device)


def by_class(rows: Tensor, index: Tensor, classes: int) -> Tensor:
    """Rows [N, D], row i of class ``index[i]`` -> [classes, largest class, D], padded with zeros."""
    counts = index.bincount(minlength=classes).tolist()
    return pad_sequence(rows[index.argsort(stable=True)].split(counts), batch_first=True)


def pack_symmetric(matrices: Any) -> Any:
    """Symmetric [K, D, D] -> upper triangles [K, D (D + 1) / 2]; NumPy or torch in, the same out."""
    row, column = np.triu_indices(matrices.shape[-1])
    return matrices[:, row, column]


def unpack_symmetric(packed: Any, dim: int) -> Any:
    """Upper triangles [K, D (D + 1) / 2] -> symmetric [K, D, D]; NumPy or torch in, the same out."""
    row, column = np.triu_indices(dim)
    position = np.empty((dim, dim), np.int64)
    position[row, column] = position[column, row] = np.arange(len(row))
    return packed[:, position]


@dataclass(frozen=True)
class Gaussians:
    """P Gaussian prototypes ready to draw from: x = mean + deviation * noise_D + noise_R @ factor.

    class_ids int64 [P], counts int64 [P], means, deviations [P, D], factors [P, R, D] (R = 0 for the diagonal packing).
    """

    class_ids: Tensor
    counts: Tensor
    means: Tensor
    deviations: Tensor
    factors: Tensor

    def __len__(self) -> int:
        """P."""
        return len(self.class_ids)

    def to(self, device: torch.device) -> "Gaussians":
        """The same prototypes on another device."""
        return Gaussians(*(value.to(device) for value in vars(self).values()))

    def pick(self, mask: Tensor) -> "Gaussians":
        """The prototypes where ``mask``, bool [P], is true."""
        return Gaussians(*(value[mask] for value in vars(self).values()))

    def join(self, other: "Gaussians") -> "Gaussians":
        """All prototypes of both."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Gaussians(*(torch.cat(pair) for pair in pairs))

    def sample(self, weights: Tensor, total: int, scale: float, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw from the mixture sum_p w_p N(mean_p, scale * covariance_p) (HGP eq. 6).

        Args:
            weights: [P], not negative, sum above 0.
            total: number of draws n.
            scale: s, multiplies every covariance.
            rng: generator on the device of the prototypes.

        Returns:
            features [n, D] and class ids [n], grouped by prototype, the one that was drawn most often first.
        """
        drawn = torch.multinomial(weights, total, replacement=True, generator=rng)
        times = drawn.bincount(minlength=len(self))
        order = times.argsort(descending=True, stable=True)[: int((times > 0).sum())]
        choice = order.repeat_interleave(times[order])
        features = self.means.new_empty(total, self.means.shape[1])
        for rows, picked in zip(features.split(_ROWS), choice.split(_ROWS), strict=True):
            rows.normal_(generator=rng).mul_(self.deviations[picked]).mul_(scale**0.5).add_(self.means[picked])
        if self.factors.shape[1]:
            features.add_(self._correlated(order, times[order], rng), alpha=scale**0.5)
        return features, self.class_ids[choice]

    def _correlated(self, order: Tensor, times: Tensor, rng: torch.Generator) -> Tensor:
        """For each prototype in ``order``, ``times`` rows of noise_R @ factor; ``times`` is sorted."""
        rows = []
        for picked, count in zip(order.split(_CHUNK), times.split(_CHUNK), strict=True):
            width = int(count.max())
            noise = torch.randn(len(picked), width, self.factors.shape[1], generator=rng, device=rng.device)
            keep = torch.arange(width, device=rng.device) < count[:, None]
            rows.append((noise @ self.factors[picked])[keep])
        return torch.cat(rows)


def prepare_gaussians(joined: Arrays, packing: str) -> Gaussians:
    """The Gaussians of statistics of one or several clients, joined; each covariance is factorised once.

    A class of which a client has one image has no covariance: it takes the count-weighted mean covariance of that class
    over the other clients, or if there is none, of all classes.
    """
    spread = "covariances" if packing == "full" else "variances"
    total = joined[spread]  # where the covariance is low-rank, its diagonal
    if "factors" in joined:
        total = total + np.square(joined["factors"]).sum(axis=1)
    filled = fill_singletons(joined["class_ids"], joined["counts"], total)
    joined = joined | {spread: np.where(joined["counts"][:, None] == 1, filled, joined[spread])}
    class_ids, counts, means = (torch.from_numpy(joined[name]) for name in ("class_ids", "counts", "means"))
    P, D = means.shape
    if packing == "full":
        factor, _ = cholesky(torch.from_numpy(unpack_symmetric(joined["covariances"], D)))
        return Gaussians(class_ids, counts, means, torch.zeros(P, D), factor.mT.contiguous())
    deviations = torch.from_numpy(joined["variances"]).sqrt()
    factors = torch.from_numpy(joined.get("factors", np.zeros((P, 0, D), np.float32)))
    return Gaussians(class_ids, counts, means, deviations, factors)


def fill_singletons(class_ids: np.ndarray, counts: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """Give rows of count 1 the count-weighted mean spread of their class, else of all; [P], [P], [P, S] -> [P, S]."""
    weights = np.where(counts > 1, counts, 0).astype(np.float64)
    if weights.all() or not weights.any():
        return spread
    _, index = np.unique(class_ids, return_inverse=True)
    of_class, total = np.arange(index.max() + 1)[:, None] == index, np.bincount(index, weights)
    sums = of_class * weights @ spread
    overall = sums.sum(axis=0) / total.sum()
    per_class = np.where(total[:, None] > 0, sums / np.maximum(total, 1)[:, None], overall)
    return np.where(weights[:, None] > 0, spread, per_class[index]).astype(spread.dtype)


def cholesky(covariances: Tensor, slack: float = _SLACK) -> tuple[Tensor, Tensor]:
    """Lower factors [P, D, D] of covariances [P, D, D], and which are not positive semi-definite, bool [P].

    Eigenvalues down to -``slack`` of the trace count as zero.
    """
    wide = covariances.double()
    trace = wide.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
    factor, info = torch.linalg.cholesky_ex(wide + (slack * trace + 1e-12) * torch.eye(wide.shape[-1]))
    return factor.float(), info != 0


def cholesky_fails(packed: np.ndarray, dim: int, slack: float = _SLACK / 2) -> bool:
    """Whether any of the packed covariances [P, D (D + 1) / 2] is not positive semi-definite, with ``slack``.

    By default half that of :func:`cholesky`; the other half is for rounding when covariances are merged.
    """
    return bool(cholesky(torch.from_numpy(unpack_symmetric(packed, dim)), slack)[1].any())


def merge_means(joined: Arrays) -> tuple[Tensor, Tensor]:
    """Count-weighted mean of each class over clients; class_ids, counts [P], means [P, D] -> ids [K], means [K, D]."""
    class_ids, counts, means = (torch.from_numpy(joined[name]) for name in ("class_ids", "counts", "means"))
    classes, index = class_ids.unique(return_inverse=True)
    total = torch.zeros(len(classes), dtype=torch.float64).index_add_(0, index, counts.double())
    sums = torch.zeros(len(classes), means.shape[1], dtype=torch.float64)
    sums.index_add_(0, index, counts.double()[:, None] * means.double())
    return classes, (sums / total[:, None]).to(means.dtype)
