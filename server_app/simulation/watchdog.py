"""The watchdog: a process that cleans up after its parent, also if the parent was killed.

It waits until a pipe is closed that only the parent holds. Every system closes it when the parent ends, in whatever
way. The watchdog then ends the processes that the parent started, and removes the parent's temporary folder.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from server_app.simulation.processes import end_processes


def start_watchdog(mark: str, folder: Path) -> "subprocess.Popen[bytes]":
    """Start the watchdog of all processes with ``mark``, NAME=VALUE of an environment variable.

    It ends them and removes ``folder`` when its standard input ends.
    """
    command = [sys.executable, "-m", __name__, mark, str(folder)]
    return subprocess.Popen(
        command,
        cwd=Path(__file__).parents[2],  # python -m looks for the package in the working directory first
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # signals to the parent's group must not reach it
    )


if __name__ == "__main__":
    sys.stdin.buffer.read()  # ends with the parent
    end_processes([], sys.argv[1])
    shutil.rmtree(sys.argv[2], ignore_errors=True)
