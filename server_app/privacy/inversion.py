"""Attack on class statistics: images are optimised until their features are those of a class mean or a draw."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from task.config.parsing import parse
from task.config.schema import Config
from task.inference import Predictor, load_predictor
from task.keys import ConfigError
from task.message import Arrays
from task.methods import load_class
from task.models.model import Model
from task.models.preprocessing import normalise, resize
from task.prototypes.gaussians import prepare_gaussians
from task.prototypes.noise import GaussianMechanism
from task.prototypes.statistics import Sample
from task.scenario.client_data import client_task_data
from task.scenario.scenario import Scenario, build_scenario
from task.utils.seeding import torch_rng

STEP_SIZE = 0.2  # Adam, in pixels of 0 .. 1
SMOOTHNESS = 0.02  # weight of total variation against the relative squared distance of features
WINDOW, DEVIATION = 11, 1.5  # of the Gaussian window of SSIM, in pixels


@dataclass(frozen=True)
class Inversion:
    """Result of the attack on one class, called ``name``, of which the client has so many ``images``.

    Attributes:
        real: the client's image that is most similar to the reconstruction, [H, W, 1 or 3] in 0 .. 1.
        reconstruction: [H, W, 1 or 3] in 0 .. 1.
        distance: |f(x) - target| / |target| before the last step.
        ssim: of ``reconstruction`` and ``real``.
        ssim_others: of the reconstruction and the most similar image of the class among those of other clients.
        ssim_real: of each of the client's images and the most similar one of other clients, on average.
        mse: mean squared error of ``reconstruction`` and the client's image of the class where it is smallest, pixels
            in 0 .. 1.
    """

    name: str
    images: int
    real: np.ndarray
    reconstruction: np.ndarray
    distance: float
    ssim: float
    ssim_others: float | None
    ssim_real: float | None
    mse: float

    def numbers(self) -> dict[str, Any]:
        """All attributes but the images, and P of pixels in 0 .. 1 and in 0 .. 255."""
        values = {name: value for name, value in vars(self).items() if name not in ("real", "reconstruction")}
        return values | {"p": privacy_score(self.mse), "p_255": privacy_score(255**2 * self.mse)}


def privacy_score(mse: float) -> float:
    """P = 1 - 1 / (1 + MSE) (Gao et al. 2024, FedProK, eq. 2): 0 if the reconstruction is the true image, below 1.

    The paper does not say in which scale pixels are. In 0 .. 1 the MSE is at most 1, and P at most 0.5.

    >>> privacy_score(1.0)
    0.5

    ``mse`` is the mean squared error of the true image and its reconstruction, at least 0.
    """
    return 1 - 1 / (1 + mse)


def attack(path: Path, client: int, target: str, num_classes: int, steps: int, device: str) -> list[Inversion]:
    """Invert the class statistics that one client sends with the model of a run.

    A run does not store statistics. They are computed again from its run keys, noise and thresholds included, with its
    final model. At most ``num_classes`` are attacked, those with the fewest images first. The target is the "mean" of
    a class, or a "sample" of its Gaussian. Clients are numbered from 0.

    Raises:
        ConfigError: the method or run sends nothing to invert, the client does not exist or has no images, or the data
            are not here.
        ModelError: there is no model.
    """
    if path.is_file():
        raise ConfigError(f"{path} is a file: name a run's folder, where privacy.json and privacy.png go.")
    predictor = load_predictor(path, device)
    config = parse(predictor.metadata.config)
    torch.set_num_threads(config.threads)
    kind = load_class(config.method_row.statistics)()
    if not kind.needs_features:
        raise ConfigError(f"method {config.method!r} sends no statistics of features: there is nothing to invert.")
    if config.secure_aggregation != "off":
        raise ConfigError("the server of this run had sums over clients alone: there is nothing of one to invert.")
    if config.own_data:
        raise ConfigError("the images of this run are on its nodes: only who has them can compare.")
    if not 0 <= client < config.num_clients:
        raise ConfigError(f"--client {client} does not exist: the run has clients 0 to {config.num_clients - 1}.")
    scenario = build_scenario(config)
    positions = _reported_positions(config, predictor, client)
    labels = scenario.dataset.train_labels[positions]
    rows = scenario.schedule.head_rows[labels]
    on_device = (torch.from_numpy(ids).to(predictor.model.device) for ids in (labels, rows))
    sample = Sample(scenario.dataset.train_images, positions, *on_device)
    statistics = kind.collect(predictor.model, sample, config.options, GaussianMechanism.of(config, client, 0))
    chosen = np.argsort(statistics["counts"], kind="stable")[:num_classes]
    targets = _attack_targets(statistics, target, config)[chosen]
    shape = scenario.dataset.train_images[positions[:1]].shape[1:]
    images, distances = invert(predictor.model, targets, shape, steps, torch_rng(config.seed, "inversion"))
    return [
        _compare_with_real(scenario, positions, class_id, image, distance, predictor)
        for class_id, image, distance in zip(statistics["class_ids"][chosen].tolist(), images, distances, strict=True)
    ]


def _reported_positions(config: Config, predictor: Predictor, client: int) -> np.ndarray:
    """Positions, int64 [N], of the client's training images whose classes it reports, of all tasks that have begun."""
    tasks = range(len(predictor.metadata.task_sizes))
    positions = np.concatenate([client_task_data(config, client, task, round=0).positions for task in tasks])
    labels = build_scenario(config).dataset.train_labels[positions]
    positions = positions[np.bincount(labels)[labels] >= config.min_class_count]
    if not len(positions):
        raise ConfigError(f"--client {client} reports no class: it has no images, or less than min-class-count.")
    return positions


