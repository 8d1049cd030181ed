"""What it saves to compute the query q(x) of an image once: seconds of a round's work beside the server phase.

python -m benchmarks.query_cache                            four methods on digits; some minutes
python -m benchmarks.query_cache fppl hepco KEY=VALUE...    some of them, and run keys of every run

"Without" asks the backbone for q(x) in every step, statistics and evaluation, as public code does. Both forms run in
this process, in turns, on the same data; a round is local training, statistics and evaluation of all clients. With
augmentation every training step needs a query of its own in both. Seconds are those of this process on the CPU, so that
other work on the machine does not count.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import torch

from server_app.rounds.run import run_experiment
from server_app.transport.in_process import InProcessTransport
from task.config.parsing import parse, parse_text
from task.message import Scalar
from task.models import feature_cache as queries
from task.models.model import Model

CLIENTS, TASKS, ROUNDS = 10, 2, 2
PARTS = ("client_train", "client_statistics", "evaluate")
# the server phase is not timed
SHORT: dict[str, dict[str, Scalar]] = {
    "hepco": {"hepco-generator-steps": 1, "hepco-prompt-steps": 1, "hepco-head-steps": 1},
}
CASES = {"fppl": ("none", "crop"), "hepco": ("none", "crop"), "head-only": ("none", "crop"), "ncm": ("none",)}


def seconds(method: str, augmentation: str, keys: dict[str, Scalar], reuse: bool) -> float:
    """Seconds of one round of a short run, from an empty cache; ``reuse`` says whether queries are kept at all."""
    settings: dict[str, Scalar] = {"method": method, "augmentation": augmentation}
    settings |= {"num-tasks": TASKS, "rounds-per-task": ROUNDS, "num-clients": CLIENTS} | SHORT.get(method, {}) | keys
    without_cache = nullcontext() if reuse else patch.object(Model, "reuses_query", False)
    with tempfile.TemporaryDirectory() as folder, without_cache, patch("time.perf_counter", time.process_time):
        queries.CACHE = queries.BatchCache(queries.CACHE_BYTES)
        # what is kept on disk is computed before the first round, or by an earlier run
        config = replace(parse(settings | {"output-dir": folder, "run-name": "run"}), feature_cache="off")
        directory = run_experiment(config, InProcessTransport(config.num_clients))
        results = json.loads((directory / "results.json").read_text())
    return sum(results["seconds"].get(part, 0.0) for part in PARTS) / len(results["rounds"])


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="METHOD or KEY=VALUE", help="run keys of every run, unquoted")
    parser.add_argument("--repeats", type=int, default=3, help="of each form; the median counts")
    args = parser.parse_args()
    keys = parse_text(dict(word.split("=", 1) for word in args.words if "=" in word))
    methods = [word for word in args.words if "=" not in word] or list(CASES)
    if unknown := set(methods) - set(CASES):
        parser.error(f"no such method here: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    print(f"{CLIENTS} clients, {TASKS} tasks of {ROUNDS} rounds; python {platform.python_version()}, ", end="")
    print(f"torch {torch.__version__}, {platform.machine()}; medians of {args.repeats}")
    print(f"{'method':<10} {'augmentation':<13} {'with, s':>8} {'without, s':>11} {'ratio':>7}")
    seconds("fppl", "none", keys, True)  # warm up
    for method, augmentation in [(m, a) for m in methods for a in CASES[m]]:
        pairs = [[seconds(method, augmentation, keys, reuse) for reuse in (True, False)] for _ in range(args.repeats)]
        cached, uncached = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(
            f"{method:<10} {augmentation:<13} {cached:>8.3f} {uncached:>11.3f} {uncached / cached:>6.2f}x", flush=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(_main())
