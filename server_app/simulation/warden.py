"""A process that outlives its parent by a moment, to end what a parent that was killed could not end itself.

It waits for the end of a pipe that only the parent holds, which every system closes with the parent, however that ends.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from server_app.simulation.processes import end_processes


def start_warden(mark: str, folder: Path) -> "subprocess.Popen[bytes]":
    """Start the warden of all processes with ``mark``, NAME=VALUE of an environment variable.

    It ends them and removes ``folder`` when its standard input ends.
    """
    command = [sys.executable, "-m", __name__, mark, str(folder)]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # what is sent to the parent's group must not reach it
    )


def watch(mark: str, folder: Path) -> None:
    """Wait for the parent's end, then end what it has left."""
    sys.stdin.buffer.read()
    end_processes([], mark)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    watch(sys.argv[1], Path(sys.argv[2]))
