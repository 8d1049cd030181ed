"""The extension points: a method from outside the package joins by one name, with keys and halves of its own."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import yaml

import tests.strategies.outside_method
from server_app.bench.suite import read_suite
from server_app.cli.main import main
from server_app.errors import RunError
from server_app.privacy.account import releases_per_message
from strategies.base import Strategy
from task.config.parsing import ignored_keys, parse, parse_text
from task.keys import Affects, ConfigError, key
from task.method_options import AFCLOptions, Options
from task.methods import METHODS
from task.models.model import Model
from task.prototypes.scatter import ScatterStatistics
from task.prototypes.statistics import ClientStatistics, MeanStatistics
from tests.helpers.runs import Values, run
from tests.strategies.outside_method import ROW, MeansAsHead, PulledOptions

NAME = "tests.strategies.outside_method:ROW"


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Other tests know the project's own methods only."""
    yield
    METHODS.pop(NAME, None)


def test_it_is_short() -> None:
    assert len(Path(tests.strategies.outside_method.__file__).read_text().splitlines()) < 60


def test_it_runs_with_its_own_keys_and_forgets_less_than_averaging(tiny: dict) -> None:
    values = tiny | {"rounds-per-task": 2, "local-epochs": 2}
    own = run(values | {"method": NAME, "pulled-pull": 0.5, "run-name": "own"})
    averaged = run(values | {"method": "fedavg", "run-name": "averaged"})
    assert own["status"] == "finished"
    assert own["method"] == NAME
    assert own["rounds"][-1]["server"] == {"means": 12.0}
    assert own["metrics"]["final_average_accuracy"] > averaged["metrics"]["final_average_accuracy"]


def test_its_step_size_is_named_where_the_server_diverges(tiny: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(self: Strategy, model: Model, *_: object) -> dict[str, float]:
        model.load({name: np.full_like(array, 1e30) for name, array in model.export().items()})
        return {}

    @dataclass(frozen=True)
    class Stepped(PulledOptions):
        learning_rate: float = key(0.1, "step size of the server")

    monkeypatch.setattr(tests.strategies.outside_method, "ROW", replace(ROW, options=Stepped))
    monkeypatch.setattr(MeansAsHead, "refine", diverge)
    with pytest.raises(RunError, match=r"lower the step size of the server \(pulled-learning-rate\)"):
        run(tiny | {"method": NAME})


def test_a_server_that_computes_no_numbers_and_has_no_step_size_says_so(
    tiny: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverge(self: Strategy, model: Model, *_: object) -> dict[str, float]:
        model.load({name: np.full_like(array, np.nan) for name, array in model.export().items()})
        return {}

    monkeypatch.setattr(MeansAsHead, "refine", diverge)
    with pytest.raises(RunError, match=r"usable model: what the server computed has numbers that are not finite"):
        run(tiny | {"method": NAME})


@pytest.mark.parametrize("command", ["run", "bench"])
def test_keys_that_flower_would_refuse_are_named(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variants = [{"label": "pulled", "method": NAME, "pulled-pull": 0.5}]
    suite = {"title": "Pulled", "output-dir": str(tmp_path / "out"), "seeds": [0], "variants": variants}
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(suite))
    words = {"run": [f"method={NAME}", "pulled-pull=0.5"], "bench": [str(tmp_path / "suite.yaml"), "--flower"]}
    assert main([command, *words[command]]) == 2
    said = capsys.readouterr().err
    assert "write pulled-pull with a default into [tool.flwr.app.config] of" in said
    assert "add --in-process" in said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": ("shard",)}, "prompt 'shard' of its row does not exist"),
        ({"defaults": {"learning-rte": 1.0}}, "'pulled' has a default of 'learning-rte', which is no run key"),
    ],
)
def test_a_row_with_a_mistake_is_refused(change: dict, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tests.strategies.outside_method, "ROW", replace(ROW, **change))
    with pytest.raises(ConfigError, match=message):
        parse({"method": NAME})


def test_its_keys_are_checked_as_all_others() -> None:
    assert parse_text({"method": NAME, "pulled-pull": "2"}) == {"method": NAME, "pulled-pull": 2.0}
    config = parse({"method": NAME, "pulled-pull": 2.0})
    assert parse(config.flat()) == config
    with pytest.raises(ConfigError, match="pulled-pull = -1"):
        parse({"method": NAME, "pulled-pull": -1})
    with pytest.raises(ConfigError, match=r"pulled-pull = 2.0 would be ignored.*'pulled'"):
        parse({"method": "hgp", "pulled-pull": 2.0})


