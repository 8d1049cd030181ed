"""Checkpoints of a run: all it needs to go on after its last finished round.

A checkpoint is a pickle, because a method may keep any object in its server half: resume only runs of your own.
"""

import hashlib
import logging
import pickle
from pathlib import Path
from typing import Any

from server_app.errors import one_line
from task.keys import ConfigError
from task.utils.atomic import write_atomically

log = logging.getLogger(__name__)

KEEP_LAST = 2
PARTS = {"round", "arrays", "strategy", "results", "plan", "keys"}  # of a state


def write_checkpoint(folder: Path, server_round: int, state: dict[str, Any]) -> None:
    """Save the state after ``server_round`` and delete all but the last two; an OSError leaves the earlier ones."""
    folder.mkdir(exist_ok=True)
    content = pickle.dumps(state)
    write_atomically(folder / f"{server_round:06d}.ckpt", hashlib.sha256(content).digest() + content, private=True)
    for old in sorted(folder.glob("*.ckpt"))[:-KEEP_LAST]:
        old.unlink()


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """The state that :func:`find_checkpoint` finds; the log names damaged ones that are newer.

    Raises:
        ConfigError: none is found, or it was written by other code.
    """
    path, content = find_checkpoint(folder)
    for damaged in sorted(later for later in folder.glob("*.ckpt") if later > path):
        log.warning("%s is damaged: going back to the round before it", damaged)
    try:
        state = pickle.loads(content)
        if missing := PARTS - state.keys():
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        return state
    except Exception as error:  # a pickle that this code does not know raises nearly any kind
        raise ConfigError(
            f"resume: {path} was written by other code ({error}): go on with that code, or start the run anew."
        ) from error


def find_checkpoint(folder: Path) -> tuple[Path, bytes]:
    """Path and pickle of the newest undamaged state.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    for path in sorted(folder.glob("*.ckpt"), reverse=True):
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"resume: {path} cannot be read ({one_line(str(error))}).") from error
        digest, content = raw[:32], raw[32:]
        if hashlib.sha256(content).digest() == digest:
            return path, content
    raise ConfigError(
        f"resume: {folder} holds no whole checkpoint: its first round never ended, or all are damaged. Start it anew."
    )
