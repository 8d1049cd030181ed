"""The ``fcil`` command: runs with unquoted keys, progress and a truthful exit code, and their reports."""

import argparse
import contextlib
import json
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from server_app.board import require_tensorboard
from server_app.errors import ExportError, LaunchError, RunError
from server_app.launcher import (
    POLL,
    FlowerRun,
    Interrupted,
    default_workers,
    interruptible,
    last_lines,
)
from server_app.places import claim, mark_failed, project_folder, read_results, run_directory
from server_app.progress import describe_round
from server_app.settings import completed, read_words
from task.config import Config, ConfigError, known_keys, parse
from task.keys import AUTO, Key
from task.packet import Scalar

OK, FAILED, MISTAKE = 0, 1, 2  # exit codes; 128 + the signal's number when one ended the run

_RESULTS = ("results.json", "accuracy.png", "forgetting.png", "report.html")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line, by default that of this process.

    Returns:
        the exit code.

    Raises:
        SystemExit: help was asked for, or the command line has no meaning.
    """
    parser = _parser()
    args, rest = parser.parse_known_args(arguments)
    # argparse takes no second group of settings once an option has come between
    if any(word.startswith("-") for word in rest) or (rest and args.command in (_report, _export, _privacy)):
        parser.error(f"unrecognised: {' '.join(rest)}")
    args.rest = rest
    return int(args.command(args))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fcil", description="Federated class-incremental learning.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _describe_run(commands.add_parser("run", help="run an experiment in simulation, on this machine"))
    _describe_report(commands.add_parser("report", help="tables and pictures of one run, or of several compared"))
    _describe_bench(commands.add_parser("bench", help="a suite of runs, those left to do, and their table"))
    _describe_predict(commands.add_parser("predict", help="classes of images, by the model of a run"))
    _describe_export(commands.add_parser("export", help="the model of a run as one file for use elsewhere"))
    _describe_privacy(commands.add_parser("privacy", help="attack the class statistics of a run; pictures"))
    _describe_doctor(commands.add_parser("doctor", help="whether this machine can do a run, and how fast"))
    return parser


def _describe_run(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run an experiment through Flower's simulation (or without Flower, see --in-process), show its progress, and "
        "end with exit code 0 if the run finished, 1 if it failed, 2 if a key was mistyped."
    )
    parser.epilog = "keys, their defaults and what they mean:\n" + "\n".join(map(_describe_key, known_keys().values()))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="KEY=VALUE",
        help="run keys such as method=hgp, unquoted; a file of them, such as presets/hgp-cifar100.toml, may come first",
    )
    parser.add_argument("--in-process", action="store_true", help="without Flower: one client after another")
    parser.add_argument("--workers", type=_positive, metavar="N", help="clients that train at once (default: by cores)")
    parser.set_defaults(command=_run)


def _describe_key(key: Key) -> str:
    choices = f" ({', '.join(key.rule.choices)})" if key.rule.choices else ""
    return f"  {key.name:<28} {key.default!s:<12} {key.rule.help}{choices}"


def _describe_report(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write tables and pictures from the files of one run, or of several to compare them."
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="folder with a results.json")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder to write to; needed for several runs")
    parser.set_defaults(command=_report)


def _describe_bench(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run the variants, partitions and seeds of a suite, each without Flower in a process of its own, and write "
        "table.md, report.html and pictures after each. Finished runs are skipped, so that a suite that was ended is "
        "continued by the same command; others begin anew. Exit code 0 if all finished, 1 if one failed, 2 if "
        "something in the suite cannot be."
    )
    parser.add_argument("suite", type=Path, metavar="SUITE.yaml", help="such as suites/digits.yaml")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="run keys for all runs, such as data-dir=...")
    parser.add_argument("--jobs", type=_positive, default=1, metavar="N", help="runs at a time (default: 1)")
    parser.add_argument("--flower", action="store_true", help="every run through Flower's simulation")
    parser.set_defaults(command=_bench)


def _describe_predict(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print the most probable classes of images. Exit code 1 if there is no model, or an image cannot be read; the "
        "others are answered."
    )
    parser.add_argument("model", metavar="RUN_DIR", help="a run's folder, or a file that fcil export wrote")
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="image files of any size")
    parser.add_argument("--top", type=_positive, default=1, metavar="K", help="classes per image (default: 1)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--device", default=AUTO, help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.set_defaults(command=_predict)


def _describe_export(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write a model with its frozen backbone, run keys and class names into one file, which fcil predict and "
        "task.inference.load_predictor read without the run's folder and without a network."
    )
    parser.add_argument("model", metavar="RUN_DIR", help="a run's folder, or a file that fcil export wrote")
    parser.add_argument("out", type=Path, metavar="OUT", help="file to write, such as model.safetensors")
    parser.add_argument("--onnx", type=Path, metavar="OUT.onnx", help="an ONNX file too: pixels in, probabilities out")
    parser.set_defaults(command=_export)


def _describe_privacy(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Reconstruct images from the class statistics that one client of a run sends, as a curious server could, and "
        "compare them with its real images (SSIM). Writes privacy.json and privacy.png into the run's folder. Exit "
        "code 1 if there is no model, 2 if the run's method sends nothing to invert."
    )
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="a run's folder; its data set must be here")
    parser.add_argument("--client", type=int, default=0, metavar="N", help="whose statistics, from 0 (default: 0)")
    parser.add_argument("--target", choices=("mean", "sample"), default="mean", help="class mean, or a Gaussian's draw")
    parser.add_argument("--classes", type=_positive, default=8, metavar="K", help="at most, fewest images first")
    parser.add_argument("--steps", type=_positive, default=300, metavar="N", help="of the attack (default: 300)")
    parser.add_argument("--device", default=AUTO, help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.set_defaults(command=_privacy)


def _describe_doctor(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Check versions, device, memory, disk, weights and data, and time a training step of a run with these keys. "
        "Nothing is written. Exit code 1 if something is a problem, 2 if a key was mistyped."
    )
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="run keys, as of fcil run")
    parser.set_defaults(command=_doctor)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _report(args: argparse.Namespace) -> int:
    from server_app.report import PicturesUnavailable, ReportError, write_report

    try:
        written = write_report(args.runs, args.output)
    except (ReportError, PicturesUnavailable, OSError) as error:
        return _complain(str(error), FAILED)
    print("\n".join(str(path) for path in written))
    return OK


def _bench(args: argparse.Namespace) -> int:
    from server_app.bench import Bench
    from server_app.report import PicturesUnavailable
    from server_app.suite import read_suite

    try:
        suite = read_suite(args.suite, read_words([*args.settings, *args.rest]))
        failed = Bench(suite, args.jobs, args.flower, partial(print, flush=True)).go()
    except ConfigError as error:
        return _complain(str(error), MISTAKE)
    except (LaunchError, PicturesUnavailable, OSError) as error:
        return _complain(str(error), FAILED)
    except Interrupted as stop:
        return _complain("stopped; the same command continues the suite", 128 + stop.number)
    print("\n".join(str(suite.folder / name) for name in ("table.md", "report.html")))
    if failed:
        return _complain(f"failed: {', '.join(run.name for run in failed)}", FAILED)
    return OK


def _predict(args: argparse.Namespace) -> int:
    from server_app.predict import answers, as_json, table
    from task.inference import ModelError, load_predictor

    try:
        found = answers(load_predictor(args.model, args.device), [*args.images, *args.rest], args.top)
    except ConfigError as error:
        return _complain(str(error), MISTAKE)
    except ModelError as error:
        return _complain(str(error), FAILED)
    print(as_json(found) if args.json else "\n".join(table(found)))
    return max([OK, *(_complain(answer.error, FAILED) for answer in found if answer.error)])


def _export(args: argparse.Namespace) -> int:
    from server_app.export import require_onnx, write_onnx, write_self_contained
    from task.inference import ModelError, load_predictor

    if args.out.suffix == ".onnx":
        return _complain(f"{args.out} would not be an ONNX file: name OUT.safetensors, and --onnx {args.out}", MISTAKE)
    try:
        if args.onnx:
            require_onnx()  # before anything is written
        predictor = load_predictor(args.model, "cpu")
        write_self_contained(predictor, args.out)
        if args.onnx:
            write_onnx(predictor, args.onnx)
    except ConfigError as error:
        return _complain(str(error), MISTAKE)
    except (ModelError, ExportError, OSError) as error:
        return _complain(str(error), FAILED)
    print("\n".join(str(path) for path in (args.out, args.onnx) if path))
    return OK


def _privacy(args: argparse.Namespace) -> int:
    from server_app.inversion import attack
    from server_app.inversion_files import lines, write_inversions
    from server_app.report import PicturesUnavailable
    from task.inference import ModelError

    try:
        found = attack(args.run, args.client, args.target, args.classes, args.steps, args.device)
        print("\n".join(lines(found)))
        written = write_inversions(args.run, found, args.client, args.target)
    except ConfigError as error:
        return _complain(str(error), MISTAKE)
    except (ModelError, PicturesUnavailable, OSError) as error:
        return _complain(str(error), FAILED)
    print("\n".join(map(str, written)))
    return OK


def _doctor(args: argparse.Namespace) -> int:
    from server_app.doctor import examine

    try:
        config = parse(completed(read_words([*args.settings, *args.rest])))
    except ConfigError as error:
        return _complain(str(error), MISTAKE)
    code = OK
    for finding in examine(config):
        print(finding, flush=True)
        code = FAILED if finding.level == "problem" else code
    return code


def _run(args: argparse.Namespace) -> int:
    try:
        values = completed(read_words([*args.settings, *args.rest]))
        config = parse(values)
        require_tensorboard(config)  # rather than when Flower has started
        directory = run_directory(config)
        if directory.exists():  # before what a second process does shows in the run's folder
            claim(directory).close()
    except ConfigError as error:
        return _complain(str(error), MISTAKE)
    values |= {"output-dir": str(directory.parent), "run-name": directory.name}
    print(f"results go to {directory}", flush=True)
    progress = Progress(directory)
    if args.in_process:
        code = _run_here(values, progress)
    else:
        code = _run_with_flower(values, config, progress, args.workers or default_workers(config))
    if code == OK:
        print("\n".join(summary(directory)))
    return code


def _run_here(values: dict[str, Scalar], progress: "Progress") -> int:
    from server_app.in_process import InProcessTransport
    from server_app.run import execute

    config = parse(values)
    try:
        with interruptible(at_once=True), progress.in_background():
            execute(config, InProcessTransport(values, config.num_clients))
    except ConfigError as error:
        return _complain(str(error), MISTAKE)
    except (RunError, OSError) as error:
        return _complain(f"the run failed: {error}", FAILED)
    except Interrupted as stop:
        return _complain(f"stopped; what was saved is in {progress.directory}", 128 + stop.number)
    return OK


def _run_with_flower(values: dict[str, Scalar], config: Config, progress: "Progress", workers: int) -> int:
    print(f"starting Flower: {config.num_clients} clients, up to {workers} at a time", flush=True)
    try:
        with interruptible() as check, FlowerRun(project_folder(), check) as flower, _kept(flower, progress.directory):
            progress.log = flower.log
            flower.submit(values, config.num_clients, workers)
            while flower.going_on():
                progress.show()
                time.sleep(POLL)
            progress.show()
            status, details = flower.status()
    except LaunchError as error:
        return _complain(str(error), FAILED)
    except Interrupted as stop:
        mark_failed(progress.directory, f"stopped by {stop}")
        return _complain(f"stopped; what was saved is in {progress.directory}", 128 + stop.number)
    if status == "finished:completed":
        return OK
    reason = _reason(progress.directory, status, details)
    mark_failed(progress.directory, reason)
    print(_end_of_log(progress.directory), file=sys.stderr)
    return _complain(f"the run failed: {reason}", FAILED)


@contextlib.contextmanager
def _kept(flower: FlowerRun, directory: Path) -> Iterator[None]:
    """Save the log into the run's folder, however the run ends."""
    try:
        yield
    finally:
        if flower.log.exists():
            directory.mkdir(parents=True, exist_ok=True)
            shutil.copy(flower.log, directory / "flower.log")


