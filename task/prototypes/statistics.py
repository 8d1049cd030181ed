"""What clients send beside trained arrays: one class per kind, loaded on both sides by its name in the table.

``collect`` runs on the client; the server checks what comes against ``expected``. Every kind but the first sends
class_ids and counts, int64 [K]; ``expected`` lists the other arrays.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from task.config.schema import Config
from task.data.images import Images
from task.message import Arrays
from task.method_options import Options
from task.models.evaluation import extract_features
from task.models.model import Model
from task.models.preprocessing import prepare
from task.prototypes.gaussians import cholesky_fails, class_gaussians, class_means
from task.prototypes.noise import EXACT, GaussianMechanism

Shapes = dict[str, tuple[int, ...]]
SPREADS = ("variances", "covariances", "factors", "scatter")  # arrays of which traces add up
_GRADIENTS = 2**25  # entries of per-image gradients in memory at once: 128 MiB


@dataclass(frozen=True)
class Sample:
    """Training images of one client and task: N positions in ``images``, class ids and head rows, int64 [N]."""

    images: Images
    positions: np.ndarray
    labels: Tensor
    rows: Tensor


@dataclass(frozen=True)
class SumFrame:
    """What fixes the shapes of the sums over clients; client and server know it before the round.

    ``classes`` are the ids [K] that a client may report, ``dim`` is the length D of a feature under the head, and
    ``arrays`` are the shapes of the trained arrays.
    """

    classes: tuple[int, ...]
    dim: int
    arrays: Mapping[str, tuple[int, ...]]
    options: Options


class ClientStatistics:
    """No statistics: the base of all.

    Attributes:
        carries: whether anything is sent.
        at_task_end: whether it is sent in a task's last round only, whatever the run key statistics-rounds.
        needs_features: whether it is computed from features.
        not_negative: arrays in which the server refuses negative numbers.
        largest: the server refuses numbers of larger magnitude.
        releases: of the Gaussian mechanism in one message with noise (task/prototypes/noise.py); a subclass that sends
            anything must define it itself to be used with noise.
    """

    carries = False
    at_task_end = False
    needs_features = False
    not_negative = frozenset({"variances", "fisher"})
    largest = 1e6  # far above any honest value; a larger one would dominate the mean over clients
    releases = 0

    def due(self, config: Config, server_round: int, ends_task: bool) -> bool:
        """Whether anything is sent in a round of the run, counted from 1, that ends its task or does not."""
        last_only = self.at_task_end or config.statistics_rounds == "last"
        return self.carries and server_round > config.adaptation_rounds and (ends_task or not last_only)

    def collect(self, model: Model, sample: Sample, options: Options, mechanism: GaussianMechanism) -> Arrays:
        """The arrays of a client's images without augmentation, clipped and noised."""
        features = torch.empty(len(sample.labels), 0, device=model.device)
        if self.needs_features:
            features = mechanism.features(model.head.project(extract_features(model, sample.images, sample.positions)))
        return self.compute(features, sample.labels, options, mechanism)

    def compute(self, features: Tensor, labels: Tensor, options: Options, noise: GaussianMechanism = EXACT) -> Arrays:
        """Features float32 [N, D] of the local images, labels int64 [N] -> arrays, with ``noise``."""
        return {}

    def number_type(self, options: Options) -> type:
        """Type of the arrays of numbers that clients send; the server refuses another one."""
        return np.float32

    def as_arrays(self, number_type: type = np.float32, /, **tensors: Tensor) -> Arrays:
        """NumPy arrays as they travel: whole numbers as they are, the others as ``number_type``."""
        arrays = {name: value.cpu().numpy() for name, value in tensors.items()}
        return {name: a if a.dtype.kind == "i" else a.astype(number_type) for name, a in arrays.items()}

    def invalid(self, statistics: Arrays, dim: int) -> str:
        """What is wrong with arrays of the expected shapes beside their numbers, or an empty text; D = ``dim``."""
        bad = "covariances" in statistics and cholesky_fails(statistics["covariances"], dim)
        return "covariances are not positive semi-definite" if bad else ""

    def norms(self, statistics: Arrays, dim: int, options: Options) -> dict[str, float]:
        """The smallest norms with which features [N, D], D = ``dim``, can give these means and variances.

        For means the largest |mu_c|. For variances the root of the largest trace of a class's covariance: this is
        divided by n - 1, so the root is up to sqrt(2) times too large.
        """
        parts = [traces(name, statistics[name], dim) for name in SPREADS if name in statistics]
        norms = {"variances": math.sqrt(np.sum(parts, axis=0).max(initial=0))} if parts else {}
        if "means" in statistics:
            norms["means"] = float(np.linalg.norm(statistics["means"].astype(np.float64), axis=1).max(initial=0))
        return norms

    def unprotected(self, options: Options) -> str:
        """Why these statistics cannot be noised, or an empty text."""
        return ""

    def not_summable(self, options: Options) -> str:
        """What of these statistics cannot be added up over clients, in words; empty if all can.

        A subclass must define ``sums`` itself: those that it inherits may leave out arrays that it adds.
        """
        return "statistics without sums of their own" if self.carries and "sums" not in vars(type(self)) else ""

    def sums(self, report: Arrays, images: int, frame: SumFrame) -> Arrays:
        """A client's statistics as sums over its images, float64: zeros where the ``report`` is empty.

        ``images`` is the number of images that it trained on. Sums of all clients add up to those of all images.
        """
        return {}

    def of_sums(self, sums: Arrays, frame: SumFrame) -> Arrays:
        """The report that sums over clients stand for, as of one client with all the images; may be empty."""
        return {}

    def expected(self, counts: np.ndarray, arrays: Mapping[str, tuple[int, ...]], dim: int, config: Config) -> Shapes:
        """Shapes of the arrays of numbers, by name.

        ``counts`` int64 [K] are the images of the local classes, ``arrays`` the shapes of the trained arrays, ``dim``
        is the length of a feature under the head.
        """
        return {}


