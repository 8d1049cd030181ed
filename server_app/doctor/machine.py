"""Checks whether this machine can do a run; every finding says what to do. Imports nothing heavy itself."""

import importlib.util
import os
import platform
import shutil
import tomllib
from collections.abc import Iterator
from importlib import metadata

from server_app.doctor.finding import GB, Finding
from server_app.errors import LaunchError
from server_app.run_files.paths import project_folder, resolve_output_dir
from server_app.run_files.status import INTERRUPTED, has_checkpoint, read_results
from task.config.schema import Config
from task.utils.cores import cores
from task.utils.memory import available_memory
from task.utils.paths import nearest_existing
from task.utils.versions import package_version

SCARCE_DISK = 1 * GB  # a run's models, checkpoints and pictures take far less
SCARCE_MEMORY = 2 * GB  # a process with torch, the bundled backbone and its images takes about 1
# packages that a run in one process does not need, and what is not possible without them
OPTIONAL = {
    "flwr": "fcil run --in-process works without, simulations and nodes do not",
    "ray": "fcil run --in-process works without, simulations do not",
    "cryptography": "only secure-aggregation and certificates need it",
    "pycryptodome": "only secure-aggregation needs it",
    "psutil": "fcil run --in-process works without, fcil bench and simulations do not",
    "matplotlib": "runs work without, but draw no pictures and write no report; fcil bench does not",
    "jinja2": "runs work without, but draw no pictures and write no report; fcil bench does not",
}


def examine(config: Config) -> Iterator[Finding]:
    """Check what a run with these keys needs, cheap things first; a check that needs a failed one is left out.

    Nothing is written. Weights that a run would download are downloaded.
    """
    usable = True
    for finding in (*_packages(), _memory(), _disk(config), *_interrupted(config)):
        usable &= finding.level != "problem"
        yield finding
    if usable:
        try:
            from server_app.doctor.dry_run import dry_run
        except (ImportError, OSError) as error:  # installed, but broken
            yield Finding("problem", f"the packages cannot be loaded: {error}", "install them again")
        else:
            yield from dry_run(config)


def _packages() -> Iterator[Finding]:
    machine = f"{platform.system()} {platform.machine()}"
    yield Finding("ok", f"python {platform.python_version()}, {machine}, {cores()} cores")
    if importlib.util.find_spec("packaging") is None:  # several of the other packages install it
        yield Finding("problem", "packages are missing", "install the project: pip install --editable .")
        return
    yield from map(_package, [*_requirements(), "ray"])


def _requirements() -> list[str]:
    """The project's dependencies, as in pyproject.toml."""
    try:
        return tomllib.loads((project_folder() / "pyproject.toml").read_text())["project"]["dependencies"]
    except LaunchError:  # installed without its folder
        return [text for text in metadata.requires("fcil") or [] if "extra ==" not in text]


def _package(requirement: str) -> Finding:
    from packaging.requirements import Requirement

    required = Requirement(requirement)
    version = package_version(required.name)
    if version != "absent" and required.specifier.contains(version, prereleases=True):
        return Finding("ok", f"{required.name} {version}")
    text, install = f"{required.name} {version}, expected {requirement}", f"pip install '{requirement}'"
    if required.name in OPTIONAL:
        return Finding("warning", text, f"{OPTIONAL[required.name]}: {install}")
    return Finding("problem", text, install)


def _memory() -> Finding:
    memory = available_memory()
    text = f"{memory / GB:.1f} GB of memory available"
    if memory < SCARCE_MEMORY:
        return Finding("warning", text, "little for one process: end others, or take a small batch-size")
    return Finding("ok", text)


def _disk(config: Config) -> Finding:
    folder = resolve_output_dir(config.output_dir)
    existing = nearest_existing(folder)
    free = shutil.disk_usage(existing).free
    text = f"{free / GB:.1f} GB of disk free for {folder}"
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return Finding("problem", f"{existing} cannot be written", "name another folder with output-dir")
    if free < SCARCE_DISK:
        return Finding("warning", text, "make room, or name another folder with output-dir")
    return Finding("ok", text)


def _interrupted(config: Config) -> Iterator[Finding]:
    """Runs below output-dir that were killed."""
    for path in sorted(resolve_output_dir(config.output_dir).glob("*/results.json")):
        if read_results(path.parent).get("status") == INTERRUPTED:
            resume = f"go on with resume={path.parent}, or " if has_checkpoint(path.parent) else ""
            yield Finding("warning", f"{path.parent} was interrupted", f"{resume}remove it")
