"""The exact (epsilon, delta) of repeated releases of the Gaussian mechanism."""

import math

import torch

BISECTIONS = 100  # more than enough halvings for float64


def epsilon(multiplier: float, releases: int, delta: float) -> float:
    r"""The smallest epsilon at ``delta`` of adaptive releases of the Gaussian mechanism, without any subsampling.

    Releases of sensitivity / deviation :math:`\mu_i` together are one Gaussian mechanism of
    :math:`\mu = \sqrt{\sum_i \mu_i^2}` (Dong, Roth and Su 2022, corollary 3.3). Its epsilon solves
    :math:`\delta = \Phi(\mu/2 - \epsilon/\mu) - e^\epsilon \Phi(-\mu/2 - \epsilon/\mu)` (Balle and Wang 2018, theorem
    8). The solution is found by bisection.

    Args:
        multiplier: standard deviation of the noise over the L2 sensitivity, 1 / mu of each release.
        releases: at least 0.
        delta: between 0 and 1.
    """
    if not releases:
        return 0.0
    mu = math.sqrt(releases) / multiplier
    low, high = 0.0, mu**2 / 2 + mu * math.sqrt(-2 * math.log(delta))  # delta_at(high) <= delta: the tail of Phi
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if delta_at(middle, mu) <= delta else (middle, high)
    return high


def delta_at(epsilon: float, mu: float) -> float:
    r"""The delta of one Gaussian mechanism of sensitivity / deviation ``mu`` at ``epsilon``.

    With a = mu / 2 - epsilon / mu and b = mu / 2 + epsilon / mu, e^epsilon Phi(-b) is exp(-a^2 / 2) erfcx(b / sqrt 2)
    / 2: nothing in it overflows.
    """
    a, b = mu / 2 - epsilon / mu, mu / 2 + epsilon / mu
    above, below = torch.special.erfcx(torch.tensor([abs(a), b], dtype=torch.float64) / math.sqrt(2)).tolist()
    tail = math.exp(-(a**2) / 2) / 2
    return tail * (above - below) if a < 0 else 1 - tail * (above + below)
