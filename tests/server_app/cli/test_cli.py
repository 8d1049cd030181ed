"""The fcil command: what it is told, what it shows, how it ends."""

import argparse
import errno
import json
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import client_app.client
from server_app.cli import main as cli
from server_app.cli import run as run_command
from server_app.cli.progress import Progress
from server_app.simulation import superlink as launcher
from server_app.simulation.processes import Interrupted
from server_app.transport import base
from task.config.parsing import parse
from task.message import Packet
from tests.helpers.runs import results_of, settings

ROOT = Path(__file__).parents[3]


def boom(*_: object) -> Packet:
    raise ZeroDivisionError("boom")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "metod=hgp"], "Did you mean 'method'? fcil run --help lists all. Its value was 'hgp'."),
        (["export", "runs/any", "nowhere/model.safetensors"], "make the folder nowhere first"),
        (["run", "METHOD=hgp"], "Did you mean 'method'"),
        (["run", "method=HGP"], "Did you mean 'hgp'"),
        (["run", "seed=x"], "seed = 'x'"),
        (["run", "datasets"], "write dataset=... instead"),
        (["run", "clients-per-round=11"], "more than num-clients = 10"),
        (["run", "--in-process", "seed=1", "quorum=0"], "quorum = 0"),
        (["run", "dataset=own", "evaluate=clients", "data-dir=nowhere"], "data-dir = 'nowhere': there is no such file"),
        (["run", "dataset=cifar100", "data-dir=nowhere", "backbone=vit_base_patch16_224"], "Get it from https://"),
        (["run", "backbone=vit_base_patch16_224", "backbone-weights=away.pt"], "backbone-weights = 'away.pt'"),
    ],
)
def test_mistakes_end_at_once_with_one_message(capsys, words, message):
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fcil: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "words", [[], ["run", "--workers=0"], ["run", "--bogus"], ["run", "--in-proces"], ["report"], ["report", "x", "-y"]]
)
def test_command_lines_without_a_meaning(words):
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2


@pytest.mark.parametrize(("command", "missing"), [("bench", "SUITE.yaml"), ("problem", "OUT")])
def test_run_keys_are_not_called_required(command, missing, capsys):
    with pytest.raises(SystemExit):
        cli.main([command])
    assert capsys.readouterr().err.endswith(f"the following arguments are required: {missing}\n")


def test_settings_may_stand_on_both_sides_of_an_option(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    seen = []
    monkeypatch.setattr(run_command, "_run_here", lambda values, progress: seen.append(values) or 1)
    cli.main(
        ["run", "seed=3", "--in-process", f"output-dir={tmp_path}", "data-dir=data", "dataset=folder", "run-name=r"]
    )
    assert seen == [
        {
            "seed": 3,
            "output-dir": str(tmp_path),
            "data-dir": str(tmp_path / "data"),
            "dataset": "folder",
            "run-name": "r",
            "num-clients": 10,
        }
    ]
    assert capsys.readouterr().out == f"results go to {tmp_path / 'r'}\n"


@pytest.mark.pictures
def test_run_in_process_shows_progress_and_results(tmp_path, capsys):
    words = [f"{key}={value}" for key, value in settings(tmp_path, "shown").items()]
    assert cli.main(["run", "--in-process", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"task 1/2, round 1/1  2 clients  loss \d\.\d+  accuracy on all seen classes \d+\.\d%  "
        r"\d:\d\d, about \d:\d\d left",
        lines[1],
    )
    assert re.fullmatch(r"final average accuracy \d+\.\d%, forgetting -?\d+\.\d%", lines[3])
    shown = [tmp_path / "shown" / n for n in ("results.json", "accuracy.png", "forgetting.png", "report.html")]
    assert [Path(line) for line in lines[4:]] == shown
    assert all(path.exists() for path in shown)
    assert cli.main(["run", "--in-process", *words]) == 2
    assert "taken" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path / "shown")]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert set(shown[1:]) < set(written)
    assert all(path.exists() for path in written)
    assert cli.main(["report", str(tmp_path / "nothing")]) == 1


