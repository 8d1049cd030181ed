"""The examples in docstrings are true."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATHS = [path for room in ("task", "client_app", "strategies", "server_app") for path in (ROOT / room).rglob("*.py")]
MODULES = [".".join(p.relative_to(ROOT).with_suffix("").parts) for p in PATHS if ">>> " in p.read_text()]


@pytest.mark.parametrize("name", sorted(MODULES))
def test_the_examples_of_a_module(name: str) -> None:
    failed, attempted = doctest.testmod(import_module(name))
    assert attempted
    assert not failed
