"""fcil export: the model of a run as one file for use elsewhere."""

import argparse
from pathlib import Path

from server_app.cli.common import MISTAKE, MODELS, OK, complain


def describe(parser: argparse.ArgumentParser) -> None:
    """Arguments of fcil export."""
    parser.description = (
        "Write a model with its frozen backbone, run keys and class names into one file, which fcil predict and "
        "task.inference.load_predictor read without the run's folder and without a network."
    )
    parser.add_argument("model", metavar="RUN_DIR", help=MODELS)
    parser.add_argument("out", type=Path, metavar="OUT", help="file to write, such as model.safetensors")
    parser.add_argument("--onnx", type=Path, metavar="OUT.onnx", help="an ONNX file too: pixels in, probabilities out")
    parser.set_defaults(command=_run_command)


def _run_command(args: argparse.Namespace) -> int:
    from server_app.export import require_onnx, write_onnx, write_self_contained
    from task.inference import load_predictor

    if args.out.suffix == ".onnx":
        return complain(f"{args.out} would not be an ONNX file: name OUT.safetensors, and --onnx {args.out}", MISTAKE)
    for path in filter(None, [args.out, args.onnx]):
        if path.exists() and not path.is_file():  # a device, such as /dev/null, would be replaced
            return complain(f"{path} is there and is no file: name a new one, or one that may be replaced", MISTAKE)
    if args.onnx:
        require_onnx()  # before anything is written
    predictor = load_predictor(args.model, "cpu")
    write_self_contained(predictor, args.out)
    if args.onnx:
        write_onnx(predictor, args.onnx)
    print(*filter(None, [args.out, args.onnx]), sep="\n")
    return OK