def test_a_run_that_fails_in_process(tmp_path, capsys, monkeypatch):
    words = [f"{key}={value}" for key, value in settings(tmp_path, "bad").items()]
    assert cli.main(["run", "--in-process", *words, "dataset=npz", f"data-dir={tmp_path}/none.npz"]) == 2
    monkeypatch.setattr(client_app.client, "_hello", boom)
    monkeypatch.setitem(client_app.client._HANDLERS, "hello", boom)
    assert cli.main(["run", "--in-process", *words]) == 1
    assert "fcil: the run failed: " in capsys.readouterr().err


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_ends_a_command_in_one_line(capsys, monkeypatch):
    monkeypatch.setattr("server_app.doctor.machine.examine", lambda config: signal.raise_signal(signal.SIGINT))
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "fcil: stopped\n"


def test_a_signal_while_the_last_pictures_are_drawn_advises_no_resume(tmp_path, capsys, monkeypatch):
    def stop(self):
        raise Interrupted(signal.SIGTERM)

    monkeypatch.setattr("server_app.rounds.run.Run.draw", stop)
    words = ["run", "--in-process", "method=ncm", "num-clients=2", "run-name=r", f"output-dir={tmp_path}"]
    assert cli.main(words) == 143
    said = f"fcil: stopped after the run had finished; its pictures are drawn by: fcil report {tmp_path / 'r'}"
    assert capsys.readouterr().err.splitlines()[-1] == said


def test_progress_shows_what_the_run_warns_of(tmp_path, capsys):
    progress = Progress(tmp_path)
    progress.log = tmp_path / "flower.log"
    yellow = "\x1b[93mWARNING \x1b[0m:   "
    progress.log.write_text(
        f"{yellow}default simulated SuperNodes\nINFO :      results go to /runs/a\n{yellow}no image of b\n"
    )
    progress.show()
    with open(progress.log, "a") as file:
        file.write(f"\x1b[36m(ClientAppActor pid=5)\x1b[0m {yellow}terminating\nWARNING :   c is damaged\n")
    progress.show()
    progress.show()
    assert capsys.readouterr().out.splitlines() == ["warning: no image of b", "warning: c is damaged"]


def test_a_run_in_process_marks_warnings_as_one_through_flower_does(tmp_path, capsys):
    with Progress(tmp_path).in_background():
        logging.getLogger("task.anything").warning("no image of %s", "b")
        logging.getLogger("task.anything").info("a detail")
        logging.getLogger(base.__name__).info("answers of 0 of 2 clients")
    logging.getLogger("task.anything").warning("after the run")
    logging.getLogger(base.__name__).info("answers of 1 of 2 clients")
    assert capsys.readouterr() == ("answers of 0 of 2 clients\n", "warning: no image of b\n")


def test_too_many_tasks_are_refused_before_flower_starts(tmp_path, capsys, monkeypatch):
    told = []
    monkeypatch.setattr(run_command, "FlowerRun", None)
    monkeypatch.setattr(run_command, "tell_operator", lambda hook, directory, error: told.append(str(error)))
    assert cli.main(["run", "dataset=synthetic", "num-tasks=13", f"output-dir={tmp_path}"]) == 2
    assert [reason.partition(":")[0] for reason in told] == ["num-tasks = 13"]
    assert capsys.readouterr().err.split(":")[:2] == ["fcil", " num-tasks = 13"]


@pytest.mark.parametrize(("silence", "said"), [(0.0, [1, 2]), (1e9, [])])
def test_a_round_that_goes_on_says_how_many_have_answered(silence, said, tmp_path, capsys, monkeypatch, caplog):
    monkeypatch.setattr(base, "SILENCE", silence)
    lines = [f"answers of {number} of 3 clients" for number in said]
    replies = [base.Reply(node, Packet(), "", 0, 0) for node in range(3)]
    with Progress(tmp_path).in_background():
        assert list(base.count_answers(iter(replies), 3)) == replies
    assert capsys.readouterr().out.splitlines() == lines
    log = "".join(f"INFO :      {line}\n" for line in ["results go to /runs/a", *caplog.messages])
    (tmp_path / "flower.log").write_text(log)
    progress = Progress(tmp_path)
    progress.follow(tmp_path / "flower.log")
    progress.show()
    assert capsys.readouterr().out.splitlines() == lines


