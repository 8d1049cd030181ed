"""fcil nodes: what the SuperLink knows of each node, joined with what the nodes said and did in runs."""

import json
import os
from pathlib import Path

import click
import pytest
from flwr.proto.node_pb2 import NodeInfo

from server_app.cli import main as cli
from server_app.clients import nodes
from server_app.clients.nodes import list_nodes
from server_app.errors import LaunchError
from task.message import Kind, Packet
from tests.helpers.runs import Values, run

NOON = 1_767_268_800.0  # 2026-01-01 12:00 in UTC
BEFORE = "2026-01-01T09:30:00+00:00"
LATER = "2026-01-01T11:00:00+00:00"
NORTH = NodeInfo(
    node_id=2**63 + 5,
    name="north hospital",
    status="online",
    registered_at=BEFORE,
    last_activated_at=LATER,
    online_until=NOON + 60,
    heartbeat_interval=30,
)
SOUTH = NodeInfo(
    node_id=7,
    name="south",
    status="offline",
    registered_at=BEFORE,
    last_activated_at=BEFORE,
    last_deactivated_at=LATER,
    online_until=NOON - 3600,
    heartbeat_interval=30,
)
NEW = NodeInfo(node_id=8, status="registered", registered_at=BEFORE)
ASK_SUPERLINK = nodes._ask_superlink
GONE = NodeInfo(node_id=9, name="gone", status="unregistered", registered_at=BEFORE)


