"""fcil bench: the runs of a suite that are left to do, and their table."""

import argparse
from functools import partial
from pathlib import Path

from server_app.cli.common import FAILED, OK, complain, positive
from server_app.run_keys import read_words
from server_app.simulation.processes import Interrupted


def describe(parser: argparse.ArgumentParser) -> None:
    """Arguments of fcil bench."""
    parser.description = (
        "Run the variants, partitions and seeds of a suite, each without Flower in a process of its own, and write "
        "table.md, report.html and pictures after each. Finished runs are skipped, so that a suite that was ended is "
        "continued by the same command; others begin anew. Exit code 0 if all finished, 1 if one failed, 2 if "
        "something in the suite cannot be."
    )
    parser.add_argument("suite", type=Path, metavar="SUITE.yaml", help="such as suites/digits.yaml")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="run keys for all runs, such as data-dir=...")
    parser.add_argument("--jobs", type=positive, default=1, metavar="N", help="runs at a time (default: 1)")
    parser.add_argument("--flower", action="store_true", help="every run through Flower's simulation")
    parser.set_defaults(command=_run_command)


def _run_command(args: argparse.Namespace) -> int:
    from server_app.bench.runner import Bench
    from server_app.bench.suite import read_suite

    suite = read_suite(args.suite, read_words(args.words))
    try:
        failed = Bench(suite, args.jobs, args.flower, partial(print, flush=True)).run()
    except Interrupted as stop:
        return complain("stopped; the same command continues the suite", 128 + stop.number)
    print(suite.folder / "table.md", suite.folder / "report.html", sep="\n")
    return complain(f"failed: {', '.join(run.name for run in failed)}", FAILED) if failed else OK
