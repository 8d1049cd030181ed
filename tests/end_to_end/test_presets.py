"""The presets say what the papers say, mean something to the real configuration, and run."""

import shlex
from pathlib import Path

import numpy as np
import pytest
import timm
import yaml
from flwr.common.config import parse_config_args

from server_app.bench.suite import PlannedRun, read_suite
from server_app.cli import main as cli
from server_app.cli.common import MISTAKE, OK
from server_app.run_keys import read_words
from task.config.parsing import ignored_keys, parse
from task.config.schema import FROM_SCRATCH, Config
from task.data.registry import SOURCES
from task.keys import ConfigError
from task.message import Scalar

ROOT = Path(__file__).parents[2]
PRESETS = {path.stem: path for path in (ROOT / "presets").iterdir()}

# the papers, typed in by hand; "ours" where the paper gives nothing
# fmt: off
PROTOCOLS: dict[str, tuple] = {
    # preset: tasks, rounds, epochs, clients, per round (0 = all), batch, optimiser, step size, L_p, partition
    "hgp-cifar100":         (10,  5,  5, 10,  0,  64, "adam", 1e-3,  8, {"dirichlet_beta": 0.5}),
    "hgp-tiny-imagenet":    (10,  5,  5, 10,  0,  64, "adam", 1e-3,  8, {"dirichlet_beta": 0.5}),
    "pip-cifar100":         (10, 10,  2, 30, 10, 128, "adam", 0.02,  5, {"class_share": 0.6}),
    "pip-tiny-imagenet":    (10, 10,  2, 30, 10, 128, "adam", 0.02,  5, {"class_share": 0.6}),
    "pip-mini-imagenet":    (10, 10,  2, 30, 10, 128, "adam", 0.02,  5, {"class_share": 0.6}),
    "fppl-imagenet-r":      (20, 10,  5, 10,  0, 128, "adam", 1e-3, 20, {"dirichlet_beta": 0.5}),
    "fppl-cub200":          (20, 10,  5, 10,  0, 128, "adam", 1e-3, 20, {"dirichlet_beta": 0.5}),
    "fppl-cifar100":        (10, 40,  5, 10,  0, 128, "adam", 1e-4, 20, {"dirichlet_beta": 0.5}),
    "hepco-cifar100":       (10, 10, 10,  5,  0,  64, "adam", 1e-3, 10, SPLIT := {
        "split_ratio": 0.1, "category_ratio": 0.6, "imbalance_ratio": 1.0}),
    "hepco-imagenet-r":     (10, 10, 10,  5,  0,  64, "adam", 1e-3, 10, SPLIT),
    "hepco-domainnet":      ( 5, 10, 10,  5,  0,  64, "adam", 1e-3, 10, SPLIT),
    "fedprok-cifar10":      ( 5,  5,  5,  3,  0,  64, "sgd",  0.01,  1, {"dirichlet_beta": 0.5}),  # ours but T, R,
    "fedprok-cifar100":     (10, 10,  5,  3,  0,  64, "sgd",  0.01,  1, {"dirichlet_beta": 0.5}),  # clients, partition
    "fedprok-cifar100-async": (5, 10, 5,  3,  0,  64, "sgd",  0.01,  1, {"consensus_rate": 0.5}),
}
OWN: dict[str, dict[str, Scalar]] = {
    "hgp": {"hgp-covariance": "diagonal", "hgp-scale": 3.0, "hgp-samples-per-class": 256, "hgp-epochs": 5,
            "hgp-batch-size": 256, "hgp-learning-rate": 0.01, "hgp-momentum": 0.9, "gradient-clip": 1.0},
    "pip": {"prompt": "dualprompt", "prompt-matching": 0.1, "pip-copies": 5},
    "fppl": {"fppl-tau": 0.2, "fppl-debias-epochs": 5, "fppl-debias-batch-size": 128,
             "fppl-debias-learning-rate": 1e-3, "learning-rate-schedule": "constant"},
    "hepco": {"prompt-pool": 100, "hepco-lambda-kl": 1.0, "hepco-lambda-mse": 0.1, "hepco-generator-steps": 100,
              "hepco-generator-learning-rate": 1e-4, "hepco-batch-size": 64, "hepco-replay-ratio": 0.5,
              "hepco-prompt-steps": 200, "hepco-head-steps": 200, "hepco-distillation-learning-rate": 1e-4},
    "fedprok": {"prompt": "none", "backbone": "resnet18_cifar", "backbone-weights": "random", "fedprok-beta": 0.5,
                "fedprok-features": "first-task", "fedprok-prototypes": "before", "fedprok-fusion": "tasks"},
}
PUBLISHED = {
    ("hgp", "cifar100"), ("hgp", "tiny-imagenet"),
    ("pip", "cifar100"), ("pip", "tiny-imagenet"), ("pip", "mini-imagenet"),
    ("fppl", "imagenet-r"), ("fppl", "cub200"), ("fppl", "cifar100"),
    ("hepco", "cifar100"), ("hepco", "imagenet-r"), ("hepco", "domainnet"),
    ("fedprok", "cifar10"), ("fedprok", "cifar100"),
}
# fmt: on

