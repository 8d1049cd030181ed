"""fcil report: tables and pictures of one run, or of several compared."""

import argparse
from pathlib import Path

from server_app.cli.common import FAILED, OK
from server_app.errors import ReportError

_COMPARISON = Path("comparison")


def describe(parser: argparse.ArgumentParser) -> None:
    """Arguments of fcil report."""
    parser.description = (
        "Write tables and pictures from the files of one run, or of several to compare them. Exit code 1 if a folder "
        "holds no run that can be read; the others are compared."
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="folder with a results.json")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder to write to; comparison/ for several")
    parser.set_defaults(command=_run_command)


def _run_command(args: argparse.Namespace) -> int:
    from server_app.report.write import write_report

    runs, lost = [path.parent if path.name == "results.json" else path for path in args.runs], list[ReportError]()
    if not args.output:  # "fcil report *" may be typed twice
        runs = [run for run in runs if run != _COMPARISON]
    output = args.output or (_COMPARISON if len(set(runs)) > 1 else None)
    print(*write_report(runs, output, lost.append), sep="\n")
    return FAILED if lost else OK
