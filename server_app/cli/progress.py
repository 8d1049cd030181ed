"""Progress that fcil run prints."""

import contextlib
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from server_app.rounds.progress import describe_round
from server_app.simulation.processes import POLL
from server_app.transport import base

# loggers that say how far the first pass over a data set is, and how many clients have answered in a round
_SHOWN = ("task.models.feature_cache", base.__name__)


def say(text: str) -> None:
    """Print at once. Where nobody reads any more, as when ``tee`` was ended, the run goes on in silence."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        output_is_closed()


def output_is_closed() -> bool:
    """Whether nobody reads any more, as behind ``| head``; then what is printed from now on goes nowhere."""
    try:
        print(flush=True)
    except BrokenPipeError:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return True
    return False


class _Said(logging.Handler):
    """A log of a run in this process: ``say`` prints the lines that are shown, warnings go to stderr, marked so."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            print(f"{record.levelname.lower()}: {self.format(record)}", file=sys.stderr, flush=True)
        elif record.name in _SHOWN:
            say(self.format(record))


class Progress:
    """Prints a line for each finished round, and from the log the warnings and the lines on features and answers."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.log = directory, Path()
        self._shown, self._noted = len(self._lines()), 0

    def follow(self, log: Path) -> None:
        """Take the notes from the beginning of this log on."""
        self.log, self._noted = log, 0

    def show(self) -> None:
        """Print the rounds and notes that are new since the last call."""
        for note in self._notes()[self._noted :]:
            say(note)
            self._noted += 1
        lines = self._lines()
        self._shown = min(self._shown, len(lines))  # a resumed run drops the lines after its checkpoint
        for number, line in enumerate(lines[self._shown :], start=self._shown + 1):
            with contextlib.suppress(ValueError):  # a line that was damaged before the run was resumed
                say("\n".join(describe_round(json.loads(line), number)))
        self._shown = len(lines)

    @contextlib.contextmanager
    def in_background(self) -> Iterator[None]:
        """Print progress from another thread, until the context ends."""
        done = threading.Event()

        def follow() -> None:
            while not done.wait(POLL):
                self.show()

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        handler = _Said()
        logging.getLogger().addHandler(handler)
        for name in _SHOWN:
            logging.getLogger(name).setLevel(logging.INFO)
        try:
            yield
        finally:
            logging.getLogger().removeHandler(handler)
            done.set()
            follower.join()
            self.show()

    def _notes(self) -> list[str]:
        """Notes of the run itself, without those that Flower logs before the run begins."""
        with contextlib.suppress(OSError):
            text = self.log.read_text(errors="replace").partition("results go to")[2]
            notes = re.findall(r"^(?:\x1b\[\d+m)?(WARNING|INFO) *(?:\x1b\[0m)?: +(.*)$", text, re.MULTILINE)
            warning = {"WARNING": "warning: ", "INFO": ""}
            return [
                warning[kind] + n for kind, n in notes if kind == "WARNING" or n.startswith(("features ", "answers "))
            ]
        return []

    def _lines(self) -> list[str]:
        with contextlib.suppress(OSError):
            # the last line may be half written
            return (self.directory / "rounds.jsonl").read_text(errors="replace").split("\n")[:-1]
        return []
