"""A long run through Flower's simulation with clients that fail at random: memory must stay flat and no round be lost.

python -m benchmarks.soak                200 rounds, 50 clients, 10 % of the trainings fail; KEY=VALUE may follow
python -m benchmarks.soak --clients 1000 --per-round 100 --rounds 10 --failures 0

The app is a copy of this checkout whose clients are those of benchmarks.soak_client. The images are noise around a
colour, five for each client and task. Resident memory is read after every round, of each program that Flower and Ray
have started, the largest process of each; "all" is the sum, which counts what processes share in each of them.
"""

import argparse
import os
import platform
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil

from benchmarks.soak_client import SHARE, fails
from server_app.run_files.paths import project_folder
from server_app.run_files.status import read_results
from server_app.run_keys import complete_run_keys, read_words
from server_app.simulation.processes import POLL, interruptible
from server_app.simulation.superlink import FlowerRun, default_workers
from task.config.parsing import parse
from task.message import Scalar

SERVER, WORKERS = "flwr-simulation", "ray::ClientAppActor"  # the former has the ServerApp too
WARM = 20  # rounds of a task after which memory must be flat
MAX_GROWTH = 10.0  # MiB in 100 rounds, of any role
TASKS, CLASSES, SIDE = 2, 12, 16
Sample = dict[str, float]


