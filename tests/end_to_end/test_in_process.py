"""`fcil run --in-process` on a machine that has torch and timm, and nothing else of what the project uses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.bare_python import BLOCK

TINY = ["dataset=synthetic", "image-size=16", "num-tasks=2", "rounds-per-task=1", "local-epochs=1", "num-clients=2"]


def fcil(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCK, "run", *words, f"output-dir={folder}", "run-name=run"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_a_whole_run_without_flower(tmp_path: Path) -> None:
    done = fcil(tmp_path, "--in-process", *TINY)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["status"] == "finished"
    assert "absent" not in results["environment"]["versions"]["torch"]
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert "need matplotlib and jinja2: pip install" in done.stderr


@pytest.mark.ci
def test_a_run_goes_on_where_nobody_reads_its_progress(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "server_app.cli", "run", "--in-process", *TINY, f"output-dir={tmp_path}"]
    with subprocess.Popen([*command, "run-name=run"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout
        assert run.stderr
        assert run.stdout.readline().startswith(b"results go to")
        run.stdout.close()
        said = run.stderr.read().decode()
    assert "Traceback" not in said
    assert "Broken pipe" not in said
    assert run.returncode == 0
    assert json.loads((tmp_path / "run" / "results.json").read_text())["status"] == "finished"


def test_without_flower_the_simulation_says_what_to_do(tmp_path: Path) -> None:
    done = fcil(tmp_path, *TINY)
    assert done.returncode != 0
    assert "--in-process" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_mistyped_key_ends_with_one_line(tmp_path: Path) -> None:
    done = fcil(tmp_path, "--in-process", "dirichlet-bet=1")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "'dirichlet-beta'" in done.stderr
    assert not (tmp_path / "run").exists()
