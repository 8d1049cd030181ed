"""What class statistics give away: images whose features are those of a prototype, beside the client's real images."""

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
from task.methods import load_half
from task.models.model import Model
from task.models.preprocessing import normalise, resize
from task.prototypes.gaussians import prepare_gaussians
from task.prototypes.noise import Guard
from task.prototypes.statistics import Sample
from task.scenario.client_data import lesson_of
from task.scenario.scenario import World, build_world
from task.utils.seeding import torch_rng

STEP_SIZE = 0.2  # Adam, in pixels of 0 .. 1
SMOOTHNESS = 0.02  # weight of total variation against the relative squared distance of features
WINDOW, DEVIATION = 11, 1.5  # of the Gaussian window of SSIM, in pixels


@dataclass(frozen=True)
class Inversion:
    """One class of one client, attacked.

    Attributes:
        name: of the class.
        images: of it that the client has.
        real: the client's own image that is most similar to the reconstruction, [H, W, 1 or 3] in 0 .. 1.
        reconstruction: likewise.
        distance: |f(x) - target| / |target| that the attack ended with.
        ssim: of these two images.
        ssim_others: of the reconstruction and the most similar training image of the class that others have.
        ssim_real: of the client's real images and the most similar one that others have, on average.
    """

    name: str
    images: int
    real: np.ndarray
    reconstruction: np.ndarray
    distance: float
    ssim: float
    ssim_others: float | None
    ssim_real: float | None

    def figures(self) -> dict[str, Any]:
        """All but the pictures; P = 1 - SSIM is what an attacker does not see (0 = the very image)."""
        numbers = {n: v for n, v in vars(self).items() if n not in ("real", "reconstruction")}
        return numbers | {"p": 1 - self.ssim}


def attack(path: Path, client: int, target: str, most: int, steps: int, device: str = "auto") -> list[Inversion]:
    """Invert the class statistics that one client sends with the model of a run.

    The statistics are computed anew by the run's own keys, noise and thresholds included, with its final model, for a
    run does not keep them. Classes of fewest images come first.

    Args:
        path: the run's folder.
        client: its place, from 0.
        target: "mean" of a class, or a "sample" of the Gaussian that was sent.
        most: classes to attack.
        steps: of the optimisation.
        device: auto, cpu, cuda or cuda:N.

    Raises:
        ConfigError: the method sends nothing to invert, the client does not exist, or the data are not here.
        ModelError: no model there.
    """
    predictor = load_predictor(path, device)
    config = parse(predictor.card.config)
    torch.set_num_threads(config.threads)
    kind = load_half(config.row.statistics)()
    if not kind.needs_features:
        raise ConfigError(f"method {config.method!r} sends no statistics of features: there is nothing to invert.")
    if config.own_data:
        raise ConfigError("the images of this run are on its nodes: only who has them can compare.")
    if not 0 <= client < config.num_clients:
        raise ConfigError(f"--client {client} does not exist: the run has clients 0 to {config.num_clients - 1}.")
    world = build_world(config)
    mine = held(config, predictor, client)
    found = kind.collect(predictor.model, _sample(world, mine, predictor), config.options, Guard.of(config, client, 0))
    chosen = np.argsort(found["counts"], kind="stable")[:most]
    targets = prototypes(found, target, config)[chosen]
    shape = world.dataset.train_images[mine[:1]].shape[1:]
    images, distances = invert(predictor.model, targets, shape, steps, torch_rng(config.seed, "inversion"))
    classes = found["class_ids"][chosen].tolist()
    return [_measured(world, mine, c, x, d, predictor) for c, x, d in zip(classes, images, distances, strict=True)]


def held(config: Config, predictor: Predictor, client: int) -> np.ndarray:
    """Positions, int64 [N], of the client's training images whose classes it reports, of all tasks that have begun.

    Raises:
        ConfigError: there are none.
    """
    tasks = range(len(predictor.card.task_sizes))
    positions = np.concatenate([lesson_of(config, client, task, round=0).positions for task in tasks])
    labels = build_world(config).dataset.train_labels[positions]
    positions = positions[np.bincount(labels)[labels] >= config.min_class_count] if len(labels) else positions
    if not len(positions):
        raise ConfigError(f"--client {client} reports no class: it has no images, or less than min-class-count.")
    return positions


def _sample(world: World, positions: np.ndarray, predictor: Predictor) -> Sample:
    labels = world.dataset.train_labels[positions]
    on_device = (torch.from_numpy(values).to(predictor.model.device) for values in (labels, world.rows[labels]))
    return Sample(world.dataset.train_images, positions, *on_device)


