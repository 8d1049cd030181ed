"""Runs a suite: skips finished runs, starts a process for each of the others, and keeps the table up to date."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from filelock import Timeout

from server_app.bench.selection import Choice, choose, write_selection
from server_app.bench.suite import PlannedRun, Selection, Suite
from server_app.errors import LaunchError, ReportError
from server_app.report.compare import Group
from server_app.report.recommend import recommend
from server_app.report.runs import SavedRun, flat, load_run
from server_app.report.write import write_comparison
from server_app.run_files.checkpoints import find_checkpoint
from server_app.run_files.locks import lock_folder
from server_app.run_files.on_end import SUITE
from server_app.run_files.status import FINISHED, mark_failed
from server_app.run_files.writers import origin
from server_app.run_keys import require_files, run_path
from server_app.simulation.processes import (
    POLL,
    ask_to_end,
    end_processes,
    find_marked,
    interruptible,
    last_lines,
    start_process,
)
from task.config.checks import doubt_backbone
from task.config.schema import FROM_PATH, MAY_CHANGE, SAME_RESULT, Config, defaults, keys_affecting
from task.keys import ConfigError
from task.message import Scalar

PATIENCE = 40.0  # seconds in which a run that is stopped can save its state and tell the operator


def _in_use(folder: Path) -> LaunchError:
    return LaunchError(f"{folder} is in use: a run there is still going on, wait for it or end it.")


def _require_free(folder: Path) -> None:
    """Refuse a run that another process is at, such as one that was resumed by hand: it would be deleted under it."""
    if folder.exists():
        try:
            with lock_folder(folder):
                pass
        except Timeout:
            raise _in_use(folder) from None


def _require_disposable(run: PlannedRun, unreadable: bool) -> None:
    """Refuse to delete what may be wanted still: a run with damaged results, or files that no run has left."""
    folder = run.directory
    ours = any((folder / name).exists() for name in ("run.log", "config.yaml", "results.json"))
    if unreadable or (folder.exists() and any(folder.iterdir()) and not ours):
        what = "its results.json is damaged" if unreadable else "its folder holds files that are of no run"
        raise LaunchError(f"{what}: move {folder} away, or delete it, to run it anew.")


class Bench:
    """Runs a suite, at most ``jobs`` runs at a time, by ``fcil run`` with ``options``; ``say`` gets its progress.

    An unfinished run of the same run keys, code, commit, versions and images goes on after its last round; any other
    begins anew, and with ``resume=False`` all do. With ``resume=True``, ``say`` is told of each run that cannot go on,
    with None only of those that lose finished rounds.
    """

    def __init__(
        self, suite: Suite, jobs: int, options: Sequence[str], say: Callable[[str], None], resume: bool | None = None
    ) -> None:
        self._suite, self._jobs, self._options, self._say, self._resume = suite, jobs, options, say, resume
        # every run of this folder's suites has this in its environment, so that a run that outlives its suite is found
        self._mark = f"{SUITE}={hashlib.sha256(str(suite.folder).encode()).hexdigest()[:16]}"
        self._running: dict[subprocess.Popen[bytes], PlannedRun] = {}
        self._started_at: dict[str, float] = {}  # by name of the run, in seconds of the monotonic clock
        self._waiting: list[PlannedRun] = []
        self._failed: list[PlannedRun] = []
        self._unreadable: set[str] = set()  # names of runs whose files cannot be read
        self._seconds: dict[str, list[float]] = {}  # of finished runs, by variant
        self.recommendation: dict[str, list[str]] = {}  # lines by heading, of the last report

    def run(self) -> list[PlannedRun]:
        """Run all runs that are not finished yet; returns those that failed.

        Raises:
            ConfigError: a finished run has other keys than the suite; nothing was started.
            LaunchError: runs of this suite are running already.
            PicturesUnavailable: a package for the report is missing; nothing was started.
            Interrupted: a signal came; all runs have ended.
        """
        try:
            with lock_folder(self._suite.folder), interruptible() as check:
                if find_marked(self._mark):  # after its suite was killed, a run may still be running
                    raise _in_use(self._suite.folder)
                self._plan()
                self._report()
                self._run_waiting(check)
        except Timeout:
            raise _in_use(self._suite.folder) from None
        return self._failed

    def _run_waiting(self, check: Callable[[], None]) -> None:
        try:
            while self._waiting or self._running:
                ended = [process for process in self._running if process.poll() is not None]
                for process in ended:
                    self._record_end(self._running.pop(process), process.returncode)
                while self._waiting and len(self._running) < self._jobs:
                    self._start(self._waiting.pop(0))
                if ended:
                    self._renew_report()  # takes seconds, so the next runs are started before
                check()
                time.sleep(POLL)
        finally:
            ask_to_end(list(self._running), PATIENCE)
            end_processes(list(self._running), self._mark)
            for run in self._running.values():
                mark_failed(run.directory, "stopped with its suite")

    def _renew_report(self) -> None:
        """A full disk while it is written must not end the runs."""
        try:
            self._report()
        except OSError as error:
            self._say(f"WARNING   the table could not be written: {error}; the same command writes it later")

    def _plan(self) -> None:
        foreign = []
        for run in self._suite.runs:
            finished = finished_run(run)
            if finished is None:
                _require_free(run.directory)
                self._load(run)  # warns if its files cannot be read
                self._waiting.append(run)
                continue
            total = finished.results["seconds"].get("total", 0.0)
            self._seconds.setdefault(run.variant, []).append(total - _first_pass(finished))
            different = _other_origin(finished, run)
            foreign += [f"{run.name} ({', '.join(different)})"] if different else []
        total, left = len(self._suite.runs), len(self._waiting)
        self._say(f"{total} runs, {total - left} of them finished already; results go to {self._suite.folder}")
        for doubt in dict.fromkeys(doubt_backbone(run.config.flat()) for run in self._suite.runs):
            if doubt:
                self._say(f"WARNING   {doubt}")
        if foreign:
            self._say(
                f"WARNING   {len(foreign)} of the finished runs were made by other code, versions or images, "
                f"first {foreign[0]}; they are kept: remove their folders to run them anew"
            )

    def _start(self, run: PlannedRun) -> None:
        try:
            _require_free(run.directory)
            _require_disposable(run, run.name in self._unreadable)
        except LaunchError as error:
            self._failed.append(run)
            self._say(f"FAILED    {run.name}: {error}")
            return
        obstacle, told = self._obstacle(run), ""
        if obstacle and run.directory.exists():
            loses_rounds = (run.directory / "checkpoint").exists()
            shutil.rmtree(run.directory)
            told = f", not resumed: {obstacle}" if self._resume or loses_rounds else ""
        run.directory.mkdir(parents=True, exist_ok=True)
        environment, log = {**os.environ, SUITE: self._mark.partition("=")[2]}, run.directory / "run.log"
        process = start_process(self._command(run, not obstacle), Path(__file__).parents[2], environment, log)
        self._running[process], self._started_at[run.name] = run, time.monotonic()
        self._say(f"started   {run.name}{told}" if obstacle else f"resumed   {run.name}")

    def _obstacle(self, planned: PlannedRun) -> str:
        """Why a planned run cannot go on after the last round of what lies in its folder; empty if it can."""
        if self._resume is False:
            return "--no-resume is given"
        run = self._load(planned)
        if run is None or run.results["status"] == FINISHED:
            return "there is no results.json of an unfinished run"
        if name := _other_key(run, planned, keys_affecting(*MAY_CHANGE)) or ", ".join(_other_origin(run, planned)):
            return f"another {name}"
        try:
            find_checkpoint(planned.directory / "checkpoint")
        except ConfigError:
            return "no whole checkpoint"
        return ""

    def _command(self, run: PlannedRun, resume: bool) -> list[str]:
        values = run.values
        if resume:
            free = {*keys_affecting(*MAY_CHANGE), "data-dir", "backbone-weights"} - {"output-dir", "run-name"}
            values = {key: value for key, value in values.items() if key in free} | {"resume": str(run.directory)}
        settings = [f"{key}={value}" for key, value in values.items()]
        return [sys.executable, "-m", "server_app.cli", "run", *self._options, *settings]

    def _record_end(self, run: PlannedRun, code: int) -> None:
        ended = self._load(run)
        if code == 0 and ended and ended.finished:
            seconds = time.monotonic() - self._started_at[run.name]
            self._seconds.setdefault(run.variant, []).append(max(seconds - _first_pass(ended), 0.0))
            accuracy = ended.metrics.get("final_average_accuracy")
            of = " on validation images" * (ended.evaluated == "validation")
            known = "unknown: test images are missing" if accuracy is None else f"{accuracy:.1%}{of}"
            outcome = f"final average accuracy {known}, {_minutes(seconds)}"
            lost = sum(len(entry["failures"]) for entry in ended.results["rounds"])
            outcome += f", answers that failed: {lost}" * (lost > 0)
            self._say(f"finished  {run.name}: {outcome}; {self._remaining()}")
        else:
            log = run.directory / "run.log"
            reason = f"ended by {signal.Signals(-code).name}" if code < 0 else last_lines(log, 1).removeprefix("fcil: ")
            mark_failed(run.directory, reason)
            self._failed.append(run)
            self._say(f"FAILED    {run.name}: {reason} (see {log}); {self._remaining()}")

    def _remaining(self) -> str:
        """Number of runs left, and their time as estimated from finished runs, if possible of the same variant."""
        left = [*self._waiting, *self._running.values()]
        durations = [seconds for of_variant in self._seconds.values() for seconds in of_variant]
        if not left or not durations:
            return f"{len(left)} left"
        guesses = [self._seconds.get(run.variant, durations) for run in left]
        return f"{len(left)} left, about {_minutes(sum(sum(g) / len(g) for g in guesses) / self._jobs)}"

    def _load(self, planned: PlannedRun) -> SavedRun | None:
        """The run in the folder of a planned one; None if there is none yet, or none that can be read: warns once."""
        if not (planned.directory / "results.json").exists():  # asked first: a run that has just begun may write it now
            return None
        try:
            return load_run(planned.directory)
        except ReportError as error:
            if planned.name not in self._unreadable:
                self._unreadable.add(planned.name)
                self._say(f"WARNING   {error}")
            return None

    def _report(self) -> None:
        groups: dict[tuple[str, str], Group] = {}
        for run in self._suite.runs:
            group = groups.setdefault((run.partition, run.variant), Group(run.setting, run.variant, []))
            # the folder of a waiting run holds an earlier, unfinished one, which is removed or goes on
            if run not in self._waiting and (loaded := self._load(run)):
                group.runs.append(loaded)
        for other in self._suite.others:
            beside = [run for run in self._suite.runs if run.partition == other.partition]
            setting = min(beside, key=lambda run: run.config.validation_share).setting
            group = groups.setdefault((other.partition, other.label), Group(setting, other.label, [], theirs=True))
            group.runs.append(other.run)
        self.recommendation = {}
        for setting in dict.fromkeys(group.setting for group in groups.values()):
            members = [group for group in groups.values() if group.setting == setting]
            keys = {run.variant: run.method_keys for run in self._suite.runs if run.setting == setting}
            self.recommendation[f"Recommendation: {setting}"] = recommend(members, keys)
        notes = {
            **self.recommendation,
            "Chosen on validation images": self._suite.notes,
            "Results of other people": list(dict.fromkeys(f"{o.label}: {o.source}" for o in self._suite.others)),
        }
        shown = {head: lines for head, lines in notes.items() if lines}
        write_comparison(list(groups.values()), self._suite.folder, self._suite.title, shown)


class SelectionBench(Bench):
    """Runs a suite's selection; its report is the log of what was chosen, in the suite's folder."""

    def __init__(
        self,
        selection: Selection,
        jobs: int,
        options: Sequence[str],
        say: Callable[[str], None],
        resume: bool | None = None,
    ) -> None:
        super().__init__(selection.suite, jobs, options, say, resume)
        self._selection = selection

    def choices(self) -> dict[str, Choice]:
        """What was chosen so far, by variant."""
        return choose(self._selection, self._finished(), self._failed_names())

    def _finished(self) -> dict[str, SavedRun]:
        runs = {run.name: finished_run(run) for run in self._suite.runs if run not in self._waiting}
        return {name: run for name, run in runs.items() if run is not None}

    def _failed_names(self) -> list[str]:
        return [run.name for run in self._failed]

    def _report(self) -> None:
        write_selection(self._selection, self._finished(), self._failed_names())


def finished_run(planned: PlannedRun) -> SavedRun | None:
    """The finished run in the folder of a planned one; None if there is none.

    Raises:
        ConfigError: its run keys are not those of the planned run.
    """
    try:
        run = load_run(planned.directory)
    except ReportError:
        return None
    if not (run.finished and run.has_run_keys):
        return None
    if name := _other_key(run, planned, keys_affecting(*SAME_RESULT)):
        require_files(planned.values)  # a mistyped path must not lead to the advice to remove results
        raise ConfigError(
            f"{planned.directory} holds a finished run with {name} = {_saved_keys(run)[name]!r}; the suite says "
            f"{planned.config.flat()[name]!r}. Remove the folder, or give the suite another output-dir."
        )
    return run


def _other_key(run: SavedRun, planned: PlannedRun, ignored: Collection[str]) -> str | None:
    """The first run key whose value is another one in a saved run than in the suite, but for those ``ignored``."""
    saved, now = _saved_keys(run), planned.config.flat()
    different = [name for name, value in now.items() if name not in ignored and saved[name] != value]
    return next((name for name in different if not _is_moved(name, run, planned.config)), None)


def _is_moved(name: str, run: SavedRun, config: Config) -> bool:
    """Whether the images or weights that a run key names now are those of the saved run, at another place."""
    if name == "data-dir" and config.dataset in FROM_PATH:
        return run.settings.get("data-sha256") == _images_sha256(config)
    if name == "backbone-weights":
        return run.settings.get("backbone-sha256") == _weights_sha256(config)
    return False


def _other_origin(run: SavedRun, planned: PlannedRun) -> list[str]:
    """Names of what is not as in a saved run, of code, commit, versions and images."""
    different = [name for name, value in flat(origin()).items() if run.settings.get(name) != value]
    config, saved = planned.config, run.settings.get("data-sha256")
    if saved and config.dataset in FROM_PATH:
        different += ["data-sha256"] * (_images_sha256(config) not in ("", saved))
    return different


def _images_sha256(config: Config) -> str:
    """Digest of a run's images as they are now; empty where they are not on this machine any more, or unreadable."""
    seed = config.seed if config.validation_share else 0  # without a split all seeds have the same images
    return _data_sha256(config.dataset, config.data_dir, config.validation_share, seed)


def _weights_sha256(config: Config) -> str:
    """Digest of the backbone of a run, as its weights are now; empty where they cannot be read."""
    from task.models.load import configured_backbone

    try:
        return configured_backbone(replace(config, device="cpu")).sha256
    except ConfigError:
        return ""


@cache
def _data_sha256(dataset: str, data_dir: str, validation_share: float, seed: int) -> str:
    from task.data.digests import data_digest
    from task.data.load import is_published, load_dataset

    try:
        data = load_dataset(dataset, str(run_path("data-dir", data_dir)), 1, validation_share, seed)
        return data_digest(data, whole_files=not is_published(dataset))
    except (ConfigError, OSError):
        return ""
    finally:
        load_dataset.cache_clear()  # the runs have processes of their own


def _saved_keys(run: SavedRun) -> dict[str, Scalar]:
    """The run keys of a saved run; one that is older than a key had the key's default value."""
    return defaults() | run.settings


def _first_pass(run: SavedRun) -> float:
    """Seconds of the pass over all images that no later run repeats; 0 if the run found its features on the disk."""
    return float(run.results["seconds"].get("features", 0.0))


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds / 60:.1f} min"