def test_a_suite_reads_its_keys_as_all_others(tmp_path: Path) -> None:
    """YAML takes 1e-3 for text."""
    variant = f"{{label: a, method: '{NAME}', pulled-pull: 1e-3}}"
    path = tmp_path / "suite.yaml"
    path.write_text(f"title: Pulled\noutput-dir: {tmp_path}\nseeds: [0]\nvariants: [{variant}]\n")
    assert read_suite(path, {}).runs[0].config.options.pull == 0.001


@pytest.mark.parametrize(
    "name", ["no_such_module:ROW", "tests.strategies.outside_method:NOTHING", "tests.strategies.outside_method:Pulled"]
)
def test_what_is_no_method_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"method = '{name}'"):
        parse({"method": name})


def test_two_methods_of_one_name_would_share_their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = "tests.strategies.outside_method:TWIN"
    monkeypatch.setattr(tests.strategies.outside_method, "TWIN", replace(ROW, options=Options), raising=False)
    parse({"method": NAME})
    with pytest.raises(ConfigError, match=f"method = '{twin}' must be a Method .* name that is not taken"):
        parse({"method": twin})


@pytest.mark.parametrize("text", ["ROW = (", "raise RuntimeError('no licence')"])
def test_a_module_that_does_not_work_is_named(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unfinished.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="method = 'unfinished:ROW' cannot be imported"):
        parse({"method": "unfinished:ROW"})


@pytest.mark.parametrize(("affects", "method"), [("privacy", "fedavg"), ("local training", "ncm")])
def test_a_key_of_its_own_is_not_looked_for_in_runs_of_other_methods(
    affects: Affects, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass(frozen=True)
    class Labelled(PulledOptions):
        share: float = key(0.5, "any number", affects=affects)

    monkeypatch.setattr(tests.strategies.outside_method, "ROW", replace(ROW, options=Labelled))
    parse({"method": NAME})
    assert ignored_keys(parse({"method": method})) == []


@pytest.mark.parametrize("kind", ["VarianceStatistics", "GaussianStatistics", "CountStatistics"])
def test_statistics_without_sums_of_their_own_are_not_summed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = replace(ROW, statistics=f"task.prototypes.statistics:{kind}", sums=True)
    monkeypatch.setattr(tests.strategies.outside_method, "ROW", row)
    with pytest.raises(ConfigError, match="sends statistics without sums of their own, which do not add up"):
        parse({"method": NAME, "secure-aggregation": "pairwise"})


def test_nor_are_those_that_inherit_the_sums_of_a_scatter() -> None:
    class Wider(ScatterStatistics):
        pass

    assert ScatterStatistics().not_summable(AFCLOptions()) == ""
    assert Wider().not_summable(AFCLOptions()) == "statistics without sums of their own"


@pytest.mark.parametrize("base", [ClientStatistics, MeanStatistics, ScatterStatistics])
def test_statistics_that_do_not_say_how_much_they_release_get_no_noise(
    base: type[ClientStatistics], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epsilon would leave out what they send, or what they send more than their base."""

    class Wider(base):
        carries = needs_features = True

    class Counted(Wider):
        releases = 4

        def unprotected(self, options: Options) -> str:
            return ""

    private: Values = {"method": NAME, "privacy-clip": 1.0, "privacy-noise": 1.0, "privacy-feature-clip": 10.0}
    monkeypatch.setattr(tests.strategies.outside_method, "Wider", Wider, raising=False)
    monkeypatch.setattr(tests.strategies.outside_method, "Counted", Counted, raising=False)
    for name in ("Wider", "Counted"):
        METHODS.pop(NAME, None)
        row = replace(ROW, statistics=f"tests.strategies.outside_method:{name}", options=AFCLOptions)
        monkeypatch.setattr(tests.strategies.outside_method, "ROW", row)
        if name == "Counted":
            assert releases_per_message(parse(private), 1, ends_task=True) == 5
        else:
            with pytest.raises(ConfigError, match="Wider must define how many releases a message has"):
                parse(private)
