"""The run key ``on-end``: tell the operator that a run has ended, by a command or a URL of theirs."""

import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import threading
import urllib.request
from pathlib import Path
from tempfile import TemporaryFile
from urllib.error import HTTPError
from urllib.parse import urlsplit

from server_app.errors import one_line, reason_of
from task.keys import ConfigError

log = logging.getLogger(__name__)

PATIENCE = 30.0  # seconds for the operator's command or URL
_WEB = ("http://", "https://")
_QUOTED = 250  # bytes that are quoted of a command's output: the last, where programs put the reason


class HookError(RuntimeError):
    """The operator's command or URL did not do what it should; the message names no secret."""


def require_hook(hook: str) -> None:
    """Check before the run that there is such a command, or that the URL can be one.

    Raises:
        ConfigError: quotes ``hook`` as it was typed, as variables are for secrets.
    """
    target = os.path.expandvars(hook)
    try:
        if target.startswith(_WEB):
            usable = bool(urlsplit(target).hostname) and target.isascii() and len(target.split()) == 1
            expected = "a URL needs a host, and no blank or letter beyond ASCII"
        else:
            words = shlex.split(target)
            usable = not words or bool(shutil.which(words[0]))
            expected = "there is no such command on the server, or its variable is not set there"
    except ValueError:
        usable, expected = False, "with its variables filled in, it is neither a command line nor a URL"
    if not usable:
        raise ConfigError(f"on-end = {hook!r} cannot work: {expected}.")


def tell_operator(hook: str, directory: Path, error: BaseException | None = None) -> None:
    """Run the command, or post to the URL, that ``hook`` names; $NAME in it is an environment variable.

    Both get the same JSON object, a command on its standard input: ``run``, ``status`` (finished or failed), ``error``
    and ``directory``. They have PATIENCE seconds. What goes wrong is logged and changes nothing else.

    An empty ``hook`` does nothing; ``error`` is why the run failed, None if it finished.
    """
    status, reason = ("finished", "") if error is None else ("failed", reason_of(error))
    event = {"run": directory.name, "status": status, "error": reason, "directory": str(directory)}
    content, target = json.dumps(event).encode(), os.path.expandvars(hook)
    try:
        if target.startswith(_WEB):
            _post(target, content)
        elif target.strip():
            _run_command(shlex.split(target), content, quotes_errors=target == hook)
    except Exception as problem:  # the run's own outcome must stand
        # the key as it was typed, and no text of the error that may quote it: variables are for secrets
        cause = getattr(problem, "reason", None) or getattr(problem, "strerror", None) or ""
        said = str(problem) if isinstance(problem, (HookError, HTTPError)) else f"{type(problem).__name__}. {cause}"
        log.warning("on-end = %r did not work: %s", hook, one_line(said))


def _post(url: str, content: bytes) -> None:
    """Post in a thread of its own: the timeout of a request starts again with every byte that comes."""
    problems: list[Exception] = []

    def post() -> None:
        try:
            request = urllib.request.Request(url, content, {"Content-Type": "application/json"})
            urllib.request.urlopen(request, timeout=PATIENCE).close()
        except Exception as error:
            problems.append(error)

    thread = threading.Thread(target=post, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if thread.is_alive():
        raise HookError(f"no answer within {PATIENCE:g} s")
    if problems:
        raise problems[0]


def _run_command(words: list[str], content: bytes, quotes_errors: bool) -> None:
    """Run it in a process group of its own, which is killed when its time is over.

    Its error output goes to a file: a process that it leaves running would keep a pipe open. Error output may repeat
    what the command was given, so it becomes a part of the message only with ``quotes_errors``.
    """
    with TemporaryFile() as errors:
        command = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
        )
        try:
            command.communicate(content, PATIENCE)
        except subprocess.TimeoutExpired:
            raise HookError(f"no end within {PATIENCE:g} s, so it was killed") from None
        finally:
            if command.returncode is None:
                os.killpg(command.pid, signal.SIGKILL)
                command.wait()
        if command.returncode:
            errors.seek(-min(_QUOTED, errors.seek(0, os.SEEK_END)), os.SEEK_END)
            text = errors.read().decode(errors="replace") if quotes_errors else "What it said may hold secrets."
            raise HookError(f"exit code {command.returncode}. {text}")