def class_sums(report: Arrays, frame: SumFrame) -> Arrays:
    """Images of each class [K] and sums of their features [K, D], float64, of a report with means or an empty one."""
    counts, sums = np.zeros(len(frame.classes)), np.zeros((len(frame.classes), frame.dim))
    if report:
        rows = [frame.classes.index(c) for c in report["class_ids"].tolist()]
        counts[rows] = report["counts"]
        sums[rows] = report["counts"][:, None] * report["means"].astype(np.float64)
    return {"counts": counts, "sums": sums}


def class_report(sums: Arrays, frame: SumFrame) -> Arrays:
    """Ids, counts and means, float64, of the classes with images; from sums over clients, see :func:`class_sums`."""
    counts = np.rint(sums["counts"]).astype(np.int64)
    present = counts > 0
    means = sums["sums"][present] / counts[present, None]
    return {"class_ids": np.array(frame.classes)[present], "counts": counts[present], "means": means}


def traces(name: str, array: np.ndarray, dim: int) -> np.ndarray:
    """Trace of each matrix in one of the arrays of ``SPREADS``, [rows]: packed, diagonal, or d d^T of directions d."""
    if name == "covariances" or array.shape[-1] != dim:
        rows, columns = np.triu_indices(dim)
        return array[:, rows == columns].astype(np.float64).sum(axis=1)
    wide = array.astype(np.float64).reshape(len(array), -1)
    return wide.sum(axis=1) if name == "variances" else np.square(wide).sum(axis=1)


class MeanStatistics(ClientStatistics):
    """Class means [K, D]."""

    carries = needs_features = True
    releases = 1

    def compute(self, features: Tensor, labels: Tensor, options: Options, noise: GaussianMechanism = EXACT) -> Arrays:
        """Counts and means of the classes present."""
        class_ids, counts, means = class_means(features, labels)
        return self.as_arrays(class_ids=class_ids, counts=counts, means=noise.means(means, counts))

    def sums(self, report: Arrays, images: int, frame: SumFrame) -> Arrays:
        """Images of each class [K] and sum of their features [K, D]."""
        return class_sums(report, frame)

    def of_sums(self, sums: Arrays, frame: SumFrame) -> Arrays:
        """Counts and means of the classes that a client has."""
        report = class_report(sums, frame)
        return report | {"means": report["means"].astype(np.float32)} if len(report["counts"]) else {}

    def expected(self, counts: np.ndarray, arrays: Mapping[str, tuple[int, ...]], dim: int, config: Config) -> Shapes:
        """Means only."""
        return {"means": (len(counts), dim)}


