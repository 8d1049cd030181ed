"""Processes and signals: ending what was started, and being ended in order."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """Somebody wants the run to end; ``number`` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def interruptible(at_once: bool = False) -> Iterator[Callable[[], None]]:
    """Turn Ctrl-C, SIGTERM and a closed terminal into :class:`Interrupted`.

    Args:
        at_once: raise it wherever the program is; otherwise only where the yielded check is called, so that it cannot
            come between the start of a process and the line that remembers it.
    """
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if at_once:
            check()

    def check() -> None:
        if received:
            raise Interrupted(received[0])

    names = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    # what nohup or a shell's background job ignores stays ignored
    heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in heeded}
    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_processes(started: list["subprocess.Popen[bytes]"], mark: str, patience: float = 2.0) -> None:
    """End processes and their offspring: politely, and by force after ``patience`` seconds.

    Flower's simulation would take longer to go, as it waits for the run's thread; there is nothing to wait for.

    Args:
        started: ended ones are harmless.
        mark: NAME=VALUE of a variable that only their environments hold; where there is /proc, it finds offspring
            whose parents are gone already, as Ray's workers' often are.
        patience: seconds.
    """
    known = {process.pid for process in started if process.poll() is None}
    asked: set[int] = set()
    began = time.monotonic()
    while True:
        for process in started:
            process.poll()  # else the dead would stay in the table
        parents = _parents()
        known |= {pid for pid in parents if _carries(pid, mark)}
        while young := {pid for pid, parent in parents.items() if parent in known} - known:
            known |= young
        alive = known & parents.keys()
        force = time.monotonic() > began + patience
        if not alive or time.monotonic() > began + 2 * patience:
            return
        for pid in alive if force else alive - asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if force else signal.SIGTERM)
        asked |= alive
        time.sleep(0.1)


def last_lines(path: Path, count: int = 20) -> str:
    """The end of a text file, empty when there is none."""
    with contextlib.suppress(OSError):
        return "\n".join([x for x in path.read_text(errors="replace").splitlines() if x.strip()][-count:])
    return ""


def _parents() -> dict[int, int]:
    """Parent of every process that is not a zombie."""
    if Path("/proc/self/stat").exists():
        return dict(_parents_from_proc())
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,state="], capture_output=True, text=True, check=True)
    rows = (line.split() for line in listed.stdout.splitlines())
    return {int(pid): int(parent) for pid, parent, state in rows if not state.startswith("Z")}


def _parents_from_proc() -> Iterator[tuple[int, int]]:
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            with contextlib.suppress(OSError):
                # the command's name, in parentheses, may hold anything
                state, parent = (place / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
                if state != "Z":
                    yield int(place.name), int(parent)


def _carries(pid: int, mark: str) -> bool:
    with contextlib.suppress(OSError):
        return mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False
