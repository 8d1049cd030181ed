"""The subcommands of fcil, except for fcil run. Heavy imports wait until the command is run."""

import argparse
import json
from functools import partial
from pathlib import Path

from server_app.cli.common import FAILED, MISTAKE, OK, complain, positive
from server_app.run_keys import complete_run_keys, read_words
from server_app.simulation.processes import Interrupted
from task.config.parsing import parse
from task.keys import AUTO

DEVICES = "auto, cpu, cuda or cuda:N (default: auto)"
MODELS = "a run's folder, or a file that fcil export wrote"


def describe_report(parser: argparse.ArgumentParser) -> None:
    """Arguments of fcil report."""
    parser.description = "Write tables and pictures from the files of one run, or of several to compare them."
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="folder with a results.json")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder to write to; needed for several runs")
    parser.set_defaults(command=_report)


def _report(args: argparse.Namespace) -> int:
    from server_app.report.write import write_report

    print(*write_report(args.runs, args.output), sep="\n")
    return OK


def describe_bench(parser: argparse.ArgumentParser) -> None:
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
    parser.set_defaults(command=_bench)


def _bench(args: argparse.Namespace) -> int:
    from server_app.bench.runner import Bench
    from server_app.bench.suite import read_suite

    suite = read_suite(args.suite, read_words(args.words))
    try:
        failed = Bench(suite, args.jobs, args.flower, partial(print, flush=True)).run()
    except Interrupted as stop:
        return complain("stopped; the same command continues the suite", 128 + stop.number)
    print(suite.folder / "table.md", suite.folder / "report.html", sep="\n")
    return complain(f"failed: {', '.join(run.name for run in failed)}", FAILED) if failed else OK


def describe_predict(parser: argparse.ArgumentParser) -> None:
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
    parser.set_defaults(command=_predict)


def _predict(args: argparse.Namespace) -> int:
    from server_app.cli.predictions import as_table, classify_files
    from task.inference import load_predictor

    answers = classify_files(load_predictor(args.model, args.device), args.words, args.top)
    print(json.dumps(answers, indent=1) if args.json else as_table(answers))
    return max([OK, *(complain(answer["error"], FAILED) for answer in answers if "error" in answer)])


def describe_export(parser: argparse.ArgumentParser) -> None:
    """Arguments of fcil export."""
    parser.description = (
        "Write a model with its frozen backbone, run keys and class names into one file, which fcil predict and "
        "task.inference.load_predictor read without the run's folder and without a network."
    )
    parser.add_argument("model", metavar="RUN_DIR", help=MODELS)
    parser.add_argument("out", type=Path, metavar="OUT", help="file to write, such as model.safetensors")
    parser.add_argument("--onnx", type=Path, metavar="OUT.onnx", help="an ONNX file too: pixels in, probabilities out")
    parser.set_defaults(command=_export)


def _export(args: argparse.Namespace) -> int:
    from server_app.export import require_onnx, write_onnx, write_self_contained
    from task.inference import load_predictor

    if args.out.suffix == ".onnx":
        return complain(f"{args.out} would not be an ONNX file: name OUT.safetensors, and --onnx {args.out}", MISTAKE)
    if args.onnx:
        require_onnx()  # before anything is written
    predictor = load_predictor(args.model, "cpu")
    write_self_contained(predictor, args.out)
    if args.onnx:
        write_onnx(predictor, args.onnx)
    print(*filter(None, [args.out, args.onnx]), sep="\n")
    return OK


def describe_privacy(parser: argparse.ArgumentParser) -> None:
    """Arguments of fcil privacy."""
    parser.description = (
        "Reconstruct images from the class statistics that one client of a run sends, as a curious server could, and "
        "compare them with its real images (SSIM). Writes privacy.json and privacy.png into the run's folder. Exit "
        "code 1 if there is no model, 2 if the run's method sends nothing to invert."
    )
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="a run's folder; its data set must be here")
    parser.add_argument("--client", type=int, default=0, metavar="N", help="whose statistics, from 0 (default: 0)")
    parser.add_argument("--target", choices=("mean", "sample"), default="mean", help="class mean, or a Gaussian's draw")
    parser.add_argument("--classes", type=positive, default=8, metavar="K", help="at most, fewest images first")
    parser.add_argument("--steps", type=positive, default=300, metavar="N", help="of the attack (default: 300)")
    parser.add_argument("--device", default=AUTO, help=DEVICES)
    parser.set_defaults(command=_privacy)


def _privacy(args: argparse.Namespace) -> int:
    from server_app.privacy.inversion import attack
    from server_app.privacy.inversion_files import format_table, write_inversions

    inversions = attack(args.run, args.client, args.target, args.classes, args.steps, args.device)
    print(*format_table(inversions), sep="\n")
    print(*write_inversions(args.run, inversions, args.client, args.target), sep="\n")
    return OK


def describe_doctor(parser: argparse.ArgumentParser) -> None:
    """Arguments of fcil doctor."""
    parser.description = (
        "Check versions, device, memory, disk, weights and data, and time a training step of a run with these keys. "
        "Nothing is written. Exit code 1 if something is a problem, 2 if a key was mistyped."
    )
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="run keys, as of fcil run")
    parser.set_defaults(command=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    from server_app.doctor.machine import examine

    code = OK
    for finding in examine(parse(complete_run_keys(read_words(args.words)))):
        print(finding, flush=True)
        code = FAILED if finding.level == "problem" else code
    return code
