"""Processes and signals: ends processes with their descendants, and turns signals into exceptions."""

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

POLL = 0.2  # seconds between two looks at what runs


class Interrupted(KeyboardInterrupt):
    """A signal asked the run to end; ``number`` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


@contextlib.contextmanager
def interruptible(at_once: bool = False) -> Iterator[Callable[[], None]]:
    """Turn Ctrl-C, SIGTERM and a closed terminal into :class:`Interrupted`.

    It is raised ``at_once`` wherever the program is, or else where the yielded function is called: never between the
    start of a process and the line that stores it.
    """
    received: list[int] = []

    def store(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if at_once:
            check()

    def check() -> None:
        if received:
            raise Interrupted(received[0])

    names = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    # what nohup or a shell's background job ignores stays ignored
    handled = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, store) for number in handled}
    try:
        yield check
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def start_process(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], output: Path
) -> "subprocess.Popen[bytes]":
    """Start a program that writes to a file; in a session of its own it does not get Ctrl-C, so that we end it."""
    with open(output, "ab") as file:  # a run that is resumed keeps its log
        return subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def ask_to_end(started: Sequence["subprocess.Popen[bytes]"], patience: float) -> None:
    """End processes, but not their descendants, with SIGTERM, and wait at most ``patience`` seconds until they have."""
    deadline = time.monotonic() + patience
    for process in started:
        process.terminate()
    for process in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def end_processes(started: list["subprocess.Popen[bytes]"], mark: str = "", patience: float = 2.0) -> None:
    """End processes and their descendants with SIGTERM, and with SIGKILL after ``patience`` seconds.

    ``mark`` is NAME=VALUE of an environment variable of these processes alone, or empty. It finds descendants whose
    parents are gone, as those of Ray's workers often are.
    """
    import psutil

    family = {psutil.Process(process.pid) for process in started if process.poll() is None}
    asked: set[psutil.Process] = set()
    began = time.monotonic()
    while True:
        for child in started:
            child.poll()  # else ended ones would stay zombies
        family |= _relatives(family, mark)
        alive = {process for process in family if _is_alive(process)}
        force = time.monotonic() > began + patience
        if not alive or time.monotonic() > began + 2 * patience:
            return
        for process in alive if force else alive - asked:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill() if force else process.terminate()
        asked |= alive
        time.sleep(0.1)


def find_marked(mark: str) -> set["psutil.Process"]:
    """Living processes with ``mark``, NAME=VALUE, in their environment, and their descendants."""
    return {process for process in _relatives(set(), mark) if _is_alive(process)}


def _relatives(family: AbstractSet["psutil.Process"], mark: str) -> set["psutil.Process"]:
    """Descendants of ``family``, and processes with the mark in their environment with their descendants."""
    import psutil

    name, _, value = mark.partition("=")
    processes = psutil.process_iter(["environ"])  # of other people's processes the environment is None
    relatives = {process for process in processes if (process.info["environ"] or {}).get(name) == value}
    for process in family | relatives:
        with contextlib.suppress(psutil.NoSuchProcess):
            relatives.update(process.children(recursive=True))
    return relatives


def _is_alive(process: "psutil.Process") -> bool:
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def last_lines(path: Path, count: int = 20) -> str:
    """The end of a text file, empty when there is none."""
    with contextlib.suppress(OSError):
        return "\n".join([x for x in path.read_text(errors="replace").splitlines() if x.strip()][-count:])
    return ""
