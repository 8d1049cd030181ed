"""Flower's accountant of Renyi differential privacy, which does its sums with Google's dp-accounting."""

from functools import lru_cache

from task.keys import ConfigError


@lru_cache(maxsize=64)
def epsilon(multiplier: float, releases: int, delta: float) -> float:
    """The epsilon at ``delta`` of so many adaptive releases of the Gaussian mechanism, without any subsampling.

    Args:
        multiplier: standard deviation of the noise over the L2 sensitivity.
        releases: at least 0.
        delta: between 0 and 1.

    Raises:
        ConfigError: what it needs is not installed; names it.
    """
    if not releases:
        return 0.0
    try:
        from flwr.serverapp import (
            GaussianPrivacyEvent,
            NeighboringRelation,
            PrivacyConfig,
            RdpAccountant,
            SamplingMethod,
        )

        # the relation between data sets is in the sensitivity; the accountant sees their ratio only
        relation, sampling = NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION
        accountant = RdpAccountant(PrivacyConfig(delta, 1, relation, sampling))
    except ImportError as error:
        raise ConfigError(
            f"privacy-noise needs an accountant ({' '.join(str(error).split())}): pip install 'fcil[privacy]', "
            "or in a checkout pip install --editable '.[privacy]'."
        ) from error
    accountant.compose(GaussianPrivacyEvent(multiplier, 1, 1), releases)
    return accountant.get_epsilon(delta)
