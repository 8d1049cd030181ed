"""The extension points: a method from outside the package joins by one name, with keys and halves of its own."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import tests.outside_method
from server_app.rounds.run import execute
from server_app.transport.in_process import InProcessTransport
from task.config.parsing import parse, parse_text
from task.keys import ConfigError
from task.methods import METHODS

NAME = "tests.outside_method:ROW"


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Other tests know the project's own methods only."""
    yield
    METHODS.pop(NAME, None)


def results_of(values: dict) -> dict:
    config = parse(values)
    directory = execute(config, InProcessTransport(config.flat(), config.num_clients))
    return json.loads((directory / "results.json").read_text())


def test_it_is_short() -> None:
    assert len(Path(tests.outside_method.__file__).read_text().splitlines()) < 60


def test_it_runs_with_its_own_keys_and_forgets_less_than_averaging(tiny: dict) -> None:
    values = tiny | {"rounds-per-task": 2, "local-epochs": 2}
    own = results_of(values | {"method": NAME, "pulled-pull": 0.5, "run-name": "own"})
    averaged = results_of(values | {"method": "fedavg", "run-name": "averaged"})
    assert own["status"] == "finished"
    assert own["method"] == NAME
    assert own["rounds"][-1]["server"] == {"means": 12.0}
    assert own["metrics"]["final_average_accuracy"] > averaged["metrics"]["final_average_accuracy"]


def test_its_keys_are_checked_as_all_others() -> None:
    assert parse_text({"method": NAME, "pulled-pull": "2"}) == {"method": NAME, "pulled-pull": 2.0}
    config = parse({"method": NAME, "pulled-pull": 2.0})
    assert parse(config.flat()) == config
    with pytest.raises(ConfigError, match="pulled-pull = -1"):
        parse({"method": NAME, "pulled-pull": -1})
    with pytest.raises(ConfigError, match=r"pulled-pull = 2.0 would be ignored.*'pulled'"):
        parse({"method": "hgp", "pulled-pull": 2.0})


@pytest.mark.parametrize("name", ["no_such_module:ROW", "tests.outside_method:NOTHING", "tests.outside_method:Pulled"])
def test_what_is_no_method_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"method = '{name}'"):
        parse({"method": name})


@pytest.mark.parametrize("text", ["ROW = (", "raise RuntimeError('no licence')"])
def test_a_module_that_does_not_work_is_named(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unfinished.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="method = 'unfinished:ROW' cannot be imported"):
        parse({"method": "unfinished:ROW"})
