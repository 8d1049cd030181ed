"""Seconds of a round of three nodes with nothing to train, and of one with 12 images each: real programs on loopback.

python -m benchmarks.deployment_round                 6 rounds of each kind
python -m benchmarks.deployment_round --poll 1        the programs that start clients look for work every second
python -m benchmarks.deployment_round --parts         processor seconds of what a client's process does, without Flower

For the empty rounds a fourth node holds the only class of the task; the seed is one that does not draw it. The steps
of the other rounds are those of the node that answers last, so they add up to the round. The first round of each kind,
in which nodes install the app, is left out.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import psutil

from server_app.clients.sampling import sample_clients
from task.config.parsing import parse
from task.message import Scalar
from tests.helpers.deployment import Network, until
from tests.helpers.own_data import OWN, paint

NAMES = ("east", "north", "south", "worker")  # the last one holds the class of the first task
STEPS = ("message waits for the node", "node waits for a client", "client's process", "server")
PARTS = {
    "Flower's client program": "import flwr.supernode.cli.flwr_clientapp",
    "and the app": "import client_app.app, client_app.node",
    "and what an answer without a model needs": "import client_app.client",
    "and torch": "import torch",
    "and timm, torchvision and the rest": "import client_app.learning",
    "and the bundled backbone": "import task.models.load as load; load.load_backbone('vit_glyphs', 'auto', 0, 'cpu')",
}


def messages(rounds: int, folder: Path) -> dict[str, Scalar]:
    """A run in which three nodes train in every round."""
    return OWN | {
        "num-clients": len(NAMES) - 1,
        "num-tasks": 1,
        "rounds-per-task": rounds + 1,  # the last one evaluates too
        "output-dir": str(folder / "runs"),
    }


def empty(rounds: int, folder: Path) -> dict[str, Scalar]:
    """A run whose first ``rounds`` rounds ask the first three nodes only."""
    values = OWN | {
        "num-clients": len(NAMES),
        "clients-per-round": len(NAMES) - 1,
        "rounds-per-task": rounds + 1,
        "output-dir": str(folder / "runs"),
    }
    config = parse(values)
    for seed in range(100_000):
        seeded = replace(config, seed=seed)
        if all(NAMES[-1] not in sample_clients(NAMES, seeded, r) for r in range(1, rounds + 1)):
            return values | {"seed": seed}
    raise SystemExit(f"no seed for {rounds} rounds: take fewer")


@dataclass
class Watch:
    """What is seen of the nodes while they work: times by node, in the order of the rounds, in seconds since 1970."""

    network: Network
    received: dict[int, list[float]] = field(default_factory=dict)
    started: dict[int, dict[int, float]] = field(default_factory=dict)  # by process
    sent: dict[int, list[float]] = field(default_factory=dict)
    ended: list[float] = field(default_factory=list)  # of rounds
    processor: list[float] = field(default_factory=list)  # of all clients' processes that have ended, after each round

    def __post_init__(self) -> None:
        nodes = range(len(NAMES) - 1)
        self._starters = {i: self.network.workers(f"supernode-{i}", "flower-superexec")[0] for i in nodes}
        for times in (self.received, self.sent):
            times.update((i, []) for i in nodes)
        self.started.update((i, {}) for i in nodes)

    def look(self, rounds: Path) -> None:
        """Note what has happened since the last look."""
        now = time.time()
        for i, starter in self._starters.items():
            log = self.network.log(f"supernode-{i}").read_text(errors="replace")
            for messages, words in ((self.received, "Receiving: train message"), (self.sent, "Sending: train message")):
                messages[i] += [now] * (log.count(words) - len(messages[i]))
            for child in Path(f"/proc/{starter}/task/{starter}/children").read_text().split():
                self.started[i].setdefault(int(child), now)
        lines = len(rounds.read_text().splitlines()) if rounds.exists() else 0
        if lines > len(self.ended):
            self.ended.append(now)
            times = [psutil.Process(starter).cpu_times() for starter in self._starters.values()]
            self.processor.append(sum(t.children_user + t.children_system for t in times))

    def steps(self, number: int) -> list[float]:
        """Seconds of each of ``STEPS`` in a round, counted from 0; from the end of the one before."""
        last = max(self.sent, key=lambda i: self.sent[i][number])
        received, sent = self.received[last][number], self.sent[last][number]
        start = max(begun for begun in self.started[last].values() if begun < sent)
        times = [self.ended[number - 1], received, max(start, received), sent, self.ended[number]]
        return [later - earlier for earlier, later in pairwise(times)]


class Loopback(Network):
    """Programs that look for work as often as ``poll`` says, in seconds."""

    poll = 0.0  # 0: as those of fcil run

    def _variables(self, name: str) -> dict[str, str]:
        poll = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": str(self.poll)} if self.poll else {}
        return super()._variables(name) | poll


@contextlib.contextmanager
def deployed(rounds: int, folder: Path, poll: float, *, train: bool) -> Iterator[tuple[Network, Path]]:
    """Start the programs and a run; gives its rounds.jsonl once its first messages are due."""
    folder.mkdir()
    with Loopback(folder) as network:
        network.poll = poll
        for i, name in enumerate(NAMES[:-1] if train else NAMES):
            paint(folder / "data" / name / ("ant" if name == NAMES[-1] else "bee"), 12)
            network.start_node(i, f'name="{name}" data-dir="{folder}/data/{name}" state-dir="{folder}/state/{name}"')
        network.submit(messages(rounds, folder) if train else empty(rounds, folder))
        yield network, folder / "runs" / "run" / "rounds.jsonl"


def print_empty(rounds: int, folder: Path, poll: float) -> None:
    """Seconds of rounds in which nobody has an image of the task's classes."""
    with deployed(rounds, folder, poll, train=False) as (_, lines):
        ends: list[float] = []

        def ended() -> bool:
            written = len(lines.read_text().splitlines()) if lines.exists() else 0
            ends.extend([time.time()] * (written - len(ends)))
            return written >= rounds

        until(ended, "rounds do not end", pause=0.02)
    seconds = [later - earlier for earlier, later in pairwise(ends[:rounds])]
    print(f"{len(seconds)} empty rounds, seconds by the clock: {spread(seconds)}")


