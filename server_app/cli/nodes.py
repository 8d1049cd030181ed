"""fcil nodes: the nodes of a deployment, who of them is online, and what they last said and did."""

import argparse
from datetime import datetime
from pathlib import Path

from server_app.cli.common import OK
from server_app.run_files.paths import resolve_output_dir

HEADER = ("registered as", "node id", "status", "since", "last seen", "calls itself", "last round", "disk free", "with")


def describe(parser: argparse.ArgumentParser) -> None:
    """Arguments of fcil nodes."""
    parser.description = (
        "List the registered nodes of a SuperLink: which key is which node, who is online, and what each said of "
        "itself and did in the runs of a folder. Times are in UTC."
    )
    parser.add_argument("superlink", help="name of the connection in Flower's config.toml, as for flwr run")
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="folder of the runs (default: as for fcil run)")
    parser.add_argument("--json", action="store_true", help="JSON for programs")
    parser.set_defaults(command=_run_command)


def _run_command(args: argparse.Namespace) -> int:
    from server_app.clients.nodes import as_json, list_nodes
    from server_app.tables import align

    nodes = list_nodes(args.superlink, args.runs or resolve_output_dir("runs"))
    if args.json:
        print(as_json(nodes))
        return OK
    rows = [
        (
            node.registered_as or "-",
            str(node.node_id),
            node.status,
            _minute(node.since),
            _minute(node.last_seen),
            node.name or "-",
            node.last_round or "-",
            "-" if node.free_disk is None else f"{node.free_disk / 1e9:.1f} GB",
            ", ".join(node.versions) or "-",
        )
        for node in nodes
    ]
    absent = [f"{node.registered_as or node.node_id} takes no part: {node.absent}" for node in nodes if node.absent]
    print(*align([HEADER, *rows]), *absent, sep="\n")
    return OK


def _minute(time: str) -> str:
    """An ISO time to the minute."""
    return f"{datetime.fromisoformat(time):%Y-%m-%d %H:%M}" if time else "-"
