"""The README's commands, run as they are written but on smaller data, and its claims that can be checked."""

import os
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import timm
from flwr.common.config import parse_config_args
from PIL import Image

from server_app.bench.suite import read_suite
from server_app.cli import main as cli
from server_app.run_keys import read_words
from task.config.parsing import parse
from task.methods import METHODS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
COMMANDS = [shlex.split(line, comments=True) for block in BLOCKS for line in block.splitlines() if line.strip()]
FCIL = [words[1:] for words in COMMANDS if words[0].endswith("fcil")]
SMALL = ["rounds-per-task=1", "local-epochs=1", "num-clients=2", "image-size=32", "num-tasks=2", "device=cpu"]


def make_data(folder: Path) -> dict[str, str]:
    """What stands behind the README's example paths."""
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


def test_fcil_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FCIL_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    places = make_data(tmp_path / "data")
    runs = [words for words in FCIL if words[0] == "run" and "--help" not in words and not words[1].endswith(".toml")]
    assert len(runs) >= 4
    for words in runs:
        given = [re.sub(r"/data/[\w.]+", lambda m: places[m[0]], w) for w in words[1:] if w != "--in-process"]
        if "backbone=" in " ".join(given) and "backbone-weights=" not in " ".join(given):
            given.append("backbone-weights=random")  # in place of timm's hub
        keys = {word.split("=")[0]: word for word in [*given, *SMALL]}  # a key may be given once only
        assert cli.main(["run", "--in-process", *keys.values()]) == 0, words


def test_reports_and_help_work_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fcil report runs/hgp-* runs/fedavg-* --output runs/compared` in the folder that holds runs/."""
    monkeypatch.setenv("FCIL_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for method in ("hgp", "fedavg"):
        assert cli.main(["run", "--in-process", f"method={method}", *SMALL]) == 0
    report = next(words for words in FCIL if words[0] == "report" and "--output" in words)
    expanded = [str(p) for w in report for p in (sorted(Path().glob(w)) if "*" in w else [w])]
    assert len(expanded) == len(report)
    assert cli.main(expanded) == 0
    assert (tmp_path / "runs" / "compared" / "accuracy.png").exists()
    assert ["run", "--help"] in FCIL
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "--help"])
    assert ended.value.code == 0


def test_the_model_is_used_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("FCIL_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "--in-process", "dataset=synthetic", "run-name=pets", *SMALL]) == 0
    for name in ("cat.jpg", "dog.jpg"):
        Image.new("RGB", (50, 40), "red").save(name)
    for words in FCIL:
        if words[0] in ("predict", "export", "privacy"):
            assert cli.main([*words, *(["--steps", "2"] if words[0] == "privacy" else [])]) == 0, words
    assert (tmp_path / "runs" / "pets" / "privacy.png").exists()
    assert (tmp_path / "pets.onnx").exists()
    (python,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    capsys.readouterr()
    exec(python, {})
    assert capsys.readouterr().out.count("pattern") == 2 + 2 * 3


def test_the_doctor_is_asked_as_written(tmp_path: Path) -> None:
    places = make_data(tmp_path / "data")
    asked = [words for words in FCIL if words[0] == "doctor"]
    assert len(asked) == 2
    for words in asked:
        given = [re.sub(r"/data/[\w.]+", lambda m: places[m[0]], w) for w in words]
        assert cli.main([*given, "image-size=16", "device=cpu"]) == 0


def test_suites_are_valid() -> None:
    suites = [words for words in FCIL if words[0] == "bench"]
    assert suites
    for _, path, *words in suites:
        assert read_suite(ROOT / path, read_words([word for word in words if "=" in word])).runs


def test_presets_are_valid_and_all_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    given = [words[1:] for words in FCIL if words[0] == "run" and words[1].endswith(".toml")]
    assert [parse(read_words(words)).data_dir for words in given] == ["/data/published"]
    section = README.split("\n### The papers' protocols\n")[1].split("\n### ")[0]
    rows = re.findall(r"^\| \w+ \| (.*?) \| (\d+), (\w+) \| (.*?) \|$", section, re.MULTILINE)
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
    flower = [words for words in COMMANDS if words[0] == "flwr"]
    assert flower
    assert not any(words[0].endswith("/flwr") for words in COMMANDS)  # it looks for its other programs on the PATH
    assert README.index("source .venv/bin/activate") < README.index("flwr run")
    for words in flower:
        assert [w for w in words[1:] if w != "fcil"][:3] == ["run", ".", "--stream"]  # fcil: a connection of one's own
        settings = [words[i + 1] for i, w in enumerate(words) if w == "--run-config"]
        parse(parse_config_args(settings))


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for words in COMMANDS:
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE)
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_table_of_methods_is_the_codes() -> None:
    section = README.split("\n## Methods\n")[1].split("\n## ")[0]
    rows = {m[0]: m[1] for m in re.findall(r"^\| `([\w-]+)` \| ([^|]+) \|", section, re.MULTILINE)}
    assert {name: {p.strip() for p in prompts.split(",")} for name, prompts in rows.items()} == {
        row.name: set(row.prompts) for row in METHODS.values()
    }


def test_the_methods_that_run_asynchronously_are_the_codes() -> None:
    (named,) = re.findall(r"one of the methods ([\w, -]+)\.", README)
    assert set(named.split(", ")) == {row.name for row in METHODS.values() if row.asynchronous}


def test_files_that_the_readme_names_exist() -> None:
    named = set(re.findall(r"(?:task|client_app|strategies|server_app|benchmarks|tests|docs)/[\w/.]+\.\w+", README))
    assert len(named) > 10
    assert not [name for name in named if not (ROOT / name).exists()]