def _reason(directory: Path, status: str, details: str) -> str:
    """Why a run failed: in its own words if it could still write them, else in Flower's."""
    told = details.removeprefix("Simulation failed with exception: ")
    return str(read_results(directory).get("error") or told or status)


def _end_of_log(directory: Path) -> str:
    """Where the log is, and its end unless that is a message for people, which the reason repeats."""
    log = directory / "flower.log"
    end = "" if "server_app.app.RunFailed" in last_lines(log, 1000) else last_lines(log) + "\n"
    return f"{end}the log is {log}"


def _complain(message: str, code: int) -> int:
    print(f"fcil: {message}", file=sys.stderr)
    return code


class Progress:
    """Shows rounds as they are finished, one line each, by following rounds.jsonl, and what Flower's log warns of."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.log = directory, Path()
        self._shown, self._warned = len(self._lines()), 0

    def show(self) -> None:
        """Print what has been finished, or warned of, since the last time."""
        warnings = self._warnings()
        for warning in warnings[self._warned :]:
            print(f"warning: {warning}", flush=True)
        self._warned = len(warnings)
        lines = self._lines()
        self._shown = min(self._shown, len(lines))  # a resumed run drops the lines after its checkpoint
        for number, line in enumerate(lines[self._shown :], start=self._shown + 1):
            with contextlib.suppress(ValueError):  # a line that was damaged before the run was resumed
                print("\n".join(describe_round(json.loads(line), number)), flush=True)
        self._shown = len(lines)

    @contextlib.contextmanager
    def in_background(self) -> Iterator[None]:
        """Show progress while this thread does something else."""
        done = threading.Event()

        def follow() -> None:
            while not done.wait(POLL):
                self.show()

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        try:
            yield
        finally:
            done.set()
            follower.join()
            self.show()

    def _warnings(self) -> list[str]:
        """Those of the run's own process; what Flower says before it begins is for others."""
        with contextlib.suppress(OSError):
            said = self.log.read_text(errors="replace").partition("results go to")[2]
            return re.findall(r"^(?:\x1b\[\d+m)?WARNING *(?:\x1b\[0m)?: +(.*)$", said, re.MULTILINE)
        return []

    def _lines(self) -> list[str]:
        with contextlib.suppress(OSError):
            # the last line may be half written
            return (self.directory / "rounds.jsonl").read_text().split("\n")[:-1]
        return []


def summary(directory: Path) -> list[str]:
    """The outcome of a finished run in one line, and the paths of its results that exist."""
    metrics = read_results(directory).get("metrics", {})
    shown = {"final_average_accuracy": "final average accuracy", "forgetting": "forgetting"}
    outcome = ", ".join(f"{text} {metrics[name]:.1%}" for name, text in shown.items() if metrics.get(name) is not None)
    return [*filter(None, [outcome]), *(str(directory / n) for n in _RESULTS if (directory / n).exists())]


if __name__ == "__main__":
    sys.exit(main())