def prototypes(found: Arrays, target: str, config: Config) -> Tensor:
    """What the attacker steers to for each class, float32 [K, D]: its mean, or one draw of its Gaussian.

    Raises:
        ConfigError: the method sends no covariances to draw from.
    """
    if "means" not in found:
        return torch.from_numpy(found["sums"] / found["counts"][:, None]).float()
    if target == "mean":
        return torch.from_numpy(found["means"])
    if not found.keys() & {"variances", "covariances"}:
        raise ConfigError(f"--target sample is not possible: method {config.method!r} sends means alone.")
    bank, rng = prepare_gaussians([found], config.options.packing), torch_rng(config.seed, "inversion", 1)
    drawn = bank.means + bank.deviations * torch.randn(bank.means.shape, generator=rng)
    return drawn + (torch.randn(len(bank), 1, bank.factors.shape[1], generator=rng) @ bank.factors)[:, 0]


def invert(
    model: Model, targets: Tensor, shape: Sequence[int], steps: int, rng: torch.Generator
) -> tuple[Tensor, list[float]]:
    """Images whose features approach the targets: from noise, by Adam, smooth, every pixel in 0 .. 1.

    min_x |f(x) - t|^2 / |t|^2 + lambda TV(x) (Mahendran and Vedaldi 2015), the images independent of each other.

    Args:
        model: of the run.
        targets: t, [K, D].
        shape: height, width and channels of the stored images, which an attacker knows.
        steps: of Adam.
        rng: of the start.

    Returns:
        images [K, C, H, W], and of each |f(x) - t| / |t|.
    """
    height, width, channels = shape
    x = torch.rand(len(targets), channels, height, width, generator=rng).to(model.device).requires_grad_(True)
    targets = targets.to(model.device)
    optimiser = torch.optim.Adam([x], STEP_SIZE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    gap = torch.zeros(len(targets))
    for _ in range(steps):
        gap = (lifted(model, x) - targets).square().sum(dim=1) / targets.square().sum(dim=1).clamp(min=1e-12)
        (x.grad,) = torch.autograd.grad((gap + SMOOTHNESS * total_variation(x)).sum(), [x])
        optimiser.step()
        schedule.step()
        x.data.clamp_(0, 1)
    return x.detach().cpu(), gap.detach().sqrt().tolist()


def lifted(model: Model, images: Tensor) -> Tensor:
    """What statistics are taken of: stored images [B, C, H, W] in 0 .. 1 -> [B, D], differentiable."""
    return model.head.lift(model.features(normalise(resize(images * 255, model.backbone.image_size), model.backbone)))


def total_variation(x: Tensor) -> Tensor:
    """Mean absolute difference of neighbouring pixels down and across, [B, C, H, W] -> [B]."""
    down, across = x.diff(dim=2).abs(), x.diff(dim=3).abs()
    return down.flatten(1).mean(dim=1) + across.flatten(1).mean(dim=1)


def ssim(x: Tensor, y: Tensor) -> Tensor:
    """Structural similarity (Wang et al. 2004) of pixels [B, C, H, W] in 0 .. 1, mean over channels and window places.

    (2 mu_x mu_y + c1) (2 s_xy + c2) / ((mu_x^2 + mu_y^2 + c1) (s_x^2 + s_y^2 + c2)), c1 = 0.01^2, c2 = 0.03^2, in
    Gaussian windows of 11 x 11 pixels and deviation 1.5, which lie inside the image; sides of at least 11 pixels.
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


def _measured(
    world: World, mine: np.ndarray, class_id: int, image: Tensor, distance: float, predictor: Predictor
) -> Inversion:
    dataset, side = world.dataset, max(predictor.model.backbone.image_size, WINDOW)

    def large(positions: np.ndarray) -> Tensor:
        return resize(torch.from_numpy(dataset.train_images[positions]).permute(0, 3, 1, 2), side)

    every = np.flatnonzero(dataset.train_labels == class_id)
    own, others = np.intersect1d(every, mine), np.setdiff1d(every, mine)
    reconstruction, reals = resize(image[None] * 255, side), large(own)
    similar, elsewhere = ssim(reconstruction.expand_as(reals), reals), large(others) if len(others) else reals[:0]
    best = [float(ssim(one[None].expand_as(elsewhere), elsewhere).max()) for one in reals if len(others)]
    return Inversion(
        name=dataset.class_names[class_id],
        images=len(own),
        real=dataset.train_images[own[[int(similar.argmax())]]][0] / 255,
        reconstruction=image.permute(1, 2, 0).numpy(),
        distance=distance,
        ssim=float(similar.max()),
        ssim_others=float(ssim(reconstruction.expand_as(elsewhere), elsewhere).max()) if len(others) else None,
        ssim_real=float(np.mean(best)) if best else None,
    )