def _attack_targets(statistics: Arrays, target: str, config: Config) -> Tensor:
    """Target features of each class, float32 [K, D]: its mean, or one draw of its Gaussian."""
    if target == "mean":
        return torch.from_numpy(statistics["means"]).float()  # squares of fp16 overflow
    if not statistics.keys() & {"variances", "covariances"}:
        raise ConfigError(f"--target sample is not possible: method {config.method!r} sends means alone.")
    bank, rng = prepare_gaussians(statistics, config.options.covariance), torch_rng(config.seed, "inversion", 1)
    diagonal = bank.means + bank.deviations * torch.randn(bank.means.shape, generator=rng)
    return diagonal + (torch.randn(len(bank), 1, bank.factors.shape[1], generator=rng) @ bank.factors)[:, 0]


def invert(
    model: Model, targets: Tensor, shape: Sequence[int], steps: int, rng: torch.Generator
) -> tuple[Tensor, list[float]]:
    """Images whose features approach the targets: from noise, by Adam, smooth, every pixel in 0 .. 1.

    min_x |f(x) - t|^2 / |t|^2 + lambda TV(x) (Mahendran and Vedaldi 2015), the images independent of each other.
    ``targets`` are t, [K, D]; ``shape`` is height, width and channels of the stored images, which an attacker knows.

    Returns:
        images [K, C, H, W], and of each |f(x) - t| / |t| before the last step.
    """
    height, width, channels = shape
    x = torch.rand(len(targets), channels, height, width, generator=rng).to(model.device).requires_grad_(True)
    targets = targets.to(model.device)
    scale = targets.square().sum(dim=1).clamp(min=1e-12)
    optimiser = torch.optim.Adam([x], STEP_SIZE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    gap = torch.zeros(len(targets))
    for _ in range(steps):
        gap = (differentiable_features(model, x) - targets).square().sum(dim=1) / scale
        (x.grad,) = torch.autograd.grad((gap + SMOOTHNESS * total_variation(x)).sum(), [x])
        optimiser.step()
        schedule.step()
        x.data.clamp_(0, 1)
    return x.detach().cpu(), gap.detach().sqrt().tolist()


def differentiable_features(model: Model, images: Tensor) -> Tensor:
    """The features that statistics are computed from: images [B, C, H, W] in 0 .. 1 -> [B, D]; with gradients."""
    pixels = normalise(resize(images * 255, model.backbone.image_size), model.backbone)
    return model.head.project(model.features(pixels))


def total_variation(x: Tensor) -> Tensor:
    """Mean absolute difference of neighbouring pixels down and across, [B, C, H, W] -> [B]."""
    down, across = x.diff(dim=2).abs(), x.diff(dim=3).abs()
    return down.flatten(1).mean(dim=1) + across.flatten(1).mean(dim=1)


def ssim(x: Tensor, y: Tensor) -> Tensor:
    """Structural similarity (Wang et al. 2004) of pixels [B, C, H, W] in 0 .. 1, mean over channels and windows.

    (2 mu_x mu_y + c1) (2 s_xy + c2) / ((mu_x^2 + mu_y^2 + c1) (s_x^2 + s_y^2 + c2)), c1 = 0.01^2, c2 = 0.03^2, in
    Gaussian windows of 11 x 11 pixels and deviation 1.5 inside the image, whose sides have at least 11 pixels.
    """
    steps = torch.arange(WINDOW) - WINDOW // 2
    weights = torch.exp(-steps.square() / (2 * DEVIATION**2))
    window = (torch.outer(weights, weights) / weights.sum() ** 2).to(x)[None, None]

    def mean(values: Tensor) -> Tensor:
        return F.conv2d(values.flatten(0, 1)[:, None], window).unflatten(0, values.shape[:2])

    mu_x, mu_y = mean(x), mean(y)
    var_x, var_y, cov = mean(x * x) - mu_x**2, mean(y * y) - mu_y**2, mean(x * y) - mu_x * mu_y
    luminance = (2 * mu_x * mu_y + 1e-4) / (mu_x**2 + mu_y**2 + 1e-4)
    return (luminance * (2 * cov + 9e-4) / (var_x + var_y + 9e-4)).flatten(1).mean(dim=1)


def smallest_mse(image: np.ndarray, real: np.ndarray) -> float:
    """Mean squared error of ``image`` [H, W, C] in 0 .. 1 and the nearest of ``real``, uint8 [N, H, W, C].

    >>> smallest_mse(np.array([[[0.5], [1.0]]]), np.array([[[[0], [0]]], [[[255], [255]]]], np.uint8))
    0.125
    """
    return float(np.square(real / 255 - image).mean(axis=(1, 2, 3)).min())


def _compare_with_real(
    scenario: Scenario, positions: np.ndarray, class_id: int, image: Tensor, distance: float, predictor: Predictor
) -> Inversion:
    """Compare the reconstruction of a class with its images at the client's ``positions``, and with all others."""
    dataset, side = scenario.dataset, max(predictor.model.backbone.image_size, WINDOW)

    def load_images(positions: np.ndarray) -> Tensor:
        return resize(torch.from_numpy(dataset.train_images[positions]).permute(0, 3, 1, 2), side)

    of_class = np.flatnonzero(dataset.train_labels == class_id)
    of_client, of_others = np.intersect1d(of_class, positions), np.setdiff1d(of_class, positions)
    reconstruction, real = resize(image[None] * 255, side), load_images(of_client)
    similarity = ssim(reconstruction.expand_as(real), real)
    best = []  # highest SSIM with an image of other clients: of the reconstruction, then of each real image
    if len(of_others):
        others = load_images(of_others)
        best = [float(ssim(x[None].expand_as(others), others).max()) for x in (reconstruction[0], *real)]
    return Inversion(
        name=dataset.class_names[class_id],
        images=len(of_client),
        real=dataset.train_images[of_client[[int(similarity.argmax())]]][0] / 255,
        reconstruction=image.permute(1, 2, 0).numpy(),
        distance=distance,
        ssim=float(similarity.max()),
        ssim_others=best[0] if best else None,
        ssim_real=float(np.mean(best[1:])) if best else None,
        mse=smallest_mse(image.permute(1, 2, 0).numpy(), dataset.train_images[of_client]),
    )
