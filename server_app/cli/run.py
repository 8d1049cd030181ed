"""fcil run: one run, through Flower's simulation or in this process."""

import argparse
import contextlib
import logging
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import Any

from server_app.cli.common import FAILED, OK, complain, positive, share
from server_app.cli.progress import Progress, say
from server_app.errors import LaunchError, RunError, describe_os_error, reason_of
from server_app.rounds.progress import summary
from server_app.run_files.locks import lock_run
from server_app.run_files.on_end import require_hook, tell_operator
from server_app.run_files.paths import project_folder, require_writable, run_directory
from server_app.run_files.status import FINISHED, INTERRUPTED, RUNNING, has_checkpoint, mark_failed, read_results
from server_app.run_files.tensorboard import require_tensorboard
from server_app.run_keys import complete_run_keys, load_datasets, read_words, require_files, require_listed
from server_app.simulation.cluster import ADDRESS, Cluster, cluster_address, examine_cluster
from server_app.simulation.processes import POLL, Interrupted, interruptible, last_lines
from server_app.simulation.superlink import RAY_TIMED_OUT, FlowerRun, default_workers, ray_timed_out
from task.config.parsing import parse
from task.config.schema import APPEARING, Config, known_keys
from task.keys import Key
from task.message import Scalar

COMPLETED = "finished:completed"  # Flower's status
LOG = "flower.log"


def describe(parser: argparse.ArgumentParser) -> None:
    """Arguments of fcil run."""
    parser.description = (
        "Run an experiment through Flower's simulation (or without Flower, see --in-process), show its progress, and "
        "end with exit code 0 if the run finished, 1 if it failed, 2 if a setting or the data cannot be used."
    )
    parser.epilog = "keys, their defaults and what they mean:\n" + "\n".join(map(_describe_key, known_keys().values()))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "words",
        nargs="*",
        metavar="KEY=VALUE",
        help="run keys such as method=hgp, unquoted; a file of them, such as presets/hgp-cifar100.toml, may come first",
    )
    parser.add_argument("--in-process", action="store_true", help="without Flower: one client after another")
    parser.add_argument(
        "--workers", type=positive, metavar="N", help="clients that train at once (default: by cores, 2 on a GPU)"
    )
    parser.add_argument(
        "--gpus-per-client",
        type=share,
        metavar="X",
        help=f"GPUs, or share of one, of each client on the Ray cluster that {ADDRESS} names (default: none)",
    )
    parser.set_defaults(command=_run)


def _describe_key(key: Key) -> str:
    choices = f" ({', '.join(key.rule.choices)})" if key.rule.choices else ""
    return f"  {key.name:<28} {key.default!s:<12} {key.rule.help}{choices}"


def _run(args: argparse.Namespace) -> int:
    values = complete_run_keys(read_words(args.words))
    address = _cluster_address(args)
    if not args.in_process:
        require_listed(values)
    if not address:
        require_files(values)
    config = parse(values)
    require_tensorboard(config)  # before Flower is started
    require_hook(config.on_end)
    directory = run_directory(config)
    require_writable(directory)
    if directory.exists():
        with lock_run(directory):  # an error if another process is at work in it
            pass
    values |= {"output-dir": str(directory.parent), "run-name": directory.name}
    say(f"results go to {directory}")
    progress = Progress(directory)
    here = args.in_process
    code = _run_here(values, progress) if here else _run_with_flower(values, progress, config, args, address)
    if code == OK:
        say("\n".join(summary(directory)))
    return code


def _cluster_address(args: argparse.Namespace) -> str:
    """Address of the Ray cluster to run on; empty if there is none.

    Raises:
        LaunchError: options that do not go together.
    """
    if args.in_process and args.workers:
        raise LaunchError("--workers is for Flower's simulation; with --in-process one client trains after another.")
    address = "" if args.in_process else cluster_address()
    if address and args.workers:
        raise LaunchError(
            f"--workers is for one machine; {ADDRESS} names a cluster, which has a worker for each `threads` CPUs."
        )
    if args.gpus_per_client and not address:
        raise LaunchError(f"--gpus-per-client is for a Ray cluster: name one in {ADDRESS}, and no --in-process.")
    return address


def _join(address: str, values: dict[str, Scalar], config: Config, gpus: float) -> Cluster:
    say(f"asking every node of the Ray cluster {address} for its code, versions, weights and data")
    with interruptible() as check:
        cluster = examine_cluster(address, values, (config.threads, gpus), project_folder(), check)
    if cluster.gpus and not gpus and config.device != "cpu":
        say("no client is given a GPU of the cluster: --gpus-per-client does so")
    return cluster


def _run_here(values: dict[str, Scalar], progress: Progress) -> int:
    config, begun = parse(values), False
    try:
        with interruptible(at_once=True), progress.in_background():
            from server_app.rounds.run import run_experiment  # this loads torch, which takes seconds
            from server_app.transport.in_process import InProcessTransport

            begun = True  # from here on the run tells the operator itself
            run_experiment(config, InProcessTransport(config.num_clients))
    except RunError as error:
        return complain(f"the run failed: {error}", FAILED)
    except OSError as error:
        return complain(f"the run failed: {describe_os_error(error)}", FAILED)
    except Interrupted as stop:
        mark_failed(progress.directory, str(stop))
        if not begun:
            tell_operator(config.on_end, progress.directory, RunError(str(stop)))
        return _report_stop(progress.directory, stop, config, "--in-process ")
    return OK


