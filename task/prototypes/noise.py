"""Clipping and noise in what a client sends: local differential privacy by the Gaussian mechanism.

Unit: one training image of a client, replaced by any other of the same class. The number of images of each class is
sent as it is and not protected. With C = privacy-clip, B = privacy-feature-clip and z = privacy-noise, every release
has noise of z / 2 times its L2 sensitivity:

- what training changed, all arrays as one vector, scaled down to norm C at most: two such vectors, of any data, are at
  most 2 C apart; deviation z C. This release alone protects even all images of a client at once. Head rows that the
  method's loss cannot move, whatever the images, are sent back as they came: they say nothing, so they get no noise.
- mean of a class's n features, each scaled down to norm B at most: one image moves it by 2 B / n; deviation z B / n.
- mean of their squares, or of f f^T: |f f^T - g g^T| <= sqrt(2) B^2, so sqrt(2) B^2 / n; deviation z B^2 / (sqrt(2) n).
- sums instead of means: the same without the division by n.

Statistics are computed with the noised arrays: with the trained ones, one image would move the features of all others
too. An image has one class, so all classes of a message together are one release. Steps after the noise cost no
privacy: variances are raised to zero, matrices made positive semi-definite, means scaled down to norm B.

The mechanism is that of Dwork and Roth 2014, appendix A; their multiplier, deviation over sensitivity, is z / 2 here.
Noise of floating-point numbers is not proof against an attack on their last digits (Mironov 2012).
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from task.config.schema import Config
from task.message import Arrays
from task.prototypes.gaussians import pack_symmetric, unpack_symmetric
from task.utils.seeding import numpy_rng

Normal = Callable[[tuple[int, ...]], np.ndarray]  # shape -> independent N(0, 1), float64
NO_ROWS = np.empty(0, np.int64)


def system_normal(shape: tuple[int, ...]) -> np.ndarray:
    """N(0, 1) of the given shape from the operating system's random numbers, which cannot be repeated.

    Box and Muller 1958; values beyond 8.6 standard deviations, of probability below 1e-17, are never drawn.
    """
    words = np.frombuffer(os.urandom(16 * math.prod(shape)), np.uint64).reshape(2, *shape)
    first, second = ((words >> np.uint64(11)) + 0.5) * 2.0**-53
    return np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second)


@dataclass(frozen=True)
class GaussianMechanism:
    """The mechanism of one message.

    Attributes:
        clip: C, 0 = arrays are not clipped.
        feature_clip: B, 0 = features are not clipped.
        noise: z, 0 = nothing is noised.
        normal: where the noise comes from.
    """

    clip: float
    feature_clip: float
    noise: float
    normal: Normal

    @classmethod
    def of(cls, config: Config, client: int, server_round: int) -> Self:
        """The run's mechanism; ``client`` is its number, which only ``privacy-seeded`` noise depends on."""
        seeded = numpy_rng(config.seed, "privacy", client, server_round).standard_normal
        normal: Normal = seeded if config.privacy_seeded else system_normal
        return cls(config.privacy_clip, config.privacy_feature_clip, config.privacy_noise, normal)

    def arrays(self, trained: Arrays, sent: Arrays, fixed_rows: np.ndarray = NO_ROWS) -> Arrays:
        """``sent`` + clipped(``trained`` - ``sent``) + noise; all arrays are clipped as one vector.

        The result has the types of ``trained``.

        With noise ``fixed_rows`` of the head, int64 [n], stay as they were sent.

        Raises:
            ValueError: the trained arrays hold NaN or infinite values, which cannot be clipped; or training has moved
                ``fixed_rows``.
        """
        if not self.clip:
            return trained
        steps = {name: a - sent[name].astype(np.float64) for name, a in trained.items()}
        head = steps.keys() & {"head.weight", "head.bias"} if self.noise else ()
        norm = math.sqrt(sum(np.square(step).sum() for step in steps.values()))
        if not math.isfinite(norm):
            raise ValueError("the trained arrays hold NaN or infinite values")
        if any(steps[name][fixed_rows].any() for name in head):
            raise ValueError("training has moved head rows that the objective's learned_rows leaves out")
        share = min(1.0, self.clip / norm) if norm else 1.0
        noised = {name: share * step + self.draw(step.shape, self.clip) for name, step in steps.items()}
        for name in head:
            noised[name][fixed_rows] = 0
        return {name: (sent[name] + step).astype(trained[name].dtype) for name, step in noised.items()}

    def features(self, features: Tensor) -> Tensor:
        """Each row of features [N, D] scaled down to norm B at most."""
        if not self.feature_clip:
            return features
        return features * (self.feature_clip / features.norm(dim=1, keepdim=True)).clamp(max=1)

    def draw(self, shape: tuple[int, ...], scale: float) -> np.ndarray:
        """Noise of the standard deviation z * ``scale``, float64; zeros where there is none."""
        return self.noise * scale * self.normal(shape) if self.noise else np.zeros(shape)

    def add(self, values: Tensor, scale: float, counts: Tensor | int = 1) -> Tensor:
        """``values`` [K, S] with noise of the standard deviation z * ``scale`` / n, n = ``counts`` [K]; float64."""
        noise = torch.from_numpy(self.draw(tuple(values.shape), scale)).to(values.device)
        return values + noise / (counts[:, None] if isinstance(counts, Tensor) else counts)

    def means(self, means: Tensor, counts: Tensor) -> Tensor:
        """Class means [K, D] of ``counts`` [K] images with their noise, none beyond norm B; float64 if noised."""
        if not self.noise:
            return means
        return self.features(self.add(means, self.feature_clip, counts))

    def squares(self, squares: Tensor, counts: Tensor | int = 1) -> Tensor:
        """Mean squares, or packed mean outer products, [K, S] with their noise; counts [K], or 1 for sums; float64."""
        return self.add(squares, self.feature_clip**2 / math.sqrt(2), counts)

    def moments(self, means: Tensor, spread: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Class means [K, D] and variances, or packed covariances, [K, S] with noise in means and mean squares.

        ``spread`` is a sum over the class's images divided by n = ``counts`` [K], as it is given and as it is returned.
        What is returned is not negative, or positive semi-definite, and zero for a class of one image.
        """
        if not self.noise:
            return means, spread
        diagonal = means.shape == spread.shape
        row, column = (np.diag_indices if diagonal else np.triu_indices)(means.shape[1])
        means = means.double()
        squares = self.squares(spread + means[:, row] * means[:, column], counts)
        means = self.means(means, counts)
        spread = squares - means[:, row] * means[:, column]
        spread = spread.clamp(min=0) if diagonal else nearest_semi_definite(spread, means.shape[1])
        return means, torch.where(counts[:, None] > 1, spread, 0)


def nearest_semi_definite(packed: Tensor, dim: int) -> Tensor:
    """Packed symmetric matrices [K, D (D + 1) / 2] without negative eigenvalues: the nearest in Frobenius norm."""
    values, vectors = torch.linalg.eigh(unpack_symmetric(packed, dim))
    return pack_symmetric((vectors * values.clamp(min=0)[:, None]) @ vectors.mT)


EXACT = GaussianMechanism(0.0, 0.0, 0.0, system_normal)
