"""Whether this machine can do a run, one finding after another, each with what to do; imports nothing heavy itself."""

import contextlib
import importlib.util
import os
import platform
import re
import shutil
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from server_app.errors import LaunchError
from server_app.places import placed, project_folder
from task.config import Config
from task.cores import cores
from task.versions import package_version

GB = 1e9
SCARCE_DISK = 1 * GB  # a run's models, checkpoints and pictures take far less
SCARCE_MEMORY = 2 * GB  # a process with torch, the bundled backbone and its images takes about 1
# runs in one process do without, and what is lost
OPTIONAL = {
    "flwr": "fcil run --in-process works without, simulations and nodes do not",
    "ray": "fcil run --in-process works without, simulations do not",
    "matplotlib": "runs work without, but draw no pictures",
}
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Finding:
    """One line for people; ``advice`` says what to do about it."""

    level: Literal["ok", "warning", "problem"]
    text: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.level:<8} {self.text}" + (f"; {self.advice}" if self.advice else "")


def examine(config: Config) -> Iterator[Finding]:
    """What a run with these keys needs, cheap things first; a step that cannot work without an earlier one is left out.

    Nothing is written. Weights that a run would fetch are fetched.
    """
    usable = True
    for finding in (*_packages(), _memory(), _disk(config)):
        usable &= finding.level != "problem"
        yield finding
    if usable:
        try:
            from server_app.trial import attempt
        except (ImportError, OSError) as error:  # there, but broken
            yield Finding("problem", f"the packages cannot be loaded: {error}", "install them again")
        else:
            yield from attempt(config)


def _packages() -> Iterator[Finding]:
    machine = f"{platform.system()} {platform.machine()}"
    yield Finding("ok", f"python {platform.python_version()}, {machine}, {cores()} cores")
    if importlib.util.find_spec("packaging") is None:  # which several of the others bring along
        yield Finding("problem", "packages are missing", "install the project: pip install --editable .")
        return
    yield from map(_package, [*_requirements(), "ray"])


def _requirements() -> list[str]:
    """What the project asks for, as in pyproject.toml."""
    try:
        return tomllib.loads((project_folder() / "pyproject.toml").read_text())["project"]["dependencies"]
    except LaunchError:  # installed without its folder
        return [text for text in metadata.requires("fcil") or [] if "extra ==" not in text]


def _package(requirement: str) -> Finding:
    from packaging.requirements import Requirement

    wanted = Requirement(requirement)
    found = package_version(wanted.name)
    if found != "absent" and wanted.specifier.contains(found, prereleases=True):
        return Finding("ok", f"{wanted.name} {found}")
    text, install = f"{wanted.name} {found}, expected {requirement}", f"pip install '{requirement}'"
    if wanted.name in OPTIONAL:
        return Finding("warning", text, f"{OPTIONAL[wanted.name]}: {install}")
    return Finding("problem", text, install)


def available_memory() -> float:
    """Bytes that new processes may take: what the system says, at most what the container allows."""
    known = [float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))]
    with contextlib.suppress(OSError, AttributeError):
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        known.append(float(found[1]) * 1024)  # type: ignore[index]  # a system without the line gives AttributeError
    for limit in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            known.append(float(Path(limit).read_text()))
    return min(known)


def _memory() -> Finding:
    memory = available_memory()
    text = f"{memory / GB:.1f} GB of memory available"
    if memory < SCARCE_MEMORY:
        return Finding("warning", text, "little for one process: end others, or take a small batch-size")
    return Finding("ok", text)


def _disk(config: Config) -> Finding:
    folder = placed(Path(config.output_dir))
    there = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(there).free
    text = f"{free / GB:.1f} GB of disk free for {folder}"
    if not there.is_dir() or not os.access(there, os.W_OK):
        return Finding("problem", f"{there} cannot be written", "name another folder with output-dir")
    if free < SCARCE_DISK:
        return Finding("warning", text, "make room, or name another folder with output-dir")
    return Finding("ok", text)
