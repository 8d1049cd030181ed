"""Peak memory of a whole run with 10 and with 100 virtual clients, each in a process of its own.

python -m benchmarks.memory                     three methods on digits; some minutes
python -m benchmarks.memory hgp KEY=VALUE...    one method, and run keys of every run

The clients share the same images, and what they have trained is averaged as it comes and let go. So 100 clients need
what 10 clients need, but for their statistics.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from task.utils.memory import peak_memory

CLIENTS = ((10, 10), (100, 10), (100, 100))  # clients, and how many of them take part in each round
METHODS = ("hgp", "fppl", "pip")  # without hepco, which keeps the prompts of all clients of a round
KEYS = {"num-tasks": "2", "rounds-per-task": "2", "local-epochs": "1", "partition": "iid", "device": "cpu"}
REQUIRED = 1.10


def measure_run(settings: dict[str, str]) -> tuple[float, float]:
    """MiB at the peak of one run in a fresh process, and MiB that its clients sent in the largest round.

    Raises:
        SystemExit: the run failed; says why.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = [f"{name}={value}" for name, value in (settings | {"output-dir": folder, "run-name": "run"}).items()]
        command = [sys.executable, "-m", "benchmarks.memory", "--one", *words]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{done.stderr}the run ended with {done.returncode}")
        peak = float(done.stdout.split()[-1])
        results = json.loads((Path(folder) / "run" / "results.json").read_text())
    return peak, max(r["bytes_up"] for r in results["rounds"]) / 2**20


def _one(words: list[str]) -> int:
    from server_app.cli.main import main

    code = main(["run", "--in-process", *words])
    print(peak_memory() / 2**20)
    return code


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="METHOD or KEY=VALUE")
    parser.add_argument("--one", action="store_true", help="a single run with these keys, then its peak")
    args = parser.parse_args()
    if args.one:
        return _one(args.words)
    keys = KEYS | dict(word.split("=", 1) for word in args.words if "=" in word)
    print(f"python {platform.python_version()}, {platform.machine()}, {' '.join(f'{k}={v}' for k, v in keys.items())}")
    print(f"{'method':<8} {'clients':>7} {'a round':>7} {'peak MiB':>9} {'ratio':>6} {'sent in one, MiB':>18}")
    ratios = []
    for method in [word for word in args.words if "=" not in word] or METHODS:
        first = 0.0
        for clients, per_round in CLIENTS:
            changes = {"method": method, "num-clients": str(clients), "clients-per-round": str(per_round)}
            peak, sent = measure_run(keys | changes)
            first = first or peak
            ratios.append(peak / first)
            print(
                f"{method:<8} {clients:>7} {per_round:>7} {peak:>9.0f} {peak / first:>6.3f} {sent:>18.1f}", flush=True
            )
    met = max(ratios) <= REQUIRED
    print(f"required: at most {REQUIRED}: {'met' if met else 'NOT met'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(_main())
