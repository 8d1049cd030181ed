"""fcil predict: classes of images, by the model of a run."""

import argparse

from server_app.cli.common import FAILED, OK, complain, positive
from task.keys import AUTO


def describe(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    parser.description = (
        "Print the most probable classes of images. Exit code 1 if there is no model, or an image cannot be read; the "
        "others are answered."
    )
    parser.add_argument("model", metavar="RUN_DIR", help="a run's folder, or a file that fcil export wrote")
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="image files of any size")
    parser.add_argument("--top", type=positive, default=1, metavar="K", help="classes per image (default: 1)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--device", default=AUTO, help="auto, cpu, cuda or cuda:N (default: auto)")


def command(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    from server_app.cli.predictions import as_json, as_table, classify_files
    from task.inference import load_predictor

    answers = classify_files(load_predictor(args.model, args.device), [*args.images, *args.rest], args.top)
    print(as_json(answers) if args.json else "\n".join(as_table(answers)))
    return max([OK, *(complain(answer.error, FAILED) for answer in answers if answer.error)])
