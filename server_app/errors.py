"""Errors that end a command, with messages for people."""

import errno


class RunError(RuntimeError):
    """The run cannot go on; what was saved so far stays."""


class LaunchError(RuntimeError):
    """The run cannot be started."""


class ExportError(RuntimeError):
    """A model cannot be written in the form that was asked for."""


class ReportError(ValueError):
    """A run directory cannot be reported on; the message is meant for the person who named it."""


class PicturesUnavailable(RuntimeError):
    """Matplotlib or Jinja is not installed; the message says how to install them."""


def describe_os_error(error: OSError) -> str:
    """What a run's user should know and do about a file that could not be read or written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk is full, {error.filename or 'a file of the run'} could not be written ({error.strerror}): make "
            "room, then go on with resume if the run's folder has a checkpoint, or begin anew in another output-dir."
        )
    return str(error) or type(error).__name__


MAX_REASON = 300  # characters


def one_line(text: str) -> str:
    """``text``, which may come from a client, as one printable line of at most MAX_REASON characters."""
    start = "".join(c if c.isprintable() else " " for c in text[: 10 * MAX_REASON])
    line = " ".join(start.split())
    return line if len(line) <= MAX_REASON else line[: MAX_REASON - 1] + "…"


def reason_of(error: BaseException) -> str:
    """Why a run ended, in words.

    Flower ends a server app by an exit whose only text is its code. It may send a second signal while it does so; that
    one comes as a KeyboardInterrupt without text.
    """
    if isinstance(error, SystemExit) or type(error) is KeyboardInterrupt:
        return (
            "its process was told to end: by 'flwr stop', by a signal, or because the flower-superexec or "
            "flower-superlink that had started it ended. Their logs say why. The run can be "
            "resumed if it had ended a round."
        )
    return describe_os_error(error) if isinstance(error, OSError) else str(error) or type(error).__name__
