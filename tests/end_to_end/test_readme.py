"""The documentation's commands, run as they are written but on smaller data, and its claims that can be checked."""

import json
import os
import re
import shutil
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import timm
import yaml
from flwr.common.config import parse_config_args
from PIL import Image

from server_app.bench.suite import read_suite
from server_app.cli import main as cli
from server_app.cli.main import _parser
from server_app.run_keys import read_words
from task.config.parsing import parse
from task.config.schema import known_keys
from task.data.load import load_dataset
from task.data.registry import SOURCES
from task.methods import METHODS
from tests.helpers.documents import PAGES, ROOT, blocks, commands, prose, section
from tests.helpers.marks import rest_in_ci
from tests.helpers.proxy import make_keys

ALL = [(page, words) for page in PAGES for words in commands(page)]
FCIL = [(page, words[1:]) for page, words in ALL if words[0].endswith("fcil")]
# what a method's page starts is only checked: every method is run by test_invariants.py
WALKED = sorted({page for page, _ in FCIL if not page.startswith("docs/methods/")})
FIRST = ("README.md",)  # what newcomers type first; the others take minutes
SMALL = [
    "threads=1",
    "rounds-per-task=1",
    "local-epochs=1",
    "num-clients=2",
    "image-size=32",
    "num-tasks=2",
    "device=cpu",
]
KNOWN = {
    *("fcil", "flwr", "make", "python", "python3", "pip", "source", "export", "cd", "mkdir", "docker", "echo", "caddy"),
    *("flower-superlink", "flower-superexec", "flower-supernode"),
    *("openssl", "ssh-keygen", "umask", "chmod", "sed", "install", "cp", "systemctl", "systemd-sysusers", "sqlite3"),
    *("ray", "git"),
    "--node-config",  # the last line of a longer command
}


