"""Paths that begin with ~: a home that is not there is named with the key that asked for it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from client_app.node import Node, state_dir
from server_app.run_files.resume import load_resumed_keys
from server_app.run_keys import complete_run_keys
from task.config.parsing import parse
from task.data.load import load_dataset
from task.data.node_images import load_inventory
from task.keys import ConfigError
from task.models.feature_store import store_folder
from task.utils.paths import expand_home

OWN = parse({"dataset": "own", "evaluate": "clients"})
NOBODY = "~nobody-here/x"
ASKING: list[tuple[str, Callable[[], object]]] = [
    ("data-dir", lambda: complete_run_keys({"dataset": "own", "evaluate": "clients", "data-dir": NOBODY})),
    ("data-dir", lambda: load_inventory(NOBODY, Path())),
    ("data-dir", lambda: load_dataset("npz", NOBODY, 8, 0.0, 0)),
    ("resume", lambda: complete_run_keys({"resume": NOBODY})),
    ("resume", lambda: load_resumed_keys({"resume": NOBODY})),
    ("state-dir", lambda: state_dir(OWN, Node({"name": "north", "data-dir": "/data", "state-dir": NOBODY}))),
]


@pytest.mark.parametrize(("key", "ask"), ASKING)
def test_the_key_of_an_unknown_home_is_named(key: str, ask: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match=f"{key} = '{NOBODY}': there is no such home folder"):
        ask()


@pytest.mark.parametrize(
    ("key", "ask"),
    [
        ("state-dir", lambda: state_dir(OWN, Node({"name": "north", "data-dir": "/data"}))),
        ("FCIL_CACHE", store_folder),
    ],
)
def test_a_user_without_a_home_is_told_what_to_name(
    key: str, ask: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "FCIL_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 2)  # as a container has it that runs as a bare number
    with pytest.raises(ConfigError, match=f"{key} = '~/.*there is no such home folder, write an absolute path"):
        ask()


def test_a_home_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expand_home("~/scans", "data-dir") == tmp_path / "scans"
    assert expand_home("scans", "data-dir") == Path("scans")