def print_messages(rounds: int, folder: Path, poll: float) -> None:
    """Where the seconds of rounds go in which three nodes train on 12 images each."""
    with deployed(rounds, folder, poll, train=True) as (network, lines):
        until(lambda: network.count_in_log("supernode-0", "Receiving: train message"), "no training", pause=0.02)
        watch = Watch(network)

        def ended() -> bool:
            watch.look(lines)
            return len(watch.ended) >= rounds

        until(ended, "rounds do not end", pause=0.05)
    steps = [watch.steps(r) for r in range(1, rounds)]
    each = [later - earlier for earlier, later in pairwise(watch.ended[:rounds])]
    print(f"{len(each)} rounds with 12 images on each node, seconds by the clock: {spread(each)}")
    for name, seconds in zip(STEPS, zip(*steps, strict=True), strict=True):
        print(f"  {name}: {sum(seconds) / len(steps):.1f}")
    per_client = (watch.processor[rounds - 1] - watch.processor[0]) / len(steps) / (len(NAMES) - 1)
    print(f"processor seconds of a client's process: {per_client:.1f}")


def spread(seconds: Sequence[float]) -> str:
    """Mean, least and largest."""
    return f"{sum(seconds) / len(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


def print_parts() -> None:
    """Processor seconds of a fresh process that imports one part after the other."""
    lines = ["import time; before = 0.0"]
    for name, code in PARTS.items():
        lines += [code, f"now = time.process_time(); print(f'{{now - before:6.2f}}', {name!r}); before = now"]
    variables: Mapping[str, str] = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", "\n".join(lines)], env=variables, check=True)


def main() -> None:
    """Measure what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--poll", type=float, default=0.0, help="FLWR_SUPEREXEC_TASK_POLL_INTERVAL in seconds; else that of fcil run"
    )
    parser.add_argument("--parts", action="store_true")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds {args.rounds}: at least 2, as the time from one round to the next is measured")
    if args.parts:
        print_parts()
        return
    with tempfile.TemporaryDirectory() as folder:
        print_empty(args.rounds, Path(folder) / "empty", args.poll)
        print_messages(args.rounds, Path(folder) / "messages", args.poll)
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