def make_data(folder: Path) -> dict[str, str]:
    """What stands behind the example paths."""
    rng = np.random.default_rng(0)
    for c in range(4):
        (folder / "pets" / f"breed{c}").mkdir(parents=True)
        for i in range(6):
            Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)).save(
                folder / "pets" / f"breed{c}" / f"{i}.png"
            )
    np.savez(folder / "scans.npz", images=rng.integers(0, 256, (24, 32, 32, 3), np.uint8), labels=np.arange(24) % 4)
    for node in ("north", "south"):
        shutil.copytree(folder / "pets", folder / "nodes" / node)
    weights = timm.create_model("vit_small_patch16_224", num_classes=0).state_dict()
    safetensors.torch.save_file(weights, folder / "vit.safetensors")
    return {f"/data/{name}": str(folder / name) for name in ("pets", "nodes", "scans.npz", "vit.safetensors")}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder with what the pages take for given: data, pictures and two runs; and where the example paths are."""
    folder = tmp_path_factory.mktemp("prepared")
    places = make_data(folder / "data")
    for name in ("cat.jpg", "dog.jpg"):
        Image.new("RGB", (50, 40), "red").save(folder / name)
    for given in (["dataset=synthetic", "run-name=pets"], ["run-name=hgp-digits"]):
        assert cli.main(["run", "--in-process", f"output-dir={folder / 'runs'}", *given, *SMALL]) == 0
    return folder, places


@pytest.fixture
def workplace(
    prepared: tuple[Path, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, dict[str, str]]:
    """The same for one test, which works in a folder of its own with the project's files in it."""
    folder, places = prepared
    for name in ("cat.jpg", "dog.jpg"):
        shutil.copy(folder / name, tmp_path)
    shutil.copytree(folder / "runs", tmp_path / "runs")
    make_keys.main([str(tmp_path / "keys")])
    for name in ("docs", "presets", "suites"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.setenv("FCIL_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path, places


@pytest.mark.parametrize("page", rest_in_ci(WALKED, FIRST))
def test_commands_of_a_page_work_as_written(
    page: str,
    workplace: tuple[Path, dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    folder, places = workplace
    modules = dict(re.findall(r"^```python\n# ([\w.]+\.py)\n(.*?)^```$", PAGES[page], re.MULTILINE | re.DOTALL))
    for name, text in modules.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    for name in modules:
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    before = dict(METHODS)
    try:
        for name in modules:
            import_module(name.removesuffix(".py"))
        for words in (words for own, words in FCIL if own == page):
            given = [re.sub(r"/data/[\w.]+", lambda m: places.get(m[0], m[0]), w) for w in words]
            _walk(given)
    finally:
        METHODS.clear()
        METHODS.update(before)
    for text in blocks(page, "python"):
        if not text.startswith("# "):
            capsys.readouterr()
            exec(text, {})
            assert capsys.readouterr().out


def _walk(words: list[str]) -> None:
    """One ``fcil`` command, made small; suites and presets are read and not run."""
    command = words[0]
    if "--help" in words:
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        assert ended.value.code == 0
    elif command == "bench":
        settings = [word for word in words[2:] if "=" in word]
        assert read_suite(ROOT / words[1], read_words(settings)).runs
    elif command == "run" and words[1].endswith(".toml"):
        assert parse(read_words(words[1:])).data_dir == "/data/published"
    elif "--gpus-per-client" in words:  # without a Ray cluster
        settings = [word for word in words[1:] if "=" in word]
        assert parse(read_words(settings)).device == "cuda"
        assert 0 < float(words[words.index("--gpus-per-client") + 1]) < 1
    elif command == "run":
        given = [word for word in words[1:] if word != "--in-process"]
        if "backbone=" in " ".join(given) and "backbone-weights=" not in " ".join(given):
            given.append("backbone-weights=random")  # in place of timm's hub
        keys = {word.split("=")[0]: word for word in [*given, *SMALL]}  # a key may be given once only
        assert cli.main(["run", "--in-process", *keys.values()]) == 0, words
    elif command == "doctor":
        assert cli.main([*words, "image-size=16", "device=cpu"]) == 0, words
    elif command == "nodes":  # without a SuperLink
        assert _parser().parse_args(words).superlink == "fcil"
    else:
        base = ROOT if any(word.startswith("benchmarks/") for word in words) else Path()
        expanded = [str(p) for w in words for p in (sorted(base.glob(w)) if "*" in w else [w])]
        assert len(expanded) >= len(words), words
        assert cli.main([*expanded, *(["--steps", "2"] if command == "privacy" else [])]) == 0, words


def test_commands_of_methods_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for page, words in FCIL:
        if page not in WALKED:
            assert words[0] == "run", words
            parse(read_words([word for word in words[1:] if word != "--in-process"]))


def test_every_method_has_a_command_or_a_section() -> None:
    started = {key.partition("=")[2] for page, words in FCIL for key in words if key.startswith("method=")}
    headed = set(re.findall(r"^## ([\w-]+)$", PAGES["docs/methods/baselines.md"], re.MULTILINE))
    assert set(METHODS) <= started | headed


def test_every_command_is_of_a_kind_that_is_checked() -> None:
    for page, words in ALL:
        assert Path(words[0]).name in KNOWN, (page, words)
        if "-m" in words and Path(words[0]).name.startswith("python"):
            assert find_spec(words[words.index("-m") + 1]), (page, words)
        assert not words[0].endswith("/flwr")  # it looks for its other programs on the PATH


def test_commands_in_prose_name_run_keys() -> None:
    keys = known_keys()
    checked = 0
    for page in PAGES:
        for text in re.findall(r"`fcil (?:run|bench|doctor) ([^`]+)`", prose(page)):
            for name in re.findall(r"(?<![\w-])([a-z-]+)=", text):
                assert name in keys, (page, text)
                checked += 1
    assert checked > 5


def test_presets_are_valid_and_all_listed() -> None:
    rows = re.findall(
        r"^\| \w+ \| (.*?) \| (\d+), (\w+) \| (.*?) \|$",
        section("docs/guides/running.md", "The papers' protocols"),
        re.MULTILINE,
    )
    listed = {}
    for names, clients, drawn, lengths in rows:
        for group, length in zip(names.split("; "), lengths.split("; "), strict=True):
            listed |= {name.strip("`"): (int(clients), drawn, length) for name in group.split(", ")}
    assert listed == {path.stem: _protocol(path) for path in (ROOT / "presets").iterdir()}


def _protocol(preset: Path) -> tuple[int, str, str]:
    config = parse(read_words([str(preset)]))
    lengths = f"{config.num_tasks} x {config.rounds_per_task} x {config.local_epochs}"
    return config.num_clients, str(config.clients_per_round or "all"), lengths


def test_flower_commands_give_valid_run_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    runs = [(page, words) for page, words in ALL if words[:2] == ["flwr", "run"]]
    assert len(runs) > 5
    for page, words in runs:
        assert [w for w in words[1:] if w != "fcil"][:3] == ["run", ".", "--stream"]  # fcil: a connection of one's own
        settings = [words[i + 1] for i, w in enumerate(words) if w == "--run-config"]
        if not any("resume=" in given for given in settings):  # whose folder does not exist here
            parse(parse_config_args(settings))
        if "fcil" not in words:
            assert PAGES[page].index("source .venv/bin/activate") < PAGES[page].index("flwr run . --stream")


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for _, words in ALL:
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE)
    assert {"make lint", "make docs", "make test", "make test-ci"} <= set(
        (ROOT / ".ci" / "run").read_text().splitlines()
    )
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_table_of_methods_is_the_codes() -> None:
    rows = {m[0]: m[1] for m in re.findall(r"^\| `([\w-]+)` \| ([^|]+) \|", section("README.md", "Methods"), re.M)}
    assert {name: {p.strip() for p in prompts.split(",")} for name, prompts in rows.items()} == {
        row.name: set(row.prompts) for row in METHODS.values()
    }
    index = PAGES["docs/methods/index.md"].split("\n## ")[0]
    assert set(re.findall(r"^\| `([\w-]+)` \|", index, re.M)) == set(METHODS)


def test_the_table_of_data_sets_is_the_codes() -> None:
    rows = re.findall(
        r"^\| `([\w-]+)` \| [^|]+ \| (.*?) \| (.*?) \| (.*?) \|$", section("README.md", "Data sets"), re.M
    )
    assert {name for name, *_ in rows} == set(known_keys()["dataset"].rule.choices)
    for name, *cells in rows:
        numbers = [int(n) for cell in cells for n in re.findall(r"\d+", cell.replace(",", ""))]
        source = SOURCES.get(name)
        if name in ("digits", "synthetic"):
            dataset = load_dataset(name, "", 0, 0.0, 0)
            assert numbers == [len(dataset.class_names), len(dataset.train_labels), len(dataset.test_labels)]
        elif source and source.classes:
            assert (numbers[0], sum(numbers[1:])) == (source.classes, source.train + source.test), name
        else:
            assert set(cells) == {"any"}, name


def test_the_methods_that_run_asynchronously_are_the_codes() -> None:
    text = " ".join(PAGES["docs/guides/partitions.md"].split())
    (named,) = re.findall(r"one of the methods ([\w, -]+)\.", text)
    assert set(named.split(", ")) == {row.name for row in METHODS.values() if row.asynchronous}


def test_the_methods_that_secure_aggregation_cannot_serve_are_the_codes() -> None:
    (names,) = re.findall(
        r"^\| (.*) \| their servers need each client's", PAGES["docs/guides/privacy.md"], re.MULTILINE
    )
    assert set(re.findall(r"`([\w-]+)`", names)) == {row.name for row in METHODS.values() if not row.sums}


def test_the_suites_of_the_guide_are_valid(tmp_path: Path) -> None:
    whole, narrowed, select, others = blocks("docs/guides/suites.md", "yaml")
    (result,) = blocks("docs/guides/suites.md", "json")
    (tmp_path / "suite.yaml").write_text(whole)
    assert len(read_suite(tmp_path / "suite.yaml", {}).runs) == 12
    (tmp_path / "theirs" / "more").mkdir(parents=True)
    for seed, name in enumerate(("hgp-seed0.json", "more/x.json")):
        (tmp_path / "theirs" / name).write_text(json.dumps(json.loads(result) | {"seed": seed}))
    entries = [yaml.safe_load(text) for text in (whole, narrowed, select, others)]
    (tmp_path / "all.yaml").write_text(yaml.safe_dump({name: v for part in entries for name, v in part.items()}))
    suite = read_suite(tmp_path / "all.yaml", {"num-tasks": 2})
    assert suite.selection
    # hgp has three seeds in uneven and one in very-uneven, fedavg-ft has one
    assert (len(suite.runs), len(suite.selection.suite.runs), len(suite.others)) == (5, 8, 2)


def test_run_keys_of_the_guides_exist() -> None:
    """Whatever a page writes as `key=value`."""
    allowed = {*known_keys(), "name", "state-dir", "partition-id", "num-partitions"}
    for page in PAGES:
        for name in re.findall(r"`([a-z]+(?:-[a-z]+)*)=[^`]*`", prose(page)):
            assert name in allowed or name in ("key", "module"), (page, name)