@pytest.fixture(autouse=True)
def superlink(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_ask_superlink", lambda name: [SOUTH, NEW, GONE, NORTH])


def make_run(folder: Path, age: float, node_id: int, *rounds: dict) -> None:
    """A run with one client, called north, and its rounds; ``age`` in seconds before now."""
    folder.mkdir(parents=True)
    said = {"name": "north", "node_id": str(node_id), "free_disk": 4_000_000_000, "versions": [folder.name]}
    (folder / "nodes.json").write_text(json.dumps([said | {"said_at": NOON - age}]))
    os.utime(folder / "nodes.json", (NOON - age, NOON - age))
    lines = [{"task": 1, "round": i + 1, "failures": [], "idle": [], **each} for i, each in enumerate(rounds)]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_nodes_are_sorted_by_name_and_revoked_ones_left_out(tmp_path: Path) -> None:
    listed = list_nodes("fcil", tmp_path / "no such folder")
    assert [(n.registered_as, n.node_id, n.status) for n in listed] == [
        ("", 8, "registered"),
        ("north hospital", 2**63 + 5, "online"),
        ("south", 7, "offline"),
    ]


def test_times_are_since_when_and_last_seen(tmp_path: Path) -> None:
    new, north, south = list_nodes("fcil", tmp_path)
    assert (north.since, north.last_seen) == (LATER, "2026-01-01T12:00:00+00:00")
    assert (south.since, south.last_seen) == (LATER, LATER)
    assert (new.since, new.last_seen) == (BEFORE, "")


def test_what_a_node_said_last_is_of_the_newest_run_and_its_round_of_the_newest_answer(tmp_path: Path) -> None:
    here = {"participants": ["north"]}
    failed = here | {"failures": [{"name": "north", "reason": "gone"}]}
    make_run(tmp_path / "old", 300, NORTH.node_id, here, here, {"participants": ["south"]}, failed)
    make_run(tmp_path / "new", 200, NORTH.node_id, failed, here | {"idle": ["north"]})  # nobody was asked in that
    make_run(tmp_path / "newest", 100, 12345, here)  # the same name, but another node
    north = next(n for n in list_nodes("fcil", tmp_path) if n.name == "north")
    assert north.registered_as == "north hospital"
    assert (north.free_disk, north.versions, north.last_round) == (4_000_000_000, ("new",), "old: task 1, round 2")
    assert north.said_at == "2026-01-01T11:56:40+00:00"


STRANGE = ["[{", "{}", "[]", "7", "[7]", '[{"node_id": "7"}]', '{"a": 1}', "null", '[{"participants": 7}]', "\udcff"]
SAID = '[{"node_id": "7", "name": "x", "free_disk": 1, "versions": 7, "said_at": 1e300}]'


@pytest.mark.parametrize("file", ["nodes.json", "rounds.jsonl"])
@pytest.mark.parametrize("content", [*STRANGE, SAID])
def test_a_file_of_another_shape_is_no_reason_to_list_nothing(file: str, content: str, tmp_path: Path) -> None:
    make_run(tmp_path / "old", 300, NORTH.node_id, {"participants": ["north"]})
    make_run(tmp_path / "new", 200, NORTH.node_id)
    (tmp_path / "new" / file).write_text(content + "\n", errors="surrogateescape")
    assert [n.last_round for n in list_nodes("fcil", tmp_path) if n.name] == ["old: task 1, round 1"]


def test_a_file_that_is_passed_over_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_run(tmp_path / "new", 200, NORTH.node_id)
    (tmp_path / "new" / "nodes.json").write_text('{"nodes": []}')
    list_nodes("fcil", tmp_path)
    assert f"{tmp_path}/new/nodes.json is passed over, it is not as a run writes it" in caplog.text


def test_a_run_writes_what_its_nodes_said(tiny: Values, tmp_path: Path) -> None:
    run(tiny)
    said = json.loads((tmp_path / "runs" / "run" / "nodes.json").read_text())
    assert [each["name"] for each in said] == ["client-0000", "client-0001", "client-0002"]
    assert all(each["free_disk"] > 10**6 and each["versions"][0].startswith("torch ") for each in said)
    (tmp_path / "runs" / "other").mkdir()
    assert [n.name for n in list_nodes("fcil", tmp_path / "runs")] == ["", "", ""]  # other ids


def test_the_table_and_the_json_have_every_node(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    make_run(tmp_path / "night", 300, NORTH.node_id, {"participants": ["north"]})
    assert cli.main(["nodes", "fcil", "--runs", str(tmp_path)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "registered as"
    assert " ".join(rows[1].split()) == (
        f"north hospital {2**63 + 5} online 2026-01-01 11:00 2026-01-01 12:00 north night: task 1, round 1 4.0 GB night"
    )
    assert cli.main(["nodes", "fcil", "--runs", str(tmp_path), "--json"]) == 0
    assert [each["node_id"] for each in json.loads(capsys.readouterr().out)] == ["8", str(2**63 + 5), "7"]


def test_a_node_that_takes_no_part_is_listed_with_the_reason_and_what_it_said_before(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    make_run(tmp_path / "old", 300, NORTH.node_id, {"participants": ["north"]})
    make_run(tmp_path / "new", 200, 12345)
    (tmp_path / "new" / "nodes.json").write_text(json.dumps([{"node_id": str(NORTH.node_id), "absent": "no disk"}]))
    north = next(n for n in list_nodes("fcil", tmp_path) if n.node_id == NORTH.node_id)
    assert (north.name, north.versions, north.free_disk, north.absent) == ("north", ("old",), 4_000_000_000, "no disk")
    assert cli.main(["nodes", "fcil", "--runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[4:] == ["north hospital takes no part: no disk"]


def test_a_node_whose_hello_cannot_be_read_is_noted(tiny: Values, tmp_path: Path) -> None:
    def tamper(node: int, kind: Kind, packet: Packet) -> Packet:
        return Packet(config={"error": "no disk"}) if (node, kind) == (1, "hello") else packet

    run(tiny | {"num-clients": 0}, tamper=tamper)
    said = json.loads((tmp_path / "runs" / "run" / "nodes.json").read_text())
    assert [each for each in said if each["absent"]] == [{"node_id": "1", "absent": "no disk"}]


@pytest.mark.parametrize(("name", "reason"), [("local", "simulation"), ("nobody", "'nobody' not found")])
def test_a_connection_that_is_none_is_an_error_for_people(
    name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(nodes, "_ask_superlink", ASK_SUPERLINK)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    (tmp_path / "config.toml").write_text('[superlink.local]\naddress = ":local:"\n')
    with pytest.raises(LaunchError, match=reason):
        list_nodes(name, tmp_path)
    assert cli.main(["nodes", name]) == 1
    assert reason in capsys.readouterr().err


def test_a_superlink_that_does_not_answer_is_an_error_for_people(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "_ask_superlink", ASK_SUPERLINK)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    (tmp_path / "config.toml").write_text('[superlink.fcil]\naddress = "127.0.0.1:1"\ninsecure = true\n')
    with pytest.raises(LaunchError, match="SuperLink") as raised:
        list_nodes("fcil", tmp_path)
    assert isinstance(raised.value.__cause__, click.ClickException)
