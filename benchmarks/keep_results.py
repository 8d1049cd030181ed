"""Copy what a table needs of a suite's finished runs into a folder small enough to be published.

    python -m benchmarks.keep_results runs/suites/cifar100-cpu benchmarks/results/cifar100-cpu

Of each run it keeps one file: results.json without confusion matrix, rounds and clients, but with all that config.yaml
says, also the paths in it. ``fcil report`` reads such folders, and ``fcil bench`` with a copy of them as
``output-dir`` goes on with a suite of the same keys, images and weights, wherever these lie.
"""

import argparse
import json
from pathlib import Path

import yaml

from server_app.errors import ReportError
from server_app.report.runs import flat, load_run

LEFT_OUT = ("confusion", "rounds", "clients")


def keep(run: Path, target: Path) -> None:
    """Write the small form of a finished run's folder into another folder."""
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    small = {name: value for name, value in results.items() if name not in LEFT_OUT}
    config = run / "config.yaml"  # a run that is of this form already has none
    keys = yaml.safe_load(config.read_text(encoding="utf-8")) if config.exists() else {}
    target.mkdir(parents=True, exist_ok=True)
    (target / "results.json").write_text(json.dumps(small | flat(keys)) + "\n", encoding="utf-8")


def keep_all(source: Path, target: Path) -> list[Path]:
    """Keep all finished runs below ``source`` that can be read; returns their folders, relative to it."""
    kept = []
    for folder in sorted(path.parent for path in source.rglob("results.json")):
        try:
            loaded = load_run(folder)
        except ReportError as error:
            print(f"left out: {error}")
            continue
        if loaded.finished and loaded.has_run_keys:
            keep(folder, target / folder.relative_to(source))
            kept.append(folder.relative_to(source))
    return kept


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the suite's output-dir")
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    kept = keep_all(args.source, args.target)
    if not kept:
        parser.error(f"no finished run in {args.source}")
    print(f"{len(kept)} runs in {args.target}")


if __name__ == "__main__":
    _main()
