"""The run key on-end: the operator hears how a run ended, and nothing that goes wrong with that touches the run."""

import http.server
import json
import logging
import re
import shlex
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from server_app.errors import RunError, reason_of
from server_app.rounds.report_drawer import ReportDrawer
from server_app.rounds.run import Run
from server_app.run_files import on_end
from server_app.run_files.on_end import SUPERVISED, require_hook, tell_operator
from server_app.simulation.processes import Interrupted
from server_app.simulation.superlink import _environment
from task.config.parsing import parse
from task.keys import ConfigError
from tests.helpers.runs import Values, results_of, run

SAVE = "import sys; open(sys.argv[1], 'w').write(sys.stdin.read())"


def saves_to(path: Path) -> str:
    """A command that writes what it gets into a file."""
    return shlex.join([sys.executable, "-c", SAVE, str(path)])


def test_a_command_gets_the_end_of_a_run(tiny: Values, tmp_path: Path) -> None:
    run(tiny | {"on-end": saves_to(tmp_path / "event")})
    folder = tmp_path / "runs" / "run"
    expected = {"run": "run", "status": "finished", "error": "", "directory": str(folder)}
    assert json.loads((tmp_path / "event").read_text()) == expected


def test_a_command_gets_the_reason_of_a_failure(tiny: Values, tmp_path: Path) -> None:
    with pytest.raises(RunError):
        run(tiny | {"on-end": saves_to(tmp_path / "event")}, broken=lambda node, kind: kind == "train")
    event, results = json.loads((tmp_path / "event").read_text()), results_of(tmp_path / "runs" / "run")
    assert (event["status"], event["error"]) == ("failed", results["error"])
    assert "the quorum is 1" in event["error"]


@pytest.mark.parametrize("signalled", [SystemExit(1), KeyboardInterrupt()])
def test_a_run_that_flower_ends_says_where_to_look(signalled: BaseException) -> None:
    assert reason_of(signalled).startswith("its process was told to end")
    assert reason_of(Interrupted(15)) == "stopped by SIGTERM"


def test_a_run_that_does_not_come_to_its_first_round_is_reported_too(tiny: Values, tmp_path: Path) -> None:
    with pytest.raises(RunError):
        run(tiny | {"on-end": saves_to(tmp_path / "event")}, broken=lambda node, kind: kind == "hello")
    assert json.loads((tmp_path / "event").read_text())["status"] == "failed"


