"""Who may read a file while it is written, and what an error says of it."""

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from server_app.errors import describe_os_error
from server_app.run_files.checkpoints import write_checkpoint
from server_app.run_files.writers import append_line
from task.data.node_images import scan_images
from task.utils.atomic import write_atomically
from tests.helpers.own_data import paint


def rights(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Rights of the files that are written, when their content is complete and not in its place yet."""
    modes, fsync = [], os.fsync

    def note(number: int) -> None:
        modes.append(stat.S_IMODE(os.fstat(number).st_mode))
        fsync(number)

    monkeypatch.setattr(os, "fsync", note)
    before = os.umask(0)  # the most generous user there is
    yield modes
    os.umask(before)


def test_a_private_file_is_never_readable_by_others(tmp_path: Path, seen: list[int]) -> None:
    path = tmp_path / "names.json"
    path.write_text("earlier")  # by a version that did not care
    (tmp_path / "names.json.part").write_text("left by a crash")
    write_atomically(path, b"names", private=True)
    assert (path.read_bytes(), rights(path), seen) == (b"names", 0o600, [0o600])
    write_atomically(tmp_path / "table.json", b"numbers")
    assert rights(tmp_path / "table.json") == 0o666


def test_inventories_and_checkpoints_are_private(tmp_path: Path, seen: list[int]) -> None:
    paint(tmp_path / "data" / "cat", 3)
    scan_images(str(tmp_path / "data"), tmp_path / "state", 0.0, "run")
    write_checkpoint(tmp_path / "checkpoint", 1, {"round": 1})
    [inventory], [checkpoint] = ((tmp_path / name).iterdir() for name in ("state", "checkpoint"))
    assert seen == [rights(inventory), rights(checkpoint)] == [0o600, 0o600]


@pytest.mark.parametrize("write", [lambda path: write_atomically(path, b"x"), lambda path: append_line(path, 1)])
def test_an_error_names_the_file_and_what_to_do(
    write: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space") as caught:
        write(tmp_path / "file")
    message = describe_os_error(caught.value)
    assert message.startswith(f"the disk is full, {tmp_path / 'file'} could not be written")
    assert "make room, then go on with resume if the run's folder has a checkpoint" in message
    assert describe_os_error(PermissionError(13, "Permission denied", "/x")) == "[Errno 13] Permission denied: '/x'"
