"""fcil bench: the runs of a suite that are left to do, and their table."""

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from server_app.cli.common import FAILED, OK, complain, positive, share
from server_app.cli.progress import say
from server_app.errors import LaunchError
from server_app.run_files.on_end import require_hook
from server_app.run_files.paths import require_writable
from server_app.run_files.status import FINISHED, read_results
from server_app.run_keys import load_datasets, read_words, require_files, require_listed, run_path
from server_app.simulation.cluster import ADDRESS, cluster_address
from server_app.simulation.processes import Interrupted
from task.keys import AUTO, ConfigError

if TYPE_CHECKING:
    from server_app.bench.suite import Suite
    from task.config.schema import Config


def describe(parser: argparse.ArgumentParser) -> None:
    """Arguments of fcil bench."""
    parser.description = (
        "Run the variants, partitions and seeds of a suite, each without Flower in a process of its own, and write "
        "table.md, report.html and pictures after each. A suite with an entry select first chooses keys on validation "
        "images. Finished runs are skipped and unfinished ones go on, so that a suite that was ended is continued by "
        "the same command. Exit code 0 if all finished, 1 if one failed, 2 if the suite cannot be run."
    )
    parser.add_argument("suite", type=Path, metavar="SUITE.yaml", help="such as suites/digits.yaml")
    parser.add_argument(
        "words", nargs="*", default=[], metavar="KEY=VALUE", help="run keys for all runs, such as data-dir=..."
    )
    parser.add_argument("--jobs", type=positive, default=1, metavar="N", help="runs at a time (default: 1)")
    parser.add_argument("--flower", action="store_true", help="every run through Flower's simulation, on all cores")
    parser.add_argument(
        "--gpus-per-client", type=share, metavar="X", help="with --flower on a Ray cluster: as for fcil run"
    )
    parser.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        help="whether unfinished runs of the same keys, code, versions and images go on after their last round "
        "(default: yes); the others begin anew",
    )
    parser.add_argument("--select-only", action="store_true", help="choose keys on validation images, and end there")
    parser.set_defaults(command=_run_command)


def _run_command(args: argparse.Namespace) -> int:
    from server_app.bench.suite import read_suite

    options = _run_options(args)
    suite = read_suite(args.suite, read_words(args.words))
    if args.select_only and not suite.selection:
        raise ConfigError(f"{args.suite}: --select-only needs an entry select.")
    require_writable(suite.folder / "run")
    runs = [*suite.runs, *(suite.selection.suite.runs if suite.selection else ())]
    left = [run for run in runs if read_results(run.directory).get("status") != FINISHED]  # a table needs no images
    for run in left:
        require_files(run.values)
    for hook in {str(run.values.get("on-end", "")) for run in runs}:
        require_hook(hook, elsewhere=True)
    if args.flower:
        require_listed({name: value for run in left for name, value in run.values.items()})
    _require_images([run.config for run in left])
    _require_backbones([run.config for run in left])
    try:
        failed = _run_suite(suite, args, options)
    except Interrupted as stop:
        return complain("stopped; the same command continues the suite", 128 + stop.number)
    return complain(f"failed: {', '.join(failed)}", FAILED) if failed else OK


def _require_images(configs: Sequence["Config"]) -> None:
    """Read each data set, with all images of people's own folders: a damaged one would end every run.

    It warns of test images that are training images too.

    Raises:
        ConfigError: a data set cannot be read, or has too few classes or too few images of one.
    """
    from task.data.digests import count_copies, describe_copies
    from task.data.load import require_readable

    for (name, path), dataset in load_datasets(configs):
        if name == "folder":
            say(f"reading the images in {path}")
        require_readable(dataset, name)
        if copies := count_copies(dataset, name):
            say(f"WARNING   {describe_copies(copies, len(dataset.test_labels))}")


def _require_backbones(configs: Sequence["Config"]) -> None:
    """Build each backbone but the bundled one, and so fetch timm's weights: one that fails would end every run.

    Raises:
        ConfigError: unknown or unsuitable architecture or image-size; weights missing, broken or of another one.
        LaunchError: the process that builds them was killed.
    """
    from task.config.schema import NO_FILE
    from task.models.bundled import BUNDLED

    configs = [c for c in configs if c.backbone not in BUNDLED or c.backbone_weights != AUTO]
    if not configs:
        return
    paths = {c.backbone_weights for c in configs}.difference(NO_FILE)
    weights = {text: str(run_path("backbone-weights", text)) for text in paths}
    wanted = {(c.backbone, weights.get(c.backbone_weights, c.backbone_weights), c.image_size, "cpu") for c in configs}
    with ProcessPoolExecutor(1, get_context("spawn")) as apart:  # this process does without torch
        try:
            apart.submit(_build, sorted(wanted)).result()
        except BrokenProcessPool as error:
            raise LaunchError("the process that built the backbones was killed: perhaps memory ran out.") from error


def _build(backbones: Sequence[tuple[str, str, int, str]]) -> None:
    from task.models.load import build_backbone

    for arguments in backbones:
        build_backbone(*arguments)


def _run_options(args: argparse.Namespace) -> list[str]:
    """Options that are passed to fcil run for every run.

    Raises:
        LaunchError: options do not go together with the Ray cluster that is named, or with none.
    """
    address = args.flower and cluster_address()
    if address and args.jobs > 1:
        raise LaunchError(f"--jobs {args.jobs}: each run takes all of the Ray cluster that {ADDRESS} names, use 1.")
    if args.gpus_per_client and not address:
        raise LaunchError(f"--gpus-per-client is for a Ray cluster: add --flower, and name the cluster in {ADDRESS}.")
    if not args.flower:
        return ["--in-process"]
    return [f"--gpus-per-client={args.gpus_per_client:g}"] if args.gpus_per_client else []


def _run_suite(suite: "Suite", args: argparse.Namespace, options: Sequence[str]) -> list[str]:
    """Run the selection, if any, and the suite; returns the names of the runs that failed."""
    from server_app.bench.runner import Bench, SelectionBench
    from server_app.bench.selection import apply_choices

    failed = list[str]()
    if suite.selection:
        selecting = SelectionBench(suite.selection, args.jobs, options, say, args.resume)
        failed += [f"selection of {run.name}" for run in selecting.run()]
        suite = apply_choices(suite, suite.selection, selecting.choices())
        say("\n".join([str(suite.folder / "selection.md"), *suite.notes]))
    if args.select_only:
        return failed
    bench = Bench(suite, args.jobs, options, say, args.resume)
    failed += [run.name for run in bench.run()]
    say(f"{suite.folder / 'table.md'}\n{suite.folder / 'report.html'}")
    for head, lines in bench.recommendation.items():
        say("\n".join(["", head, *lines]))
    return failed