@contextmanager
def app_with_failures() -> Iterator[Path]:
    """A copy of the project, whose ClientApp is the one that fails."""
    project = project_folder()
    with tempfile.TemporaryDirectory(prefix="fcil-soak-") as folder:
        copy = Path(folder)
        for name in ("task", "client_app", "strategies", "server_app", "benchmarks"):
            shutil.copytree(project / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("LICENSE", "README.md", "Makefile"):
            shutil.copy(project / name, copy / name)
        settings = (project / "pyproject.toml").read_text()
        for old, new in (
            ('clientapp = "client_app.app:app"', 'clientapp = "benchmarks.soak_client:app"'),
            ('    "/LICENSE",\n', '    "/LICENSE",\n    "benchmarks/**/*.py",\n'),
        ):
            if old not in settings:
                raise SystemExit(f"pyproject.toml has no {old!r} any more")
            settings = settings.replace(old, new)
        (copy / "pyproject.toml").write_text(settings)
        yield copy


def noise(path: Path, clients: int) -> None:
    """Images of CLASSES colours, as many of each as there are clients, a fifth of them for testing."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(CLASSES), clients)
    colours = rng.integers(40, 216, (CLASSES, 1, 1, 3))
    images = (colours[labels] + rng.normal(0, 30, (len(labels), SIDE, SIDE, 3))).clip(0, 255).astype(np.uint8)
    np.savez(path, images=images, labels=labels, split=np.arange(len(labels)) % 5 == 0)


def memory(home: Path) -> Sample:
    """MiB of each program now, and of all together; processes are those whose environment names ``home``."""
    sizes: defaultdict[str, list[float]] = defaultdict(list)
    for process in psutil.process_iter(["environ", "memory_info", "cmdline"]):
        if (process.info["environ"] or {}).get("FLWR_HOME") == str(home):
            sizes[_program(process.info["cmdline"])].append(process.info["memory_info"].rss / 2**20)
    return {name: max(values) for name, values in sizes.items()} | {"all": sum(map(sum, sizes.values()))}


def _program(words: list[str]) -> str:
    """Its script, or its file; Ray's workers carry what they do behind a dot or blanks."""
    names = [Path(word).name for word in words if word and not word.startswith("-")]
    return next((name.split(".run")[0].strip() for name in names if not name.startswith("python")), "python")


def soak(values: dict[str, Scalar], folder: Path) -> tuple[list[Sample], str]:
    """Memory after each round, and Flower's last word on the run."""
    samples: list[Sample] = []
    config = parse(values)
    with app_with_failures() as app, interruptible() as check, FlowerRun(app, check) as flower:
        flower.submit(values, config.num_clients, default_workers(config))
        while flower.is_running():
            with suppress(OSError):
                if len((folder / "rounds.jsonl").read_text().splitlines()) > len(samples):
                    samples.append(memory(flower.log.parent))
            time.sleep(POLL)
        status = flower.status()
        shutil.copy(flower.log, folder / "flower.log")
    return samples, " ".join(status)


def slope(samples: list[Sample], name: str) -> float:
    """MiB in 100 rounds by least squares, mean over the tasks, of each without its first WARM rounds; NaN if too short.

    A task's end is no slope but a step: the first evaluation and the first pictures load what stays loaded.
    """
    size = len(samples) // TASKS
    parts = [[s.get(name, 0.0) for s in samples[t * size + WARM : (t + 1) * size]] for t in range(TASKS)]
    return 100 * float(np.mean([np.polyfit(range(len(p)), p, 1)[0] if len(p) > WARM else np.nan for p in parts]))


def report(samples: list[Sample], results: dict, share: float) -> bool:
    """Print what was seen; whether all rounds are there, the right clients failed, and memory is flat."""
    rounds = results["rounds"]
    marks = sorted({n for n in (1, WARM, len(samples) // 2, len(samples)) if 0 < n <= len(samples)})
    print(f"{'MiB':<20}" + "".join(f"{'round ' + str(n):>11}" for n in marks) + f"{'largest':>11}{'in 100 rounds':>15}")
    for name in sorted(samples[-1], key=samples[-1].__getitem__, reverse=True):
        sizes = [sample.get(name, 0.0) for sample in samples]
        cells = "".join(f"{sizes[n - 1]:>11.0f}" for n in marks)
        print(f"{name:<20}{cells}{max(sizes):>11.0f}{slope(samples, name):>+15.1f}")
    expected_failures = [
        [name for name in r["participants"] if fails(int(name[-4:]), n)] for n, r in enumerate(rounds, 1)
    ]
    failed = [[failure["name"] for failure in r["failures"]] for r in rounds]
    total = sum(len(r["participants"]) for r in rounds)
    expected = results["num_tasks"] * results["rounds_per_task"]
    print(
        f"{len(rounds)} of {expected} rounds, {sum(map(len, failed))} failures in {total} trainings (share {share:g})"
    )
    print(f"clients that failed are those that were to: {expected_failures == failed}; status {results['status']}")
    print(f"{results['seconds']['total'] / 60:.1f} minutes; final accuracy {results['metrics']['last_accuracy']:.3f}")
    flat = not any(slope(samples, name) > MAX_GROWTH for name in (SERVER, WORKERS))
    print(f"server and workers, at most {MAX_GROWTH:g} MiB in 100 rounds: {'met' if flat else 'NOT met'}")
    return flat and expected_failures == failed and len(rounds) == expected and results["status"] == "finished"


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--per-round", type=int, default=0, help="clients drawn in each round; 0 = all")
    parser.add_argument("--rounds", type=int, default=200, help=f"in all; a multiple of the {TASKS} tasks")
    parser.add_argument("--failures", type=float, default=0.1, help="share of trainings that fail")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="run keys")
    args = parser.parse_args()
    os.environ[SHARE] = str(args.failures)
    with tempfile.TemporaryDirectory(prefix="fcil-soak-run-") as folder:
        noise(Path(folder) / "noise.npz", args.clients)
        keys = {
            **{"dataset": "npz", "data-dir": f"{folder}/noise.npz", "image-size": SIDE, "partition": "iid"},
            **{"num-clients": args.clients, "clients-per-round": args.per_round, "num-tasks": TASKS},
            **{"rounds-per-task": args.rounds // TASKS, "local-epochs": 1, "device": "cpu"},
            **{"output-dir": folder, "run-name": "run"},
        }
        values = complete_run_keys(keys | read_words(args.settings))
        print(f"python {platform.python_version()}, {args.clients} clients, {args.rounds} rounds; {args.settings}")
        samples, status = soak(values, Path(folder) / "run")
        results = read_results(Path(folder) / "run")
        print(status)
        return 0 if report(samples, results, args.failures) else 1


if __name__ == "__main__":
    sys.exit(_main())
