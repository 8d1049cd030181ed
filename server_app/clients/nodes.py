"""The nodes of a deployment: what the SuperLink knows of each, and what each said and did in the runs of a folder."""

import contextlib
import json
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server_app.clients.client_info import ClientInfo
from server_app.clients.hello import AbsentNode
from server_app.errors import LaunchError
from server_app.run_files.writers import read_lines
from task.utils.atomic import write_json

if TYPE_CHECKING:
    from flwr.proto.node_pb2 import NodeInfo

log = logging.getLogger(__name__)

NODES = "nodes.json"  # in a run's folder
_STRANGE = (ValueError, LookupError, TypeError, OverflowError)  # from a file of another shape


@dataclass(frozen=True)
class NodeStatus:
    """One node. Times are ISO 8601 in UTC; a text is empty, and a number None, where nothing is known.

    The SuperLink knows a node from its key, and what ``registered_as`` says was typed by whoever registered the key.
    ``name``, ``free_disk`` and ``versions`` are what the node itself said in its last hello.
    """

    registered_as: str
    name: str
    node_id: int
    status: str  # online, offline, or registered: never seen yet
    since: str  # when this status began; of a node that was never online, when it was registered
    last_seen: str  # time of its last heartbeat; of an offline node, when Flower gave it up
    last_round: str  # the newest round that it answered
    absent: str  # why it takes no part in the newest run that knows it
    free_disk: int | None  # bytes
    versions: tuple[str, ...]
    said_at: str  # when it said so


def write_nodes(directory: Path, clients: Iterable[ClientInfo], absent: Iterable[AbsentNode]) -> None:
    """Note in a run's folder what its nodes have said of themselves, and why some of them take no part.

    Nodes that are not there now stay as they are.
    """
    said = [_entry(c, "") for c in clients] + [_entry(n.said, n.reason) for n in absent if n.said]
    silent = [{"node_id": str(n.node), "absent": n.reason} for n in absent if not n.said]
    earlier = _earlier(directory)
    known = earlier | {entry["node_id"]: earlier.get(entry["node_id"], {}) | entry for entry in [*said, *silent]}
    if known != earlier:
        write_json(directory / NODES, [*known.values()])


def _entry(client: ClientInfo, absent: str) -> dict[str, Any]:
    return {
        "name": client.name,
        "node_id": str(client.node),
        "free_disk": client.free_disk,
        "versions": list(client.versions),
        "said_at": client.answered_at,
        "absent": absent,
    }


def _earlier(directory: Path) -> dict[str, dict[str, Any]]:
    """What the file of a run has, by node; nothing, if there is none or it is not as a run writes it."""
    with contextlib.suppress(OSError, *_STRANGE):
        return {entry["node_id"]: entry for entry in json.loads((directory / NODES).read_text(encoding="utf-8"))}
    return {}


def list_nodes(superlink: str, runs: Path) -> list[NodeStatus]:
    """The registered nodes in the order of their names, with what they said and did in a folder of ``runs``.

    ``superlink`` is the name of a connection in Flower's config.toml; the folder may be missing.

    Raises:
        LaunchError: there is no such connection, or the SuperLink does not answer.
    """
    files = sorted(runs.glob(f"*/{NODES}"), key=lambda path: path.stat().st_mtime, reverse=True)
    entries = [entry for path in files for entry in _read(path.parent)]
    nodes = [_join(node, entries) for node in _ask_superlink(superlink) if node.status != "unregistered"]
    return sorted(nodes, key=lambda node: (node.registered_as or node.name, node.node_id))


