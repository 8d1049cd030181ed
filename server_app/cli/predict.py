"""fcil predict: classes of images, by the model of a run."""

import argparse
import json

from server_app.cli.common import DEVICES, FAILED, MODELS, OK, complain, positive
from task.keys import AUTO


def describe(parser: argparse.ArgumentParser) -> None:
    """Arguments of fcil predict."""
    parser.description = (
        "Print the most probable classes of images. Exit code 1 if there is no model, or an image cannot be read; the "
        "others are answered."
    )
    parser.add_argument("model", metavar="RUN_DIR", help=MODELS)
    parser.add_argument("words", nargs="+", metavar="IMAGE", help="image files of any size")
    parser.add_argument("--top", type=positive, default=1, metavar="K", help="classes per image (default: 1)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--device", default=AUTO, help=DEVICES)
    parser.set_defaults(command=_run_command)


def _run_command(args: argparse.Namespace) -> int:
    from server_app.cli.predictions import as_table, classify_files
    from task.inference import load_predictor

    answers = classify_files(load_predictor(args.model, args.device), args.words, args.top)
    print(json.dumps(answers, indent=1) if args.json else as_table(answers))
    return max([OK, *(complain(answer["error"], FAILED) for answer in answers if "error" in answer)])
