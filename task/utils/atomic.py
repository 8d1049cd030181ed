"""Writing files so that after a crash there is either the earlier version or the new one."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_atomically(path: Path, content: bytes, private: bool = False) -> None:
    """Replace ``path`` in one step; nobody but the user can ever read a ``private`` one.

    Raises:
        OSError: the write failed, as on a full disk, with the path; the earlier file stays.
    """
    temporary = path.with_name(path.name + ".part")
    mode = 0o600 if private else 0o666  # the user's umask then removes the rights of others
    try:
        with naming(path):
            temporary.unlink(missing_ok=True)  # a file that a crash has left would keep its rights
            with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write strict JSON, each list of numbers on one line; NaN, which other programs cannot read, is refused."""
    text = json.dumps(value, indent=1, allow_nan=False)
    # JSON texts hold no line ends, so that only lists can match
    text = re.sub(r"\[\n[-+.0-9enul,\s]*\]", lambda match: " ".join(match[0].split()), text)
    write_atomically(path, (text + "\n").encode())


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the path into errors of a file that is open already, which have none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
