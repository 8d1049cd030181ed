"""Runs what a suite plans: finished runs are skipped, the others are a process each, and the table is always there."""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from server_app.bench.suite import Planned, Suite
from server_app.errors import LaunchError
from server_app.report.compare import Group
from server_app.report.runs import Run, flat
from server_app.report.write import ReportError, load_run, write_comparison
from server_app.run_files.paths import locked, mark_failed, read_results
from server_app.run_files.writers import origin
from server_app.simulation.processes import end_processes, interruptible, last_lines
from server_app.simulation.superlink import POLL
from task.config.schema import SAME_RESULT, defaults, keys_affecting
from task.keys import ConfigError

PATIENCE = 10.0  # seconds that a run which is stopped has to save what there is


class Bench:
    """One go at a suite: at most ``jobs`` runs at a time, told about line by line through ``say``."""

    def __init__(self, suite: Suite, jobs: int, through_flower: bool, say: Callable[[str], None]) -> None:
        self._suite, self._jobs, self._say = suite, jobs, say
        self._way = [] if through_flower else ["--in-process"]
        self._mark = f"FCIL_BENCH={secrets.token_hex(8)}"  # in the environment of our runs only
        self._running: dict[subprocess.Popen[bytes], Planned] = {}
        self._begun: dict[str, float] = {}  # by name of the run
        self._waiting: list[Planned] = []
        self._failed: list[Planned] = []
        self._seconds: dict[str, list[float]] = {}  # of finished runs, by variant

    def run(self) -> list[Planned]:
        """Run what is not finished yet.

        Returns:
            the runs that failed.

        Raises:
            ConfigError: a finished run has other keys than the suite; nothing was started.
            LaunchError: runs of this suite are going on already.
            PicturesUnavailable: matplotlib is not installed; nothing was started.
            Interrupted: somebody wants it to end; no run is left.
        """
        with _held(self._suite.folder) as lock, interruptible() as check:
            self._plan()
            self._report()
            try:
                self._work(lock.fileno(), check)
            finally:
                self._stop()
        return self._failed

    def _work(self, lock: int, check: Callable[[], None]) -> None:
        while self._waiting or self._running:
            ended = [process for process in self._running if process.poll() is not None]
            for process in ended:
                self._note(self._running.pop(process), process.returncode)
            while self._waiting and len(self._running) < self._jobs:
                self._start(self._waiting.pop(0), lock)
            if ended:
                self._report()  # takes seconds, so others are at work meanwhile
            check()
            time.sleep(POLL)

    def _plan(self) -> None:
        now, foreign = flat(origin()), []
        for run in self._suite.runs:
            finished = finished_run(run)
            if finished is None:
                self._waiting.append(run)
                continue
            self._seconds.setdefault(run.variant, []).append(finished.results["seconds"].get("total", 0.0))
            other = [name for name, value in now.items() if finished.settings.get(name) != value]
            foreign += [f"{run.name} ({', '.join(other)})"] if other else []
        total, left = len(self._suite.runs), len(self._waiting)
        self._say(f"{total} runs, {total - left} of them finished already; results go to {self._suite.folder}")
        if foreign:
            self._say(
                f"WARNING   {len(foreign)} of the finished runs were made by other code or versions, "
                f"first {foreign[0]}; they are kept: remove their folders to run them anew"
            )

    def _start(self, run: Planned, lock: int) -> None:
        # a half run's lines must not stay in the files of a new one
        if run.directory.exists():
            shutil.rmtree(run.directory)
        run.directory.mkdir(parents=True)
        name, _, value = self._mark.partition("=")
        with open(run.directory / "run.log", "wb") as log:
            process = subprocess.Popen(
                self._command(run),
                cwd=Path(__file__).parents[2],
                env={**os.environ, name: value},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us alone, who then end everything in order
                pass_fds=[lock],  # a run that outlives us keeps the folder locked
            )
        self._running[process], self._begun[run.name] = run, time.monotonic()
        self._say(f"started   {run.name}")

    def _command(self, run: Planned) -> list[str]:
        settings = [f"{key}={value}" for key, value in run.values.items()]
        return [sys.executable, "-m", "server_app.cli", "run", *self._way, *settings]

    def _note(self, run: Planned, code: int) -> None:
        results = read_results(run.directory)
        if code == 0 and results.get("status") == "finished":
            seconds, accuracy = time.monotonic() - self._begun[run.name], results["metrics"]["final_average_accuracy"]
            self._seconds.setdefault(run.variant, []).append(seconds)
            outcome = f"final average accuracy {accuracy:.1%}, {_minutes(seconds)}"
            self._say(f"finished  {run.name}: {outcome}; {self._remaining()}")
        else:
            log = run.directory / "run.log"
            reason = f"ended by {signal.Signals(-code).name}" if code < 0 else last_lines(log, 1).removeprefix("fcil: ")
            mark_failed(run.directory, reason)
            self._failed.append(run)
            self._say(f"FAILED    {run.name}: {reason} (see {log}); {self._remaining()}")

    def _remaining(self) -> str:
        """How many runs are left and, once one has finished, about how long they take: as others of their variant."""
        left = [*self._waiting, *self._running.values()]
        every = [seconds for known in self._seconds.values() for seconds in known]
        if not left or not every:
            return f"{len(left)} left"
        guesses = [self._seconds.get(run.variant, every) for run in left]
        return f"{len(left)} left, about {_minutes(sum(sum(g) / len(g) for g in guesses) / self._jobs)}"

    def _report(self) -> None:
        groups: dict[tuple[str, str], Group] = {}
        for run in self._suite.runs:
            group = groups.setdefault((run.partition, run.variant), Group(run.setting, run.variant, []))
            if run in self._waiting:
                continue  # what lies there will go: half a run, perhaps of other keys
            with contextlib.suppress(ReportError):  # it has written nothing yet
                group.runs.append(load_run(run.directory))
        write_comparison(list(groups.values()), self._suite.folder, self._suite.title)

    def _stop(self) -> None:
        end_processes(list(self._running), self._mark, PATIENCE)
        for run in self._running.values():
            mark_failed(run.directory, "stopped with its suite")


def finished_run(planned: Planned) -> Run | None:
    """The finished run in a planned one's folder, None if there is none.

    Raises:
        ConfigError: it is another run than the planned one.
    """
    try:
        run = load_run(planned.directory)
    except ReportError:
        return None
    if not run.finished or not (planned.directory / "config.yaml").exists():
        return None
    # a key that did not exist yet had no other value than its default
    known, ignored = defaults() | run.settings, keys_affecting(*SAME_RESULT)
    for name, value in planned.config.flat().items():
        if name not in ignored and known[name] != value:
            raise ConfigError(
                f"{planned.directory} holds a finished run with {name} = {known[name]!r}; the suite says {value!r}. "
                "Remove the folder, or give the suite another output-dir."
            )
    return run


def _held(folder: Path) -> TextIO:
    """The lock that keeps other suites out of a folder."""
    try:
        return locked(folder)
    except BlockingIOError:
        raise LaunchError(f"{folder} is in use: a run there is still going on, wait for it or end it.") from None


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds / 60:.1f} min"