class GaussianStatistics(ClientStatistics):
    """Class means and covariances in the method's packing (HGP section 3.3)."""

    carries = needs_features = True
    releases = 2

    def compute(self, features: Tensor, labels: Tensor, options: Options, noise: GaussianMechanism = EXACT) -> Arrays:
        """Counts, means and packed covariances of the classes present, the latter divided by n - 1."""
        if not noise.noise:
            return self.as_arrays(**class_gaussians(features, labels, options.covariance, options.rank))
        gaussians = class_gaussians(features, labels, options.covariance, ddof=0)
        name, counts = "covariances" if options.covariance == "full" else "variances", gaussians["counts"]
        means, spread = noise.moments(gaussians["means"], gaussians[name], counts)
        spread = spread * (counts / (counts - 1).clamp(min=1))[:, None]
        return self.as_arrays(**gaussians | {"means": means, name: spread})

    def expected(self, counts: np.ndarray, arrays: Mapping[str, tuple[int, ...]], dim: int, config: Config) -> Shapes:
        """Means and what the packing consists of, see task/prototypes/gaussians.py."""
        classes, options = len(counts), config.options
        packed: dict[str, Shapes] = {
            "diagonal": {"variances": (classes, dim)},
            "full": {"covariances": (classes, dim * (dim + 1) // 2)},
            "low-rank": {"variances": (classes, dim), "factors": (classes, options.rank, dim)},
        }
        return {"means": (classes, dim)} | packed[options.covariance]

    def unprotected(self, options: Options) -> str:
        """The effect of one image on the directions of the low-rank packing has no known bound."""
        return "a low-rank covariance" if options.covariance == "low-rank" else ""


class VarianceStatistics(MeanStatistics):
    """Class means and variances, the latter divided by n (PIP eq. 8), so 0 for a single image."""

    releases = 2

    def compute(self, features: Tensor, labels: Tensor, options: Options, noise: GaussianMechanism = EXACT) -> Arrays:
        """Counts, means and variances of the classes present."""
        gaussians = class_gaussians(features, labels, "diagonal", ddof=0)
        means, variances = noise.moments(gaussians["means"], gaussians["variances"], gaussians["counts"])
        return self.as_arrays(**gaussians | {"means": means, "variances": variances})

    def expected(self, counts: np.ndarray, arrays: Mapping[str, tuple[int, ...]], dim: int, config: Config) -> Shapes:
        """Means and variances."""
        return {"means": (len(counts), dim), "variances": (len(counts), dim)}


class CountStatistics(ClientStatistics):
    """How many images of each class there are, nothing else (HePCo section 4)."""

    carries = True
    releases = 0  # numbers of images are not protected

    def compute(self, features: Tensor, labels: Tensor, options: Options, noise: GaussianMechanism = EXACT) -> Arrays:
        """Counts of the classes present; features are not looked at."""
        class_ids, counts = labels.unique(return_counts=True)
        return self.as_arrays(class_ids=class_ids, counts=counts)


class FisherStatistics(ClientStatistics):
    """Diagonal of the empirical Fisher information of a trained backbone, in a task's last round (Kirkpatrick 2017)."""

    carries = at_task_end = True

    def unprotected(self, options: Options) -> str:
        """A gradient has no bound."""
        return "Fisher information"

    def collect(self, model: Model, sample: Sample, options: Options, mechanism: GaussianMechanism) -> Arrays:
        """F_i = mean over images of (d log p(y | x) / d theta_i)^2, p over the current task's classes."""
        class_ids, counts = sample.labels.unique(return_counts=True)
        return self.as_arrays(class_ids=class_ids, counts=counts, fisher=empirical_fisher(model, sample))

    def sums(self, report: Arrays, images: int, frame: SumFrame) -> Arrays:
        """The information times the client's images, [P], and these."""
        fisher = report["fisher"].astype(np.float64) if report else np.zeros(frame.arrays["backbone"])
        return {"images": np.array(images if report else 0.0), "fisher": images * fisher}

    def of_sums(self, sums: Arrays, frame: SumFrame) -> Arrays:
        """The mean over clients, weighted by images."""
        return {"fisher": (sums["fisher"] / sums["images"]).astype(np.float32)} if sums["images"] > 0 else {}

    def expected(self, counts: np.ndarray, arrays: Mapping[str, tuple[int, ...]], dim: int, config: Config) -> Shapes:
        """One number for every entry of the travelling backbone; 0 for running statistics, which nothing trains."""
        return {"fisher": arrays["backbone"]}


@torch.no_grad()
def empirical_fisher(model: Model, sample: Sample) -> Tensor:
    """Mean of squared gradients, image by image, of the cross-entropy over the current task's classes; [P]."""
    network, current = model.backbone, model.current_rows()
    weights = {name: p.detach() for name, p in network.named_parameters()}
    total = {name: torch.zeros_like(value) for name, value in network.state_dict().items() if value.is_floating_point()}

    def loss(weights: dict[str, Tensor], image: Tensor, target: Tensor) -> Tensor:
        features = functional_call(network, weights, (image[None],))
        return F.cross_entropy(model.head(features)[:, current], target[None])

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))
    per_pass = max(1, _GRADIENTS // sum(value.numel() for value in weights.values()))
    with sdpa_kernel(SDPBackend.MATH):  # the only kernel that vmap can batch
        for start in range(0, len(sample.rows), per_pass):
            images = prepare(sample.images[sample.positions[start : start + per_pass]], network)
            targets = model.local_targets(sample.rows[start : start + per_pass])
            for name, gradient in gradients(weights, images, targets).items():
                total[name] += gradient.square().sum(dim=0)
    return torch.cat([value.flatten() for value in total.values()]) / len(sample.rows)
