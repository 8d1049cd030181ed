"""Exit codes, error messages and argument types of all commands."""

import argparse
import sys
from typing import TYPE_CHECKING

from task.config.schema import APPEARING

if TYPE_CHECKING:
    from task.models.metadata import ModelMetadata

DEVICES = "auto, cpu, cuda or cuda:N (default: auto)"
MODELS = "a run's folder, or a file that fcil export wrote"
OK, FAILED, MISTAKE = 0, 1, 2  # exit codes; 128 + the signal's number when one ended it


def positive(text: str) -> int:
    """Parse a whole number from 1 of the command line."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def share(text: str) -> float:
    """Parse GPUs of a client on the command line: a share of one, or a whole number; Ray takes no others."""
    number = float(text)
    if not 0.0001 <= number < 1 and not (number > 0 and number.is_integer()):
        raise argparse.ArgumentTypeError(f"{text} is no share of a GPU from 0.0001 to 1, no whole number")
    return number


def tell_unfinished(metadata: "ModelMetadata") -> None:
    """Say on standard error that a model is of a run that has tasks left, whose classes it cannot know."""
    begun, total = len(metadata.task_sizes), int(metadata.config["num-tasks"])
    if begun < total and metadata.config.get("class-order") != APPEARING:
        complain(f"note: this model has come to task {begun} of {total}, and knows no class of later ones", OK)


def complain(message: str, code: int) -> int:
    """Write a message for people to standard error; returns ``code``."""
    print(f"fcil: {message}", file=sys.stderr)
    return code
