"""fcil export: the model of a run as one file for use elsewhere."""

import argparse
from pathlib import Path

from server_app.cli.common import MISTAKE, MODELS, OK, complain, tell_unfinished
from task.models.metadata import MODEL


def describe(parser: argparse.ArgumentParser) -> None:
    """Arguments of fcil export."""
    parser.description = (
        "Write a model with its frozen backbone, run keys and class names into one file, which fcil predict and "
        "task.inference.load_predictor read without the run's folder and without a network. A file that is there is "
        "replaced."
    )
    parser.add_argument("model", metavar="RUN_DIR", help=MODELS)
    parser.add_argument("out", type=Path, metavar="OUT", help="file to write, such as model.safetensors")
    parser.add_argument("--onnx", type=Path, metavar="OUT.onnx", help="an ONNX file too: pixels in, probabilities out")
    parser.set_defaults(command=_run_command)


def _run_command(args: argparse.Namespace) -> int:
    if refusal := _refuse(Path(args.model), args.out, args.onnx):
        return complain(refusal, MISTAKE)
    from server_app.export import require_onnx, write_onnx, write_self_contained
    from task.inference import load_predictor

    if args.onnx:
        require_onnx()  # before anything is written
    predictor = load_predictor(args.model, "cpu")
    tell_unfinished(predictor.metadata)
    write_self_contained(predictor, args.out)
    if args.onnx:
        write_onnx(predictor, args.onnx)
    print(*filter(None, [args.out, args.onnx]), sep="\n")
    return OK


def _refuse(model: Path, out: Path, onnx: Path | None) -> str:
    """Why these files cannot be written; empty if they can."""
    if out.suffix == ".onnx":
        return f"{out} would not be an ONNX file: name OUT.safetensors, and --onnx {out}"
    if onnx and onnx.resolve() == out.resolve():
        return f"{out} cannot be both files: give --onnx another name"
    for path in filter(None, [out, onnx]):
        if path.resolve() in (model.resolve(), (model / MODEL).resolve()):
            return f"{path} is the model itself: name another file"
        if path.exists() and not path.is_file():  # a device, such as /dev/null, would be replaced
            return f"{path} is there and is no file: name a new one, or one that may be replaced"
        if not path.absolute().parent.is_dir():
            return f"{path} cannot be written: make the folder {path.parent} first"
    return ""
