"""The fcil command line and its subcommands."""

import argparse
from collections.abc import Sequence
from types import ModuleType

from server_app.cli import bench, doctor, export, predict, privacy, report, run
from server_app.cli.common import FAILED, MISTAKE, complain
from server_app.errors import ExportError, LaunchError, PicturesUnavailable, ReportError
from task.keys import ConfigError, ModelError

COMMANDS: dict[str, tuple[ModuleType, str]] = {
    "run": (run, "run an experiment in simulation, on this machine"),
    "report": (report, "tables and pictures of one run, or of several compared"),
    "bench": (bench, "a suite of runs, those left to do, and their table"),
    "predict": (predict, "classes of images, by the model of a run"),
    "export": (export, "the model of a run as one file for use elsewhere"),
    "privacy": (privacy, "attack the class statistics of a run; pictures"),
    "doctor": (doctor, "whether this machine can do a run, and how fast"),
}
LISTS = ("run", "bench", "predict", "doctor")  # commands whose last argument is a list


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line, by default that of this process.

    Returns:
        the exit code.

    Raises:
        SystemExit: for --help, or if the command line is wrong.
    """
    parser = _parser()
    args, rest = parser.parse_known_args(arguments)
    # argparse leaves the words of a list that come after an option in rest
    if any(word.startswith("-") for word in rest) or (rest and args.name not in LISTS):
        parser.error(f"unrecognised: {' '.join(rest)}")
    args.rest = rest
    try:
        return int(COMMANDS[args.name][0].command(args))
    except ConfigError as error:
        return complain(str(error), MISTAKE)
    except (ExportError, LaunchError, ModelError, OSError, PicturesUnavailable, ReportError) as error:
        return complain(str(error), FAILED)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fcil", description="Federated class-incremental learning.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="name")
    for name, (module, summary) in COMMANDS.items():
        module.describe(commands.add_parser(name, help=summary))
    return parser
