"""The run key ``on-end``: tell the operator that a run has ended, by a command or a URL of theirs."""

import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import urllib.request
from pathlib import Path
from tempfile import TemporaryFile
from urllib.error import HTTPError
from urllib.parse import urlsplit

from server_app.errors import one_line, reason_of
from task.keys import ConfigError

log = logging.getLogger(__name__)

PATIENCE = 30.0  # seconds for the operator's command or URL
# environment variable of the processes of fcil run: it sees how all of them end, and tells in their place
SUPERVISED = "FCIL_SUPERVISED"
# environment variable of all processes of a suite, by which fcil bench finds and ends them
SUITE = "FCIL_BENCH"
_WEB = ("http://", "https://")
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{(\w+)\})")
_QUOTED = 250  # bytes that are quoted of a command's output: the last, where programs put the reason


class HookError(RuntimeError):
    """The operator's command or URL did not do what it should; the message names no secret."""


def require_hook(hook: str, elsewhere: bool = False) -> None:
    """Check before the run that there is such a command, or that the URL can be one.

    A process that is SUPERVISED has no folder of the user's, in which a command may be. ``elsewhere``: the run will
    have another working folder than this process, so a relative path is refused.

    Raises:
        ConfigError: quotes ``hook`` as it was typed, as variables are for secrets.
    """
    if os.environ.get(SUPERVISED):
        return
    try:
        objection = _unset_variable(hook) or _objection(os.path.expandvars(hook), elsewhere)
    except ValueError:
        objection = "with its variables filled in, it is neither a command line nor a URL"
    if objection:
        raise ConfigError(f"on-end = {hook!r} cannot work: {objection}.")


def _unset_variable(hook: str) -> str:
    """Says which variable is not set or empty; in a script, a word with blanks, variables may be the script's own."""
    words = [hook] if hook.startswith(_WEB) else [word for word in shlex.split(hook) if not word.split()[1:]]
    names = [bare or braced for word in words for bare, braced in _VARIABLE.findall(word)]
    return next((f"the variable {name} is not set on the server" for name in names if not os.environ.get(name)), "")


def _objection(target: str, elsewhere: bool) -> str:
    """Why a command, or a URL, with its variables filled in, cannot be used; or an empty text."""
    if target.startswith(_WEB):
        url = urlsplit(target)
        usable = url.hostname and url.port != 0 and target.isascii() and len(target.split()) == 1
        return "" if usable else "a URL needs a host, and no blank or letter beyond ASCII"
    command = next(iter(shlex.split(target)), "")
    if elsewhere and os.path.dirname(command) and not os.path.isabs(command):
        return "its run has another working folder, so write the absolute path"
    return "" if not command or shutil.which(command) else "there is no such command on the server"


def tell_operator(hook: str, directory: Path, error: BaseException | None = None) -> None:
    """Run the command, or post to the URL, that ``hook`` names; $NAME in it is an environment variable.

    Both get the same JSON object, a command on its standard input: ``run``, ``status`` (finished or failed), ``error``
    and ``directory``. They have PATIENCE seconds. What goes wrong is logged and changes nothing else.

    An empty ``hook`` does nothing, and nobody is told by a process that is SUPERVISED; ``error`` is why the run failed,
    None if it finished.
    """
    if os.environ.get(SUPERVISED):
        return
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
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=PATIENCE).close()


def _run_command(words: list[str], content: bytes, quotes_errors: bool) -> None:
    """Run it in a process group of its own, which is killed when its time is over.

    Its error output goes to a file: a process that it leaves running would keep a pipe open. Error output may repeat
    what the command was given, so it becomes a part of the message only with ``quotes_errors``.
    """
    own = {name: value for name, value in os.environ.items() if name != SUITE}  # what it leaves running is no run's
    with TemporaryFile() as errors:
        command = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, env=own, start_new_session=True
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
