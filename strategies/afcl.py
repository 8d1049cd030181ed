"""AFCL, server half (Tang et al. 2025), and other heads that are computed from sums over clients."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strategies.base import RoundContext, Strategy, Update
from strategies.closed_form import (
    USUAL_SHRINKAGE,
    Spectrum,
    choose_ridge,
    choose_shrinkage,
    solve_discriminant,
    solve_regularised,
    solve_ridge,
)
from strategies.ncm import NEVER
from task.config.schema import Config
from task.message import Arrays
from task.method_options import MAX_FEATURES, AFCLOptions
from task.models.model import Model
from task.prototypes.gaussians import principal_rows
from task.prototypes.scatter import factor_rows, gram_of, sketch_matrix

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClassSums:
    """Sums over all images so far, float64; row c belongs to head row c. h [M] is an image's feature under the head.

    counts [K]; sums of h [K, M]; gram: sum of h h^T [M, M], or with a sketch (sum of h h^T Omega)^T [r, M]; factors
    [K, q, M]: factors_c^T factors_c is the scatter of class c about its mean, or its q largest principal directions.
    """

    counts: Tensor
    sums: Tensor
    gram: Tensor
    factors: Tensor

    @classmethod
    def empty(cls, dim: int, options: AFCLOptions) -> "ClassSums":
        """The sums over no image, for features of length ``dim``."""
        zeros = torch.zeros(0, dim, dtype=torch.float64)
        rank = min(options.class_rank, dim)
        return cls(zeros[:, 0], zeros, zeros.new_zeros(options.sketch or dim, dim), zeros.new_zeros(0, rank, dim))

    def grow(self, classes: int) -> "ClassSums":
        """The same sums with rows of zeros for new classes, so that there are ``classes`` rows."""
        parts = (self.counts, self.sums, self.factors)
        counts, sums, factors = (torch.cat([p, p.new_zeros(classes - len(p), *p.shape[1:])]) for p in parts)
        return ClassSums(counts, sums, self.gram, factors)


class AFCL(Strategy):
    """Adds up means and scatter of all clients and solves for a head: ridge regression or a discriminant.

    Ridge regression (Tang et al. 2025): W = (G + lambda I)^-1 H^T Y, with features H [N, M] of all images, G = H^T H
    and one-hot labels Y [N, K]; W^T [K, M] is the head's weight, Y^T H [K, M] are the class sums. For the discriminants
    see ``solve_discriminant`` and ``solve_regularised``; all they need is in ClassSums.

    A sum has no order, so the partition and the order of clients and tasks do not matter: the head is that of all
    reported images in one place. (Class covariances are cut to their largest directions. What is cut depends a little
    on the order.) Only the first report of a client in a task counts. A client that is never drawn in a task is missing
    from the result, and so are the images that a client gets after its report.

    Features are those of the frozen backbone, or of a prompt that FedAvg trains in the first task's first rounds and
    that is frozen then (first-session adaptation: McDonnell et al. 2023, RanPAC; STSA, arXiv 2506.01327).
    """

    options: AFCLOptions

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.reported: frozenset[tuple[int, str]] = frozenset()  # (task, client)
        self.total: ClassSums | None = None

    def refine(self, model: Model, updates: Sequence[Update], context: RoundContext) -> dict[str, float]:
        """Add the new reports and solve for all seen classes."""
        classes, dim = model.head.weight.shape
        total = (self.total or ClassSums.empty(dim, self.options)).grow(classes)
        new = [u for u in updates if u.statistics and (context.task, u.client) not in self.reported]
        self.reported |= {(context.task, update.client) for update in new}
        self.total = self._add([update.statistics for update in new], total, context)
        if not self.total.counts.any():
            if context.ends_task:
                log.warning("no client has reported a class: the head is still as it was drawn")
            return {}
        return self._solve(model, self.total, torch.tensor(context.seen_classes).argsort())

    def _add(self, reports: Sequence[Arrays], total: ClassSums, context: RoundContext) -> ClassSums:
        counts, sums, gram = total.counts.clone(), total.sums.clone(), total.gram.clone()
        own: list[list[Tensor]] = [[] for _ in counts]  # rows of each class's scatter about its mean over all images
        for report in reports:
            rows = context.head_rows(torch.from_numpy(report["class_ids"]))
            number = torch.from_numpy(report["counts"]).double()
            means = torch.from_numpy(report["means"]).double()
            summed = "gram" in report  # over the clients of the round, in a sum that is not taken apart
            gram += torch.from_numpy(report["gram"]) if summed else gram_of(report, means.shape[1], self.options)
            if self.options.class_rank:
                factors = number.sum().sqrt() * torch.from_numpy(report["factors"]).double()
                sizes = factor_rows(report["counts"], means.shape[1], self.options.class_rank).tolist()
                gaps = _gaps(counts[rows], sums[rows], number, means)
                for row, part, gap in zip(rows.tolist(), factors.split(sizes), gaps, strict=True):
                    own[row] += [part, gap[None]]
            counts.index_add_(0, rows, number)
            sums.index_add_(0, rows, number[:, None] * means)
        return ClassSums(counts, sums, gram, _merge_factors(total.factors, own))

    def _solve(self, model: Model, total: ClassSums, by_class: Tensor) -> dict[str, float]:
        """Overwrite the head; returns the ridge or the shrinkage. ``by_class`` [K]: its rows in order of class ids."""
        ridge = self.options.head == "ridge"
        solution, used = self._solve_ridge(total) if ridge else self._solve_discriminant(total, by_class)
        solution["bias"] = torch.where(total.counts > 0, solution["bias"], NEVER)
        for name, value in solution.items():
            getattr(model.head, name).data.copy_(value)
        return used

    def _solve_ridge(self, total: ClassSums) -> tuple[dict[str, Tensor], dict[str, float]]:
        gram = self._spectrum(total.gram)
        ridge = self.options.ridge or choose_ridge(gram, total.sums, float(total.counts.sum()))
        solution = {"weight": solve_ridge(gram, total.sums, ridge), "bias": torch.zeros(len(total.counts))}
        return solution, {"ridge": ridge}

    def _solve_discriminant(self, total: ClassSums, by_class: Tensor) -> tuple[dict[str, Tensor], dict[str, float]]:
        options, means = self.options, total.sums / total.counts.clamp(min=1)[:, None]
        within = self._spectrum(self._within(total))
        # by class id: what is drawn must not depend on the order in which classes arrive
        shrinkage = options.shrinkage or self._choose_shrinkage(total.counts[by_class], means[by_class], within)
        freedom = float(total.counts.sum()) - int((total.counts > 0).sum())
        covariance = Spectrum(within.values / max(freedom, 1), within.vectors)
        if options.head == "discriminant":
            weight, bias = solve_discriminant(covariance, means, shrinkage)
            solution = {"weight": weight, "bias": bias}
        else:
            factors = total.factors / (total.counts - 1).clamp(min=1).sqrt()[:, None, None]
            solution = solve_regularised(covariance, means, factors, options.own_covariance, shrinkage)
        if options.priors == "counts":
            solution["bias"] += (total.counts / total.counts.sum()).log()
        return solution, {"shrinkage": shrinkage}

    def _choose_shrinkage(self, counts: Tensor, means: Tensor, within: Spectrum) -> float:
        if self.options.sketch or means.shape[1] > MAX_FEATURES:
            return USUAL_SHRINKAGE
        return choose_shrinkage(counts, means, within)

    def _within(self, total: ClassSums) -> Tensor:
        """Scatter about the class means: sum h h^T - sum_c s_c s_c^T / n_c, or its sketch."""
        scaled = total.sums / total.counts.clamp(min=1).sqrt()[:, None]
        left = scaled if not self.options.sketch else scaled @ sketch_matrix(scaled.shape[1], self.options.sketch)
        return total.gram - left.T @ scaled

    def _spectrum(self, matrix: Tensor) -> Spectrum:
        if not self.options.sketch:
            return Spectrum.of_matrix(matrix)
        return Spectrum.of_sketch(matrix, sketch_matrix(matrix.shape[1], self.options.sketch))


def _gaps(earlier: Tensor, sums: Tensor, counts: Tensor, means: Tensor) -> Tensor:
    """sqrt(n_1 n_2 / (n_1 + n_2)) (mu_2 - mu_1) of each of K classes, [K, M].

    Of the images before: n_1 = ``earlier`` [K], mu_1 = ``sums`` / n_1. Of a new report: n_2 = ``counts`` [K] and
    mu_2 = ``means`` [K, M]. The scatter of both sets about their common mean is that of each about its own mean, plus
    gap gap^T (Chan, Golub and LeVeque 1979).
    """
    return (earlier * counts / (earlier + counts)).sqrt()[:, None] * (means - sums / earlier.clamp(min=1)[:, None])


def _merge_factors(factors: Tensor, own: list[list[Tensor]]) -> Tensor:
    """Factors [K, q, M] of the classes with the new rows of each class, cut to the q longest."""
    merged = factors.clone()
    for row, parts in enumerate(own):
        if parts:
            longest = principal_rows(torch.cat([factors[row], *parts]))[: factors.shape[1]]
            merged[row] = 0
            merged[row, : len(longest)] = longest
    return merged