@pytest.mark.parametrize(
    "hook",
    [
        *("no-such-program --now", "mail 'ops", "ftp://e.org"),
        *("$NO_SUCH_HOOK", "https://", "http://[::1", "http://a b/"),
        *("http://localhost:abc/", "http://localhost:99999/"),
        *("https://$NO_SUCH_HOOK/x", "https://a.example/${NO_SUCH_HOOK}"),
        *("true $NO_SUCH_HOOK", "true --token=$NO_SUCH_HOOK", "$EMPTY_HOOK"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_round(
    hook: str, tiny: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMPTY_HOOK", "")
    with pytest.raises(ConfigError, match=f"^on-end = {re.escape(repr(hook))}"):
        run(tiny | {"on-end": hook})
    assert not (tmp_path / "runs" / "run").exists()


def test_variables_of_a_script_are_its_own() -> None:
    require_hook("sh -c 'for f in *; do echo $f; done'")


def test_fcil_run_tells_in_the_place_of_its_server_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = _environment(tmp_path)
    monkeypatch.setenv(SUPERVISED, environment[SUPERVISED])
    tell_operator(saves_to(tmp_path / "event"), tmp_path)
    assert not (tmp_path / "event").exists()
    require_hook("./a-command-in-the-folder-of-fcil-run")


@pytest.mark.parametrize("value", ["mail 'token-123", "http://[token-123"])
def test_a_variable_that_cannot_be_read_is_refused_without_the_secret_in_it(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_HOOK", value)
    with pytest.raises(ConfigError, match=r"^on-end = '\$SECRET_HOOK' cannot work: with its variables") as caught:
        require_hook("$SECRET_HOOK")
    assert "token-123" not in str(caught.value)
    monkeypatch.setenv("SECRET_HOOK", "http://127.0.0.1:9/it's")
    require_hook("$SECRET_HOOK")


def test_a_command_that_is_gone_at_the_end_changes_no_outcome(
    tiny: Values, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command = tmp_path / "tell"
    command.write_text(f"#!{sys.executable}")
    command.chmod(0o700)
    run(tiny | {"on-end": f"{command} --now"}, broken=lambda node, kind: bool(command.unlink(missing_ok=True)))
    assert results_of(tmp_path / "runs" / "run")["status"] == "finished"
    assert f"on-end = '{command} --now' did not work: FileNotFoundError. No such file" in caplog.text


def test_a_url_that_is_none_is_logged_without_the_secret_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SECRET_HOOK", "http://[token-123")
    tell_operator("$SECRET_HOOK", tmp_path)
    assert "on-end = '$SECRET_HOOK' did not work: ValueError" in caplog.text
    assert "token-123" not in caplog.text


def test_a_command_that_hangs_is_killed_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(on_end, "PATIENCE", 1.0)
    began = time.monotonic()
    tell_operator(f"sh -c 'sleep 300 & echo $! > {tmp_path}/pid; wait'", tmp_path)
    assert time.monotonic() - began < 20
    assert "no end within 1 s, so it was killed" in caplog.text
    child = int((tmp_path / "pid").read_text())
    state = Path(f"/proc/{child}/stat")
    deadline = time.monotonic() + 20
    while state.exists() and ") Z " not in state.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_a_command_leaves_running_is_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    began = time.monotonic()
    tell_operator("sh -c 'sleep 15 & exit 0'", tmp_path)
    assert time.monotonic() - began < 10
    assert not caplog.records


def test_a_command_that_fails_is_logged_with_its_own_words(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tell_operator("sh -c 'echo no mail today >&2; exit 3'", tmp_path)
    assert "exit code 3. no mail today" in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_of_a_command_that_says_much_the_log_has_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loud = "import sys; print('x' * 50_000_000); sys.exit('y' * 50_000_000 + ' no mail today')"
    tell_operator(shlex.join([sys.executable, "-c", loud]), tmp_path)
    [said] = [record.message for record in caplog.records]
    assert "exit code 1. yyy" in said
    assert said.endswith("y no mail today")
    assert len(said) < 400 + len(loud)


class Receiver(http.server.BaseHTTPRequestHandler):
    """Keeps what is posted; /drip answers one byte at a time, for ever."""

    posted: list[tuple[str, str, bytes]]

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["content-length"]))
        self.posted.append((self.path, self.headers["content-type"], content))
        self.send_response(404 if self.path == "/gone" else 200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[tuple[str, str, bytes]]]]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    handler = type("Keeping", (Receiver,), {"posted": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", handler.posted
    server.shutdown()
    server.server_close()


def test_a_url_gets_a_post_of_json(receiver, tmp_path: Path) -> None:
    url, posted = receiver
    tell_operator(f"{url}/hook?x=1", tmp_path / "night", RunError("no quorum"))
    [(path, kind, content)] = posted
    assert (path, kind) == ("/hook?x=1", "application/json")
    assert json.loads(content) == {
        "run": "night",
        "status": "failed",
        "error": "no quorum",
        "directory": str(tmp_path / "night"),
    }


def test_a_url_that_refuses_is_logged(receiver, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tell_operator(f"{receiver[0]}/gone", tmp_path)
    assert "HTTP Error 404" in caplog.text


@pytest.mark.parametrize("hook", ["$SECRET_HOOK", "$SECRET_HOOK now"])
def test_a_variable_keeps_a_secret_out_of_the_log(
    hook: str, receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SECRET_HOOK", f"{receiver[0]}/token-123")
    tell_operator(hook, tmp_path)
    monkeypatch.setenv("SECRET_HOOK", "/no/token-123")
    tell_operator(hook, tmp_path)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("SECRET_HOOK", f"http://127.0.0.1:{closed.getsockname()[1]}/token-123")
        tell_operator(hook, tmp_path)
    assert "did not work" in caplog.text
    assert "token-123" not in caplog.text


def be_stopped(_drawer: ReportDrawer) -> None:
    """What a signal does while pictures are drawn."""
    raise KeyboardInterrupt


def lose_quorum(_run: Run) -> None:
    raise RunError("no quorum")


def test_a_signal_while_pictures_are_drawn_leaves_the_run_finished(
    tiny: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told once, as finished: that is what its results say."""

    monkeypatch.setattr(ReportDrawer, "draw", be_stopped)
    monkeypatch.setattr(ReportDrawer, "draw_in_background", lambda drawer: None)
    hook = shlex.join(["sh", "-c", f"cat >> {tmp_path}/told"])
    with pytest.raises(KeyboardInterrupt):
        run(tiny | {"on-end": hook})
    assert results_of(tmp_path / "runs" / "run")["status"] == "finished"
    assert json.loads((tmp_path / "told").read_text())["status"] == "finished"


def test_a_signal_while_pictures_of_a_failed_run_are_drawn_does_not_hide_why_it_failed(
    tiny: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReportDrawer, "draw", be_stopped)
    monkeypatch.setattr(Run, "run", lose_quorum)
    with pytest.raises(RunError, match="no quorum"):
        run(tiny | {"on-end": shlex.join(["sh", "-c", f"cat >> {tmp_path}/told"])})
    assert results_of(tmp_path / "runs" / "run")["error"] == "no quorum"
    assert json.loads((tmp_path / "told").read_text())["error"] == "no quorum"


def test_of_a_failure_the_operator_is_told_before_pictures_are_drawn(
    tiny: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower kills a process that it has told to end after 5 seconds; drawing may take longer."""
    seen: list[str] = []
    monkeypatch.setattr(ReportDrawer, "draw", lambda drawer: seen.append((tmp_path / "told").read_text()))
    monkeypatch.setattr(Run, "run", lose_quorum)
    hook = shlex.join(["sh", "-c", f"cat > {tmp_path}/told; cp {tmp_path}/runs/run/results.json {tmp_path}/then"])
    with pytest.raises(RunError):
        run(tiny | {"on-end": hook})
    assert [json.loads(text)["status"] for text in seen] == ["failed"]
    assert json.loads((tmp_path / "then").read_text())["status"] == "failed"


def test_whoever_is_told_of_a_failure_may_resume_the_run_at_once(
    tiny: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the resumed run writes, while the failed one ends, stays."""
    drawn: list[ReportDrawer] = []
    monkeypatch.setattr(ReportDrawer, "draw", drawn.append)
    monkeypatch.setattr(Run, "run", lose_quorum)
    recorded = tmp_path / "runs" / "run" / "results.json"
    with pytest.raises(RunError):
        run(tiny | {"on-end": shlex.join(["sh", "-c", f"sed -i s/failed/finished/ {recorded}"])})
    assert json.loads(recorded.read_text())["status"] == "finished"
    assert drawn == []


def test_nodes_are_not_told(tiny: Values) -> None:
    config = parse(tiny | {"on-end": "mail-me"})
    assert config.flat()["on-end"] == "mail-me"
    assert "on-end" not in config.for_clients()


def test_what_a_command_says_of_a_secret_stays_out_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SECRET_HOOK", "token-123")
    tell_operator("sh -c 'no-such-$SECRET_HOOK'", tmp_path)
    assert "did not work: exit code 127. What it said may hold secrets." in caplog.text
    assert "token-123" not in caplog.text


def test_what_the_command_leaves_running_is_not_taken_for_a_run_of_the_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bench ends all processes with its mark."""
    monkeypatch.setenv("FCIL_BENCH", "mark")
    monkeypatch.setenv("OTHER", "kept")
    tell_operator(f"sh -c 'env > {tmp_path}/environment'", tmp_path)
    lines = (tmp_path / "environment").read_text().splitlines()
    assert "OTHER=kept" in lines
    assert "FCIL_BENCH=mark" not in lines