# of each row of suites/cifar100-full.yaml, what follows the preset of its setting
NO_PROMPT = ("prompt=none", "prompt-length=auto", "prompt-pool=auto", "rounds-per-task=1")
OURS = ("method=fedrda", "local-epochs=2", "batch-size=16", "learning-rate=0.005", "learning-rate-schedule=auto")
ROWS: dict[str, tuple[str, ...]] = {
    "hgp": (),
    "fedavg": ("method=fedavg",),
    "ccvr": ("method=ccvr",),
    "fppl": (),
    "fedavg-fused": ("method=fedavg",),
    "pip-dualprompt": (),
    "pip-l2p": ("prompt=l2p",),
    "pip-dualprompt-0.002": ("learning-rate=0.002",),
    "pip-l2p-0.002": ("prompt=l2p", "learning-rate=0.002"),
    "fedavg-dualprompt": ("method=fedavg", "fedavg-mean=plain"),
    "fedavg-l2p": ("method=fedavg", "fedavg-mean=plain", "prompt=l2p"),
    "hepco": (),
    "fedavg-decomposed-plain": ("method=fedavg",),
    "fedprok": (),
    "fedavg-resnet": ("method=fedavg",),
    "ncm": ("method=ncm", *NO_PROMPT),
    "afcl": ("method=afcl", *NO_PROMPT),
    "fedrda-frozen": ("method=fedrda", *NO_PROMPT),
    "fedrda": (*OURS, *NO_PROMPT[1:], "prompt=lora"),
}
ON_PURPOSE: dict[str, dict[str, Scalar]] = {  # where a row or a backbone of the suite is not its preset's
    "fedavg-decomposed-plain": {"fedavg-mean": "plain"},  # HePCo's own first step; the preset has the paper's baseline
    "deit-ti": {"backbone": "deit_tiny_patch16_224.fb_in1k"},
}
OF_A_RUN = {"data-dir", "output-dir", "run-name", "seed"}  # which no preset fixes


def load(name: str, *words: str) -> Config:
    return parse(read_words([str(PRESETS[name]), *words]))


def comments(name: str) -> list[str]:
    return [line for line in PRESETS[name].read_text().splitlines() if line.startswith("#")]


def test_every_system_has_a_preset_for_each_data_set_it_was_published_on() -> None:
    assert set(PRESETS) == set(PROTOCOLS)
    assert {(load(name).method, load(name).dataset) for name in PRESETS} == PUBLISHED


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_preset_is_the_papers_protocol(name: str) -> None:
    config = load(name)
    assert (
        config.num_tasks,
        config.rounds_per_task,
        config.local_epochs,
        config.num_clients,
        config.clients_per_round,
        config.batch_size,
        config.optimizer,
        config.learning_rate,
        config.prompt_length,
        {name: value for name, value in config.partition_parameters.items() if value},  # 0 is no smallest size
    ) == PROTOCOLS[name]
    assert OWN[config.method].items() <= config.flat().items()
    assert name.startswith(f"{config.method}-{config.dataset}")


def test_totals_are_the_published_ones() -> None:
    """Rounds in all: PIP 100, FPPL 200, and 400 on CIFAR-100; tasks are of equal size in every paper."""
    for name in PRESETS:
        config = load(name)
        totals = {"pip": 100, "fppl": 400 if name == "fppl-cifar100" else 200}
        if config.method in totals:
            assert config.num_tasks * config.rounds_per_task == totals[config.method]
        assert SOURCES[config.dataset].classes % config.num_tasks == 0


@pytest.fixture(scope="module")
def full_suite() -> list[PlannedRun]:
    """The runs of the published protocols on CIFAR-100."""
    return read_suite(ROOT / "suites" / "cifar100-full.yaml", {"data-dir": "/data"}).runs


@pytest.mark.parametrize("row", ROWS)
def test_a_row_of_the_full_suite_is_its_preset(full_suite: list[PlannedRun], row: str) -> None:
    """Key by key, with both backbones and in each setting; the exceptions are real ones."""
    runs = [run for run in full_suite if run.variant == row]
    assert runs
    for run in runs:
        system, backbone = run.partition.split("-", 1)
        preset = load(f"{system}-cifar100", *ROWS[row])
        keys, expected = run.config.flat(), preset.flat()
        unread = OF_A_RUN | set(ignored_keys(preset))  # ncm and afcl read no step size
        apart = {name: value for name, value in keys.items() if value != expected[name] and name not in unread}
        assert keys.keys() == expected.keys()
        assert apart == ON_PURPOSE.get(row, {}) | ON_PURPOSE.get(backbone, {}), run.name


def test_all_rows_of_the_full_suite_are_compared(full_suite: list[PlannedRun]) -> None:
    assert {run.variant for run in full_suite} == set(ROWS)


