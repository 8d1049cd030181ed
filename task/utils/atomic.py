"""Writing files so that after a crash there is either the earlier version or the new one."""

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Replace ``path`` in one step.

    Raises:
        OSError: the write failed, as on a full disk; the earlier file stays.
    """
    temporary = path.with_name(path.name + ".part")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
