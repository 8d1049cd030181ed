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


if __name__ == "__main__":
    sys.stdin.buffer.read()  # ends with the parent
    end_processes([], sys.argv[1])
    shutil.rmtree(sys.argv[2], ignore_errors=True)
