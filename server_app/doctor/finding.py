"""One finding of fcil doctor, and the memory that is free."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

GB = 1e9
_CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Finding:
    """One line for people; ``advice`` says what to do about it."""

    level: Literal["ok", "warning", "problem"]
    text: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.level:<8} {self.text}" + (f"; {self.advice}" if self.advice else "")


def available_memory() -> float:
    """Bytes that new processes may take: what the system has free, at most the container's limit."""
    try:
        import psutil

        available = float(psutil.virtual_memory().available)
    except ImportError:  # in-process runs do without it
        available = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in _CONTAINER_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such file; "max" is no number
            available = min(available, float(Path(path).read_text()))
    return available