def _ask_superlink(superlink: str) -> "Sequence[NodeInfo]":
    """Ask for the nodes as ``flwr supernode list`` does, which does not print their names."""
    try:
        import click
        from flwr.cli.flower_config import read_superlink_connection
        from flwr.cli.utils import flwr_cli_exc_handler, init_http_client_from_connection
        from flwr.proto.control_pb2 import ListNodesRequest
    except ImportError as error:
        raise LaunchError(f"nodes are known where Flower is installed: {error}.") from error
    try:
        with contextlib.redirect_stdout(sys.stderr):  # Flower says which connection it takes
            connection = read_superlink_connection(superlink)
            if str(connection.address).startswith(":"):
                raise LaunchError(f"{superlink!r} is a simulation on this machine, which has no nodes to list.")
            with contextlib.closing(init_http_client_from_connection(connection)) as client, flwr_cli_exc_handler():
                return list(client.ListNodes(ListNodesRequest()).nodes_info)
    except click.ClickException as error:
        raise LaunchError(error.format_message()) from error


@dataclass(frozen=True)
class _NodeEntry:
    """What a node has said of itself in a run; attributes as of :class:`NodeStatus`, and the run's folder."""

    run: Path
    node_id: int
    name: str = ""
    free_disk: int | None = None
    versions: tuple[str, ...] = ()
    said_at: str = ""
    absent: str = ""


def _read(run: Path) -> list[_NodeEntry]:
    """The nodes of a run's folder; none, and a line on standard error, if its file was not written by a run."""
    try:
        return [
            _NodeEntry(
                run,
                int(node["node_id"]),
                str(node.get("name", "")),
                int(node["free_disk"]) if "free_disk" in node else None,
                tuple(map(str, node.get("versions", ()))),
                _iso(node["said_at"]) if "said_at" in node else "",
                str(node.get("absent", "")),
            )
            for node in json.loads((run / NODES).read_text(encoding="utf-8"))
        ]
    except (OSError, *_STRANGE) as error:
        log.warning("%s is passed over, it is not as a run writes it: %r", run / NODES, error)
    return []


def _rounds_of(run: Path, name: str) -> Iterator[str]:
    """Rounds of a run that the client ``name`` answered, the newest first; strange files as in :func:`_read`."""
    try:
        for line in reversed(read_lines(run / "rounds.jsonl")):
            failed = [failure["name"] for failure in line["failures"]]
            # nobody is asked in a round in which all are idle
            if name in line["participants"] and name not in failed and line["idle"] != line["participants"]:
                yield f"{run.name}: task {line['task']}, round {line['round']}"
    except (OSError, *_STRANGE) as error:
        log.warning("%s is passed over, it is not as a run writes it: %r", run / "rounds.jsonl", error)


def _join(node: "NodeInfo", entries: Sequence[_NodeEntry]) -> NodeStatus:
    """A node with what it said and did in runs, newest run first."""
    of_node = [entry for entry in entries if entry.node_id == node.node_id]
    newest = of_node[0] if of_node else _NodeEntry(Path(), node.node_id)
    said = next((entry for entry in of_node if entry.name), newest)
    rounds = (text for entry in of_node for text in _rounds_of(entry.run, entry.name))
    online = node.status == "online"
    # Flower counts a node as gone after two intervals without a heartbeat
    heartbeat = _iso(node.online_until - 2 * node.heartbeat_interval) if online else node.last_deactivated_at
    return NodeStatus(
        registered_as=node.name,
        name=said.name,
        node_id=node.node_id,
        status=node.status,
        since=(node.last_activated_at if online else node.last_deactivated_at) or node.registered_at,
        last_seen=heartbeat,
        last_round=next(rounds, ""),
        absent=newest.absent,
        free_disk=said.free_disk,
        versions=said.versions,
        said_at=said.said_at,
    )


def _iso(seconds: float) -> str:
    """Seconds since 1970 as Flower writes times."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def as_json(nodes: Sequence[NodeStatus]) -> str:
    """For programs: a list of objects with the attributes of :class:`NodeStatus`; the ids, of 64 bits, are texts."""
    return json.dumps([asdict(node) | {"node_id": str(node.node_id)} for node in nodes], indent=1)