def test_progress_names_failures_and_ignores_half_a_line(tmp_path, capsys):
    line = {
        "task": 2,
        "round": 1,
        "num_tasks": 2,
        "rounds_per_task": 2,
        "total_rounds": 4,
        "participants": ["a", "b", "c"],
        "idle": ["c"],
        "failures": [{"name": "a", "reason": "gone"}, {"name": "a", "reason": "evaluation: gone"}],
        "train_loss": None,
        "seen_accuracy": None,
        "elapsed": 3700.0,
    }
    (tmp_path / "rounds.jsonl").write_text(json.dumps(line) + "\n")
    progress = Progress(tmp_path)
    with open(tmp_path / "rounds.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n" + json.dumps(line)[:20])
    progress.show()
    progress.show()
    assert capsys.readouterr().out.splitlines() == [
        "task 2/2, round 1/2  3 clients, 1 idle, 1 failed  1:01:40, about 1:01:40 left",
        "    a: gone",
        "    a: evaluation: gone",
    ]
    with open(tmp_path / "rounds.jsonl", "a") as file:
        file.write("\n" + json.dumps(line) + "\n")  # after half a line that a crash has left
    progress.show()
    assert [line.split(",")[0] for line in capsys.readouterr().out.splitlines()][:2] == ["task 2/2", "    a: gone"]
    with open(tmp_path / "rounds.jsonl", "ab") as file:
        file.write(b"\xff\xfe\x00\n")  # what a damaged disk has left
    progress.show()
    assert capsys.readouterr().out == ""
    (tmp_path / "rounds.jsonl").write_text("")  # resumed before the first round
    progress.show()
    (tmp_path / "rounds.jsonl").write_text(json.dumps(line | {"failures": [], "idle": [], "elapsed": 60.0}) + "\n")
    progress.show()
    assert capsys.readouterr().out.splitlines() == ["task 2/2, round 1/2  3 clients  1:00, about 3:00 left"]


