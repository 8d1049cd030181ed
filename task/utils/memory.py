"""The memory that is free on this machine, and that this process has taken."""

import contextlib
import os
import sys
from pathlib import Path

_CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def available_memory() -> float:
    """Bytes that new processes may take: what the system has free, at most what the container's limit leaves."""
    try:
        import psutil

        available = float(psutil.virtual_memory().available)
    except ImportError:  # in-process runs do without it
        available = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in _CONTAINER_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such file; "max" is no number
            available = min(available, float(Path(path).read_text()) - _used_by_container(Path(path).parent))
    return available


def _used_by_container(folder: Path) -> float:
    """Bytes that a control group uses, without the file cache, which it lets go; 0 if that is not known."""
    for name in ("memory.current", "memory.usage_in_bytes"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            used = float((folder / name).read_text())
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            return used - float(statistics["inactive_file"])
    return 0.0


def peak_memory() -> float:
    """Bytes that this process has held at most."""
    try:
        import resource
    except ImportError:  # Windows, where psutil knows it
        import psutil

        return float(psutil.Process().memory_info().peak_wset)  # type: ignore[attr-defined]  # on Windows only
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * (1 if sys.platform == "darwin" else 1024)
