"""The examples in docstrings are true."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [path.relative_to(ROOT) for room in ("task", "client_app", "strategies") for path in (ROOT / room).rglob("*.py")]
MODULES = [".".join(path.with_suffix("").parts) for path in FILES if ">>> " in (ROOT / path).read_text()]


@pytest.mark.parametrize("name", sorted(MODULES))
def test_the_examples_of_a_module(name: str) -> None:
    failed, attempted = doctest.testmod(import_module(name))
    assert attempted
    assert not failed
