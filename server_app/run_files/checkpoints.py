"""Checkpoints of a run: what it needs to go on after its last whole round as if nothing had happened.

A checkpoint is pickled, so that a method may keep whatever it likes in its server half: resume runs of your own only.
"""

import hashlib
import logging
import pickle
from pathlib import Path
from typing import Any

from task.keys import ConfigError
from task.utils.atomic import write_atomically

log = logging.getLogger(__name__)

KEPT = 2
State = dict[str, Any]


def write_checkpoint(folder: Path, server_round: int, state: State) -> None:
    """Save ``state`` as that of ``server_round`` and drop all but the last two; OSError leaves those before whole."""
    folder.mkdir(exist_ok=True)
    content = pickle.dumps(state)
    write_atomically(folder / f"{server_round:06d}.ckpt", hashlib.sha256(content).digest() + content)
    for old in sorted(folder.glob("*.ckpt"))[:-KEPT]:
        old.unlink()


def read_checkpoint(folder: Path) -> State:
    """The newest state that is whole; a damaged one is named in the log.

    Raises:
        ConfigError: there is none.
    """
    for path in sorted(folder.glob("*.ckpt"), reverse=True):
        raw = path.read_bytes()
        digest, content = raw[:32], raw[32:]
        if hashlib.sha256(content).digest() == digest:
            return pickle.loads(content)
        log.warning("%s is damaged: going on from the checkpoint before it", path)
    raise ConfigError(f"resume: {folder} holds no whole checkpoint; the run ended in its first round. Start it anew.")
