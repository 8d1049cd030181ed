"""Class means and scatter: what every closed form needs of a client, in the smallest form that loses nothing.

Arrays of one message about N images of K classes, features of length M; all but the means are divided by N:

- means [K, M]
- factors [F, M], where the head wants class covariances: of class c the min(n_c - 1, rank) principal directions, scaled
  so that factors^T factors is their part of the scatter; one row of zeros if n_c = 1; classes in the order of class_ids
- scatter: what the factors leave out, over all classes together, in one of three forms: rows R [m, M] with
  R^T R = scatter, m = sum_c max(min(n_c - 1, M) - rank, 0), at least 1; or, if m > (M + 1) / 2, the upper triangle
  [1, M (M + 1) / 2]; or, where a sketch is smaller than both, (scatter Omega)^T [r, M] with Omega [M, r] drawn from
  N(0, 1), the same in every run
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from task.config.schema import Config
from task.message import Arrays
from task.method_options import AFCLOptions, Options
from task.prototypes.gaussians import by_class, cholesky_fails, pack_symmetric, principal_rows, unpack_symmetric
from task.prototypes.noise import EXACT, GaussianMechanism, nearest_semi_definite
from task.prototypes.statistics import ClientStatistics, Shapes, SumFrame, class_report, class_sums, traces
from task.utils.seeding import torch_rng

DTYPES = {"fp64": np.float64, "fp32": np.float32, "fp16": np.float16}


class ScatterStatistics(ClientStatistics):
    """Class means and scatter about them, see the module's docstring (AFCL, linear discriminants)."""

    carries = needs_features = True
    largest = 1e15
    releases = 2

    def number_type(self, options: Options) -> type:
        """The run's own choice."""
        return DTYPES[_own(options).dtype]

    def compute(self, features: Tensor, labels: Tensor, options: Options, noise: GaussianMechanism = EXACT) -> Arrays:
        """Counts, means, factors and scatter; with noise the scatter stays semi-definite."""
        wide = features.double()
        class_ids, index, counts = labels.unique(return_inverse=True, return_counts=True)
        sums = wide.new_zeros(len(class_ids), wide.shape[1]).index_add_(0, index, wide)
        centred = wide - (sums / counts[:, None])[index]
        if noise.noise:
            sums, scatter = _noised(sums, counts, centred, noise)
            arrays = {"scatter": scatter / len(labels)}
        else:
            arrays = _split(centred / len(labels) ** 0.5, index, counts, _own(options))
        arrays |= {"class_ids": class_ids, "counts": counts, "means": sums / counts[:, None]}
        return self.as_arrays(self.number_type(options), **arrays)

    def expected(self, counts: np.ndarray, arrays: Mapping[str, tuple[int, ...]], dim: int, config: Config) -> Shapes:
        """Means, factors and scatter of classes with ``counts`` images, int64 [K]."""
        options = _own(config.options)
        shapes: Shapes = {"means": (len(counts), dim)}
        if options.class_rank:
            shapes["factors"] = (int(factor_rows(counts, dim, options.class_rank).sum()), dim)
        packed = (1, dim * (dim + 1) // 2)
        return shapes | {"scatter": packed if config.privacy_noise else scatter_shape(counts, dim, options)}

    def invalid(self, statistics: Arrays, dim: int) -> str:
        """Whether a packed scatter is not positive semi-definite, beyond the rounding of its number type."""
        scatter = statistics["scatter"]
        if scatter.shape[1] == dim:  # a sketch
            return ""
        # rounding changes by eps / 2 of the trace at most, and each number by half of the smallest that the type has
        numbers, trace = np.finfo(scatter.dtype), max(float(traces("scatter", scatter, dim).sum()), 1e-12)
        slack = max(float(numbers.eps), 1e-6) + dim * float(numbers.smallest_subnormal) / trace
        bad = cholesky_fails(scatter.astype(np.float64), dim, slack)
        return "scatter is not positive semi-definite" if bad else ""

    def norms(self, statistics: Arrays, dim: int, options: Options) -> dict[str, float]:
        """As the base's. One trace for all classes, as the scatter is of all together; none of a sketch."""
        known = ("factors",) if _own(options).sketch else ("factors", "scatter")
        trace = sum(float(traces(name, statistics[name], dim).sum()) for name in known if name in statistics)
        means = {name: array for name, array in statistics.items() if name == "means"}  # a sum may have none
        return super().norms(means, dim, options) | {"variances": max(trace, 0.0) ** 0.5}

    def unprotected(self, options: Options) -> str:
        """The effect of one image on principal directions has no known bound, and a sketch is made of the scatter."""
        own = _own(options)
        return "principal directions of classes" if own.class_rank else "a sketch" if own.sketch else ""

    def not_summable(self, options: Options) -> str:
        """Principal directions of two clients have no sum."""
        return "principal directions of classes" if _own(options).class_rank else super().not_summable(options)

    def sums(self, report: Arrays, images: int, frame: SumFrame) -> Arrays:
        """Images and sum of features of each class, and :func:`gram_of`: its upper triangle, or a sketch."""
        options, dim = _own(frame.options), frame.dim
        shape = (options.sketch, dim) if options.sketch else (dim, dim)
        gram = gram_of(report, dim, options).numpy() if report else np.zeros(shape)
        return class_sums(report, frame) | {"gram": gram if options.sketch else pack_symmetric(gram[None])[0]}

    def of_sums(self, sums: Arrays, frame: SumFrame) -> Arrays:
        """Counts and means of the classes that a client has, and ``gram`` instead of scatter."""
        report, gram = class_report(sums, frame), sums["gram"]
        if not _own(frame.options).sketch:
            gram = unpack_symmetric(gram[None], frame.dim)[0]
        return report | {"gram": gram} if len(report["counts"]) else {}


def _own(options: Options) -> AFCLOptions:
    assert isinstance(options, AFCLOptions)
    return options


def _noised(sums: Tensor, counts: Tensor, centred: Tensor, noise: GaussianMechanism) -> tuple[Tensor, Tensor]:
    """Class sums [K, M] and packed scatter [1, M (M + 1) / 2] with the noise of sums and of sum f f^T."""
    gram = centred.T @ centred + (sums / counts[:, None]).T @ sums
    sums = noise.add(sums, noise.feature_clip)
    gram = unpack_symmetric(noise.squares(pack_symmetric(gram[None])), sums.shape[1])
    scatter = pack_symmetric(gram - (sums / counts[:, None]).T @ sums)
    return sums, nearest_semi_definite(scatter, sums.shape[1])


def factor_rows(counts: np.ndarray, dim: int, rank: int) -> np.ndarray:
    """Factors of each class, int64 [K]: its n_c centred images have rank n_c - 1 at most; one row of zeros for n_c = 1.

    >>> factor_rows(np.array([1, 3, 90]), dim=192, rank=32)
    array([ 1,  2, 32])
    """
    return np.minimum(counts - 1, min(dim, rank)).clip(min=1)


def scatter_shape(counts: np.ndarray, dim: int, options: AFCLOptions) -> tuple[int, int]:
    """Shape of the smallest form of the scatter of classes with ``counts`` images, int64 [K].

    >>> scatter_shape(np.array([30, 20]), 192, AFCLOptions())
    (48, 192)
    >>> scatter_shape(np.array([300, 200]), 192, AFCLOptions())
    (1, 18528)
    """
    rows = int((np.minimum(counts - 1, dim) - options.class_rank).clip(min=0).sum())
    rows = max(min(rows, dim), 1)
    if options.sketch and options.sketch < min(rows, (dim + 1) // 2):
        return options.sketch, dim
    return (rows, dim) if rows <= (dim + 1) // 2 else (1, dim * (dim + 1) // 2)


def sketch_matrix(dim: int, rank: int) -> Tensor:
    """Omega, float64 [M, r]: the same on every machine and in every run."""
    return torch.randn(dim, rank, generator=torch_rng(0, "sketch")).double()


def _split(centred: Tensor, index: Tensor, counts: Tensor, options: AFCLOptions) -> dict[str, Tensor]:
    """Factors and scatter of centred features [N, M], class ``index`` [N] of K with ``counts`` [K]."""
    arrays, dim = dict[str, Tensor](), centred.shape[1]
    if options.class_rank:
        directions = principal_rows(by_class(centred, index, len(counts)))  # [K, largest class, M]
        number = torch.from_numpy(factor_rows(counts.cpu().numpy(), dim, options.class_rank)).to(index.device)
        chosen = torch.arange(directions.shape[1], device=index.device) < number[:, None]
        arrays["factors"], centred = directions[chosen], directions[~chosen]
    rows, columns = scatter_shape(counts.cpu().numpy(), dim, options)
    if columns != dim:
        return arrays | {"scatter": pack_symmetric((centred.T @ centred)[None])}
    if options.sketch == rows:
        omega = sketch_matrix(dim, rows).to(centred.device)
        return arrays | {"scatter": (centred @ omega).T @ centred}
    padded = torch.cat([centred, centred.new_zeros(rows, dim)])
    return arrays | {"scatter": principal_rows(padded)[:rows]}


def restore_scatter(statistics: Arrays, dim: int, options: AFCLOptions) -> tuple[Tensor, str]:
    """N times the scatter of a message, float64, and its form: "rows" [m, M], "matrix" [M, M] or "sketch" [r, M]."""
    counts, scatter = statistics["counts"], torch.from_numpy(statistics["scatter"]).double()
    total = float(counts.sum())
    if scatter.shape[1] != dim:
        return unpack_symmetric(scatter, dim)[0] * total, "matrix"
    sketched = options.sketch and len(scatter) == options.sketch == scatter_shape(counts, dim, options)[0]
    return (scatter * total, "sketch") if sketched else (scatter * total**0.5, "rows")


def gram_of(report: Arrays, dim: int, options: AFCLOptions) -> Tensor:
    """Sum of h h^T over a client's images, float64 [M, M]; with a sketch, times Omega and transposed, [r, M]."""
    counts, means = (torch.from_numpy(report[name]).double() for name in ("counts", "means"))
    scatter, form = restore_scatter(report, dim, options)
    roots = [counts.sqrt()[:, None] * means]
    if "factors" in report:
        roots.append(counts.sum().sqrt() * torch.from_numpy(report["factors"]).double())
    if form == "rows":
        roots.append(scatter)
    root = torch.cat(roots)
    if not options.sketch:
        gram = root.T @ root
        return gram.add_(scatter) if form == "matrix" else gram
    omega = sketch_matrix(dim, options.sketch)
    gram = (root @ omega).T @ root
    if form == "matrix":
        return gram + omega.T @ scatter
    return gram + scatter if form == "sketch" else gram
