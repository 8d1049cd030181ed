"""The long run's copy of the project, whose clients fail now and then."""

import tomllib

import pytest

from benchmarks.soak import app_with_failures


@pytest.mark.ci
def test_the_copy_has_the_clients_that_fail_and_bundles_them() -> None:
    with app_with_failures() as project:
        app = tomllib.loads((project / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
        assert app["components"]["clientapp"] == "benchmarks.soak_client:app"
        assert "benchmarks/**/*.py" in app["fab-include"]
        assert (project / "benchmarks" / "soak_client.py").is_file()