def test_without_flower_the_message_names_the_way_out(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(launcher.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["run", f"output-dir={tmp_path}"]) == 1
    assert "--in-process" in capsys.readouterr().err


@pytest.mark.parametrize("transport", [[], ["--in-process"]])
def test_what_cannot_work_is_said_before_anything_starts(transport, tmp_path, capsys, monkeypatch):
    for name in ("_run_with_flower", "_run_here"):
        monkeypatch.setattr(run_command, name, boom)
    (tmp_path / "file").write_text("")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("method: hgp\nbackbone-sha256: '0'\ndata-sha256: '0'\n")
    cases = {
        f"output-dir={tmp_path}/file": f"output-dir = '{tmp_path}/file' cannot be used: '{tmp_path}/file' is a file",
        f"output-dir={tmp_path}/file/runs": f"'{tmp_path}/file' is a file, not a folder",
        f"resume={tmp_path}/run": f"{tmp_path}/run/checkpoint holds no whole checkpoint",
        "image-size=1000000": "image-size = 1000000 is not possible: it must be a whole number",
        "prompt-length=10000": "prompt-length = 10000 is not possible",
        "num-clients=1000000000": "num-clients = 1000000000 is not possible",
    }
    for word, message in cases.items():
        assert cli.main(["run", *transport, word]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert message in err
    monkeypatch.setattr("os.access", lambda *_: False)
    assert cli.main(["run", *transport, f"output-dir={tmp_path}"]) == 2
    assert f"'{tmp_path}' may not be written" in capsys.readouterr().err


def test_a_full_disk_is_one_line_with_the_path(tmp_path, capsys, monkeypatch):
    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    words = [f"{key}={value}" for key, value in settings(tmp_path, "full").items()]
    assert cli.main(["run", "--in-process", *words]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"fcil: the run failed: the disk is full, {tmp_path / 'full'}/")
    assert err.count("\n") == 1
    assert "resume" in err


@pytest.mark.pictures
def test_a_disk_that_is_full_for_one_file_is_one_line_too(tmp_path, capsys, caplog, monkeypatch):
    """The model does not fit any more, and the pictures do not; results.json, which is small, says why."""
    replace = os.replace

    def full(source: Path, target: Path) -> None:
        if Path(target).suffix in (".safetensors", ".png"):
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr("os.replace", full)
    words = [f"{key}={value}" for key, value in settings(tmp_path, "full").items()]
    assert cli.main(["run", "--in-process", *words]) == 1
    reason = f"the disk is full, {tmp_path / 'full' / 'model.safetensors'} could not be written"
    warning, error = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: no report, [Errno 28]")
    assert error.startswith(f"fcil: the run failed: {reason}")
    assert results_of(tmp_path / "full")["error"].startswith(reason)
    assert [(record.exc_info, "no report" in record.message) for record in caplog.records[-1:]] == [(None, True)]


def test_a_log_that_cannot_be_kept_does_not_hide_the_reason(tmp_path, capsys, monkeypatch):
    """The disk is full: Flower says why the run failed, and neither log nor results.json can be written."""

    class Failed:
        log = tmp_path / "log"

        def __init__(self, *_: object) -> None: ...
        def __enter__(self):
            return self

        def __exit__(self, *_: object) -> None: ...
        def submit(self, *_: object) -> None: ...
        def is_running(self) -> bool:
            return False

        def status(self) -> tuple[str, str]:
            return "finished:failed", "Simulation failed with exception: no room"

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "results.json").write_text('{"status": "running"}')
    monkeypatch.setattr(run_command, "FlowerRun", Failed)
    monkeypatch.setattr("shutil.copy", full)
    monkeypatch.setattr("os.fsync", full)
    args, progress = argparse.Namespace(workers=1), Progress(tmp_path / "run")
    assert run_command._run_with_flower({"num-clients": 2}, progress, parse({}), args, "") == 1
    err = capsys.readouterr().err
    assert "flower.log cannot be written: No space left" in err
    assert err.endswith("fcil: the run failed: no room\n")


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["bench", "suites/digits.yaml", "sede=1"]])
def test_help_and_refusals_load_nothing_heavy(words):
    heavy = {"torch", "timm", "flwr", "ray", "matplotlib", "jinja2", "psutil"}
    script = (
        "import sys; from server_app.cli.main import main\n"
        f"try: main({words})\n"
        "except SystemExit: pass\n"
        f"print('loaded:', {heavy} & sys.modules.keys())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.stdout.endswith("loaded: set()\n")


@pytest.mark.ci
def test_in_process_runs_need_no_flower(tmp_path):
    words = ["run", "--in-process", *(f"{key}={value}" for key, value in settings(tmp_path, "bare").items())]
    script = "import sys; sys.modules |= dict(flwr=None, ray=None); from server_app.cli.main import main; "
    script += f"sys.exit(main({words}))"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0


@pytest.mark.ci
def test_commands_start_where_there_is_no_fcntl():
    """As on Windows, which has no SIGHUP either."""
    script = "import signal, sys; sys.modules |= dict(fcntl=None, resource=None); del signal.SIGHUP\n"
    script += "import server_app.doctor.dry_run; from server_app.cli.main import main; main(['run', '--help'])"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "KEY=VALUE" in done.stdout


def test_nobody_complains_where_the_reader_has_gone() -> None:
    """As behind "| head -1": the pipe is closed while the command still prints."""
    command = [sys.executable, "-m", "server_app.cli", "cache"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, check=False, text=True)
    os.close(writer)
    assert done.stderr == ""
