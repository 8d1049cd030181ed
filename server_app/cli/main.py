"""The fcil command line and its subcommands."""

import argparse
import io
import signal
import sys
from collections.abc import Sequence

from server_app.cli import bench, cache, doctor, export, nodes, predict, privacy, problem, report, run
from server_app.cli.common import FAILED, MISTAKE, OK, complain
from server_app.cli.progress import output_is_closed
from server_app.errors import ExportError, LaunchError, PicturesUnavailable, ReportError
from task.config.schema import known_keys
from task.keys import ConfigError, ModelError

COMMANDS = {
    "run": (run.describe, "run an experiment in simulation, on this machine"),
    "report": (report.describe, "tables and pictures of one run, or of several compared"),
    "bench": (bench.describe, "a suite of runs, those left to do, and their table"),
    "predict": (predict.describe, "classes of images, by the model of a run"),
    "export": (export.describe, "the model of a run as one file for use elsewhere"),
    "privacy": (privacy.describe, "attack the class statistics of a run; pictures"),
    "problem": (problem.describe, "a run's images, partition and backbone as plain files, for other code"),
    "cache": (cache.describe, "features that are kept on disk for all runs; delete them"),
    "nodes": (nodes.describe, "the nodes of a deployment: who is online, and which id is which node"),
    "doctor": (doctor.describe, "whether this machine can do a run, and how fast"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line, by default that of this process; returns the exit code.

    Raises:
        SystemExit: for --help, or if the command line is wrong.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # names that the terminal cannot show end no command
        sys.stdout.reconfigure(errors="backslashreplace")
    parser = _parser()
    args, rest = parser.parse_known_args(arguments)
    # argparse leaves the words of a list that come after an option in rest
    if any(word.startswith("-") for word in rest) or (rest and "words" not in args):
        keys = [f"; write {key}=..." for key in (word.strip("-").split("=")[0] for word in rest) if key in known_keys()]
        parser.error(f"unrecognised: {' '.join(rest)}{''.join(keys[:1])}")
    if rest:
        args.words += rest
    try:
        code = int(args.command(args))
        sys.stdout.flush()
        return code
    except ConfigError as error:
        return complain(str(error), MISTAKE)
    except KeyboardInterrupt:  # runs, and what they leave, are seen to in run and bench
        return complain("stopped", 128 + signal.SIGINT)
    except BrokenPipeError as error:
        return OK if output_is_closed() else complain(str(error), FAILED)
    except (ExportError, LaunchError, ModelError, OSError, PicturesUnavailable, ReportError) as error:
        return complain(str(error), FAILED)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("fcil", description="Federated class-incremental learning.", allow_abbrev=False)
    subcommands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (describe, summary) in COMMANDS.items():
        describe(subcommands.add_parser(name, help=summary, allow_abbrev=False))
    return parser
