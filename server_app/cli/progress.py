"""Progress and summary that fcil run prints."""

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

from server_app.rounds.progress import describe_round
from server_app.run_files.paths import read_results
from server_app.simulation.superlink import POLL

_RESULTS = ("results.json", "accuracy.png", "forgetting.png", "report.html")


class Progress:
    """Prints a line for each finished round of rounds.jsonl, and the warnings of Flower's log."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.log = directory, Path()
        self._shown, self._warned = len(self._lines()), 0

    def show(self) -> None:
        """Print the rounds and warnings that are new since the last call."""
        for warning in self._warnings()[self._warned :]:
            print(f"warning: {warning}", flush=True)
            self._warned += 1
        lines = self._lines()
        self._shown = min(self._shown, len(lines))  # a resumed run drops the lines after its checkpoint
        for number, line in enumerate(lines[self._shown :], start=self._shown + 1):
            with contextlib.suppress(ValueError):  # a line that was damaged before the run was resumed
                print("\n".join(describe_round(json.loads(line), number)), flush=True)
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
        try:
            yield
        finally:
            done.set()
            follower.join()
            self.show()

    def _warnings(self) -> list[str]:
        """Warnings of the run itself; what Flower logs before it begins is left out."""
        with contextlib.suppress(OSError):
            text = self.log.read_text(errors="replace").partition("results go to")[2]
            return re.findall(r"^(?:\x1b\[\d+m)?WARNING *(?:\x1b\[0m)?: +(.*)$", text, re.MULTILINE)
        return []

    def _lines(self) -> list[str]:
        with contextlib.suppress(OSError):
            # the last line may be half written
            return (self.directory / "rounds.jsonl").read_text().split("\n")[:-1]
        return []


def summary(directory: Path) -> list[str]:
    """One line with the outcome of a finished run, and the paths of its files."""
    metrics = read_results(directory).get("metrics", {})
    shown = {"final_average_accuracy": "final average accuracy", "forgetting": "forgetting"}
    outcome = ", ".join(f"{text} {metrics[name]:.1%}" for name, text in shown.items() if metrics.get(name) is not None)
    return [*filter(None, [outcome]), *(str(directory / n) for n in _RESULTS if (directory / n).exists())]
