"""fcil problem: the images, partition and backbone of a run as plain files, for other people's code."""

import argparse
from pathlib import Path

from server_app.cli.common import OK
from server_app.run_keys import complete_run_keys, read_words
from task.config.parsing import parse
from task.keys import ConfigError


def describe(parser: argparse.ArgumentParser) -> None:
    """Arguments of fcil problem."""
    parser.description = (
        "Write images, labels, class order, every client's images by task and round, the frozen backbone and the seeds "
        "of a run with these keys into a folder, as .npz, .json and .safetensors, and a README.md that says how to "
        "read them. Nothing is trained. Exit code 2 if a key was mistyped or the folder holds files already."
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write, new or empty")
    parser.add_argument("words", nargs="*", default=[], metavar="KEY=VALUE", help="run keys, as for fcil run")
    parser.set_defaults(command=_run_command)


def _run_command(args: argparse.Namespace) -> int:
    from server_app.problem import write_problem

    name, equals, _ = str(args.out).partition("=")
    if equals and "/" not in name:
        raise ConfigError(f"{str(args.out)!r} is not a folder's name: the folder to write comes first, then run keys.")
    print(*write_problem(parse(complete_run_keys(read_words(args.words))), args.out), sep="\n")
    return OK