def _report_stop(directory: Path, stop: Interrupted, config: Config, options: str = "") -> int:
    if config.class_order != APPEARING and read_results(directory).get("status") == FINISHED:
        advice = f"stopped after the run had finished; its pictures are drawn by: fcil report {quote(str(directory))}"
        return complain(advice, 128 + stop.number)
    saved = f"what was saved is in {directory}" if directory.exists() else "before the run began"
    if has_checkpoint(directory):
        saved += f"; go on with: fcil run {options}{quote(f'resume={directory}')}"
    return complain(f"stopped; {saved}", 128 + stop.number)


def _keep_log(log: Path, directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copy(log, directory / LOG)
    except OSError as error:  # this error must not hide why the run failed
        complain(f"{directory / LOG} cannot be written: {error.strerror}", FAILED)


def _run_with_flower(
    values: dict[str, Scalar], progress: Progress, config: Config, args: argparse.Namespace, address: str
) -> int:
    try:
        with _telling(config.on_end, progress.directory) as before:
            if not address:
                _read_data(config)
            cluster = _join(address, values, config, args.gpus_per_client or 0.0) if address else None
            workers = cluster.workers if cluster else args.workers or default_workers(config)
            where = f", on {cluster}" if cluster else ""
            say(f"starting Flower: {values['num-clients']} clients, up to {workers} at a time{where}")
            _complete(values, progress, workers, cluster, before)
    except Interrupted as stop:
        return _report_stop(progress.directory, stop, config)
    except RunError as error:
        return complain(f"the run failed: {error}", FAILED)
    return OK


def _read_data(config: Config) -> None:
    """Read the data once before Flower is started, which takes longer.

    Raises:
        ConfigError: they cannot be used.
    """
    logging.getLogger("task.data").addHandler(logging.NullHandler())  # the run gives the same warnings
    with interruptible(at_once=True):
        list(load_datasets([config]))


@contextlib.contextmanager
def _telling(hook: str, directory: Path) -> Iterator[dict[str, Any]]:
    """Tell the operator how a run through Flower ended, for its server app: this process sees how all others end.

    What the run has recorded itself comes before what is raised here. Yields its results of before, if it is resumed.
    """
    before, error = read_results(directory), None
    try:
        yield before
    except BaseException as problem:
        reason = reason_of(problem).partition("\n")[0]  # what follows are lines of a log
        mark_failed(directory, reason)
        end = _recorded_end(directory, before)
        if end.get("status") != FINISHED:
            error = RunError(end.get("error") or reason)
        raise
    finally:
        tell_operator(hook, directory, error)


def _recorded_end(directory: Path, before: dict[str, Any]) -> dict[str, Any]:
    """The results of a run that has recorded since ``before`` how it ended; empty if it has not."""
    results = read_results(directory)
    return {} if results == before or results.get("status") in (RUNNING, INTERRUPTED) else results


def _complete(
    values: dict[str, Scalar], progress: Progress, workers: int, cluster: Cluster | None, before: dict[str, Any]
) -> None:
    """Run it through Flower, once more if Ray did not start in time.

    Raises:
        RunError: it did not finish, with the reason that it has recorded itself, or that Flower and Ray say.
    """
    log = progress.directory / LOG
    status, details = _run_once(values, progress, workers, cluster)
    if status != COMPLETED and ray_timed_out(log):
        print("Ray did not start in time; trying once more", file=sys.stderr, flush=True)
        status, details = _run_once(values, progress, workers, cluster)
    if status == COMPLETED:
        return
    end = _recorded_end(progress.directory, before)
    if end.get("status") == FINISHED:  # killed while it drew pictures, perhaps
        print(f"the run finished, but then Flower says: {details or status}; see {log}", file=sys.stderr)
        return
    if "server_app.app.RunFailed" not in last_lines(log, 1000):  # a RunFailed has its whole reason in the results
        print(last_lines(log), file=sys.stderr)
    print(f"the log is {log}", file=sys.stderr)
    flowers_reason = (details or status).removeprefix("Simulation failed with exception: ")
    raise RunError(end.get("error") or (RAY_TIMED_OUT if ray_timed_out(log) else flowers_reason))


def _run_once(values: dict[str, Scalar], progress: Progress, workers: int, cluster: Cluster | None) -> tuple[str, str]:
    """Flower's final status of one run, and its details; the log stays in the run's folder."""
    with interruptible() as check, FlowerRun(project_folder(), check, cluster) as flower:
        progress.follow(flower.log)
        flower.submit(values, int(values["num-clients"]), workers)
        try:
            while flower.is_running():
                progress.show()
                time.sleep(POLL)
            progress.show()
            return flower.status()
        finally:
            _keep_log(flower.log, progress.directory)
