"""The digest of the code, by which a node with other code is refused."""

import shutil
from pathlib import Path

import pytest

from server_app.errors import RunError
from task.message import Kind, Packet
from task.utils import versions
from tests.helpers.runs import run

ROOT = Path(__file__).parents[3]


def digest_of(root: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Digest of the copy of the code below ``root``."""
    with monkeypatch.context() as patch:
        patch.setattr(versions, "__file__", str(root / "task" / "utils" / "versions.py"))
        return versions.code_sha256.__wrapped__()


@pytest.mark.parametrize(
    "changed", ["task/methods.py", "task/models/model.py", "task/prompts/l2p.py", "client_app/objectives/base.py"]
)
def test_a_node_with_another_file_in_any_folder_is_refused(
    changed: str, tiny: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("task", "client_app"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    assert digest_of(tmp_path, monkeypatch) == versions.code_sha256()
    with open(tmp_path / changed, "a") as file:
        file.write("# another line\n")
    other = digest_of(tmp_path, monkeypatch)
    assert other != versions.code_sha256()

    def tamper(node: int, kind: Kind, packet: Packet) -> Packet:
        if node == 1:
            packet.config["code-sha256"] = other
        return packet

    with pytest.raises(RunError, match=r"1 nodes cannot; the first is client-0001: it has another copy of the code"):
        run(tiny, tamper=tamper)


@pytest.mark.parametrize(
    ("changed", "counts"),
    [
        ("strategies/hgp.py", True),
        ("server_app/clients/__init__.py", True),
        ("server_app/privacy/__init__.py", True),
        ("server_app/rounds/__init__.py", True),
        ("server_app/run_files/__init__.py", True),
        ("server_app/secure_aggregation/__init__.py", True),
        ("server_app/transport/__init__.py", True),
        ("server_app/report/figures.py", False),
    ],
)
def test_the_servers_digest_is_of_what_it_computes_with(
    changed: str, counts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("task", "client_app", "strategies", "server_app"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    with open(tmp_path / changed, "a") as file:
        file.write("# another line\n")
    now = versions.code_and_versions()
    monkeypatch.setattr(versions, "__file__", str(tmp_path / "task" / "utils" / "versions.py"))
    monkeypatch.setattr(versions, "code_sha256", versions.code_sha256.__wrapped__)
    other = versions.code_and_versions()
    assert [name for name in now if now[name] != other[name]] == ["server-code-sha256"] * counts


def test_a_file_that_moves_changes_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "task", tmp_path / "task")
    before = digest_of(tmp_path, monkeypatch)
    (tmp_path / "task" / "models" / "model.py").rename(tmp_path / "task" / "model.py")
    assert digest_of(tmp_path, monkeypatch) != before