@pytest.mark.parametrize("name", PRESETS)
def test_backbones_exist_with_weights(name: str) -> None:
    backbone = load(name).backbone
    assert backbone in FROM_SCRATCH or timm.is_model_pretrained(backbone)
    assert backbone.endswith(".dino") == (name == "hgp-tiny-imagenet")
    assert backbone.endswith(".augreg_in21k") == (name == "hgp-cifar100")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_what_it_is_and_fixes_nothing_of_a_machine(name: str) -> None:
    text = " ".join(comments(name))
    assert " et al. 2024" in text
    assert "Published for this file" in text
    assert f"the folder that holds {SOURCES[load(name).dataset].folder}:" in text
    assert not {"seed", "device", "threads", "output-dir", "run-name"} & set(read_words([str(PRESETS[name])]))


@pytest.mark.parametrize("name", [name for name in PRESETS if not name.startswith("hgp")])
def test_what_is_not_the_papers_is_called_ours(name: str) -> None:
    ours = [line for line in comments(name) if line.startswith("# ours")]
    assert len(ours) == 1
    assert ("gradient-clip" in ours[0]) != name.startswith("pip")  # PIP's is its public code's
    assert load(name).gradient_clip == 1.0


@pytest.mark.parametrize("name", PRESETS)
def test_commands_in_its_comments_are_other_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    commands = [shlex.split(line.lstrip("# "), comments=True) for line in comments(name) if "fcil run" in line]
    assert {words[2] for words in commands} == {f"presets/{name}.toml"}
    runs = [parse(read_words(words[2:])) for words in commands]
    assert len({repr(run) for run in [*runs, load(name)]}) == len(runs) + 1


@pytest.mark.parametrize("name", PRESETS)
def test_flower_reads_the_same(name: str) -> None:
    assert parse_config_args([str(PRESETS[name])]) == read_words([str(PRESETS[name])])


@pytest.fixture
def write(tmp_path: Path):
    """Writes a file of settings and returns its path."""

    def settings(text: str) -> str:
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return str(path)

    return settings


def test_what_follows_a_file_wins_over_it(write) -> None:
    path = write('method = "fedavg"\nseed = 3\ndirichlet-beta = 1\n')
    assert read_words([path, "seed=4", "run-name=x.toml"]) == {
        "method": "fedavg",
        "seed": 4,
        "dirichlet-beta": 1.0,
        "run-name": "x.toml",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("method = hgp", r"mine\.toml: .*line 1"),
        ("seed = 1\nseed = 2", r"mine\.toml: Cannot overwrite a value"),
        ("[hgp]\nscale = 3.0", r"mine\.toml: 'hgp' is a table, but run keys are flat"),
        ("hgp.scale = 3.0", r"mine\.toml: 'hgp' is a table"),
        ('metod = "hgp"', r"mine\.toml: run key 'metod' does not exist. Did you mean 'method'"),
        ('seed = "1"', r"mine\.toml: seed = '1' is not possible: it must be a whole number"),
        ("seed = [1, 2]", r"mine\.toml: seed = \[1, 2\] is not possible"),
    ],
)
def test_files_that_are_no_settings(write, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_words([write(text)])


def test_files_that_cannot_be_read(tmp_path: Path, write) -> None:
    with pytest.raises(ConfigError, match=r"gone\.toml cannot be read: No such file"):
        read_words([str(tmp_path / "gone.toml")])
    with pytest.raises(ConfigError, match=r"mine\.toml' must come first"):
        read_words(["seed=1", write("seed = 2")])
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"bytes\.toml: .*utf-8"):
        read_words([str(tmp_path / "bytes.toml")])


def test_a_missing_file_ends_the_command_with_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "presets/hgp-cifar1000.toml", "seed=1"]) == MISTAKE
    assert capsys.readouterr().err == "fcil: presets/hgp-cifar1000.toml cannot be read: No such file or directory.\n"


def test_a_preset_runs_with_what_follows_it(tmp_path: Path) -> None:
    labels = np.arange(48) % 4
    images = np.random.default_rng(0).integers(0, 256, (48, 16, 16, 3), np.uint8)
    np.savez(tmp_path / "tiny.npz", images=images, labels=labels)
    small = ["num-tasks=2", "rounds-per-task=1", "local-epochs=1", "num-clients=2", "device=cpu"]
    data = ["dataset=npz", f"data-dir={tmp_path / 'tiny.npz'}", "backbone=vit_glyphs", "image-size=16"]
    place = [f"output-dir={tmp_path}", "run-name=run"]
    preset = str(PRESETS["fppl-cifar100"])
    assert cli.main(["run", preset, "--in-process", *data, *small, *place]) == OK
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    preset = {"method": "fppl", "prompt": "fused", "learning-rate": 1e-4, "batch-size": 128, "partition": "dirichlet"}
    followed = {"dataset": "npz", "num-tasks": 2, "rounds-per-task": 1, "num-clients": 2, "backbone": "vit_glyphs"}
    assert (preset | followed).items() <= written.items()
    assert written["used"] == {"device": "cpu", "image-size": 16, "augmentation": "crop-flip"}
