"""Which parameters of a test belong to the default tests."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def rest_in_ci(values: Iterable[str], default: Container[str]) -> list[Any]:
    """Parameters of a test; those that are not in ``default`` are run by CI only."""
    return [value if value in default else pytest.param(value, marks=pytest.mark.ci) for value in values]
