"""One finding of fcil doctor, and the memory that is free."""

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

GB = 1e9
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Finding:
    """One line for people; ``advice`` says what to do about it."""

    level: Literal["ok", "warning", "problem"]
    text: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.level:<8} {self.text}" + (f"; {self.advice}" if self.advice else "")


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
