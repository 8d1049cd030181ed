"""Who takes part: waiting for nodes, the hello round, and the clients of each round."""

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from server_app.errors import RunError
from server_app.transport import Reply, Transport
from task.config import Config
from task.data import Dataset
from task.packet import Packet
from task.seeding import numpy_rng

log = logging.getLogger(__name__)

START_TIMEOUT = 60.0  # seconds for the expected nodes to connect
PATIENCE = 15.0  # seconds without a new node after which the missing ones are given up
SETTLED = 2.0  # seconds without a new node after which the connected ones are taken for all


@dataclass(frozen=True)
class Member:
    """A client that answered hello; ``class_counts`` int64 [classes]: its training images at most."""

    name: str
    node: int
    class_counts: np.ndarray
    backbone_sha256: str
    code_sha256: str
    versions: tuple[str, ...]
    device: str


def wait_for_nodes(transport: Transport, expected: int, timeout: float = START_TIMEOUT) -> list[int]:
    """Handles of the connected nodes: at least ``expected``, or when that is 0 all there are once no more appear.

    Raises:
        RunError: too few nodes within ``timeout`` seconds.
    """
    deadline, seen, since = time.monotonic() + timeout, -1, 0.0
    while True:
        nodes, now = list(transport.nodes()), time.monotonic()
        if len(nodes) != seen:
            seen, since = len(nodes), now
        if (expected and len(nodes) >= expected) or (not expected and nodes and now - since >= SETTLED):
            return nodes
        if now > deadline or (seen and now - since > PATIENCE):
            raise RunError(
                f"num-clients = {expected or 'as many as connect'}, but {len(nodes)} nodes are connected and no more "
                f"appear. In simulation, add --federation-config num-supernodes={expected or 2}."
            )
        time.sleep(0.1)


def introduce(
    transport: Transport, nodes: Sequence[int], config: Config, dataset: Dataset
) -> tuple[list[Member], list[dict[str, str]]]:
    """Say hello to every node; members sorted by name, and the name and reason of each node that cannot take part.

    Raises:
        RunError: fewer answers than the quorum, or two nodes of one name.
    """
    packet = Packet(config={"run-config": json.dumps(config.for_clients())})
    replies = transport.exchange("hello", dict.fromkeys(nodes, packet), config.round_timeout)
    members, absent = [], []
    for reply in replies:
        try:
            members.append(_member(reply, dataset))
        except ValueError as error:
            log.warning("node %s does not take part: %s", reply.node, error)
            absent.append({"name": f"node {reply.node}", "reason": str(error)})
    if len(members) < config.quorum:
        first = absent[0]["reason"] if absent else "no answer"
        raise RunError(f"{len(members)} clients answered hello, the quorum is {config.quorum}. First reason: {first}")
    twice = [name for name, times in Counter(m.name for m in members).items() if times > 1]
    if twice:
        raise RunError(f"several nodes are called {twice}: give each its own name or partition-id.")
    members.sort(key=lambda m: m.name)
    for m in members:
        log.info("%s: at most %d images, %s, %s", m.name, m.class_counts.sum(), m.device, ", ".join(m.versions))
    return members, absent


def failure(reply: Reply) -> str:
    """Why a reply cannot be used, or an empty text."""
    return reply.error or str((reply.packet and reply.packet.config.get("error", "")) or "")


def _member(reply: Reply, dataset: Dataset) -> Member:
    """What a node said of itself; ValueError with the reason if it failed or makes no sense."""
    class_names = dataset.class_names
    if reason := failure(reply):
        raise ValueError(reason)
    packet = reply.packet or Packet()
    config, counts = packet.config, packet.arrays.get("class_counts", np.empty(0))
    if counts.dtype != np.int64 or counts.shape != (len(class_names),) or (counts < 0).any():
        raise ValueError(
            f"class_counts are {counts.dtype} {list(counts.shape)}; {len(class_names)} counts were expected"
        )
    if (counts > np.bincount(dataset.train_labels, minlength=len(class_names))).any():
        raise ValueError("class_counts are above those of the whole data set")
    if config.get("classes") != list(class_names):
        raise ValueError(f"its classes {config.get('classes')} are not those of the run")
    missing = {"name", "backbone-sha256", "code-sha256", "versions", "device"} - set(config)
    if missing:
        raise ValueError(f"its hello lacks {sorted(missing)}")
    return Member(
        name=str(config["name"]),
        node=reply.node,
        class_counts=counts,
        backbone_sha256=str(config["backbone-sha256"]),
        code_sha256=str(config["code-sha256"]),
        versions=tuple(config["versions"]),  # type: ignore[arg-type]  # a list of texts by the client's own code
        device=str(config["device"]),
    )


def require_same(members: Sequence[Member], backbone: str, code: str) -> None:
    """Server and clients must compute the same thing.

    Raises:
        RunError: a client has other backbone weights or runs other code.
    """
    checks: list[tuple[str, str, Callable[[Member], str], str]] = [
        ("other backbone weights", backbone, lambda m: m.backbone_sha256, "give every node the same backbone-weights"),
        (
            "another copy of the code",
            code,
            lambda m: m.code_sha256,
            "a simulation imports it from the folder in which the local SuperLink was started: stop that SuperLink, "
            "or use 'fcil run', which starts its own",
        ),
    ]
    for what, expected, read, remedy in checks:
        odd = [m.name for m in members if read(m) != expected]
        if odd:
            raise RunError(f"{len(odd)} clients have {what} than the server, {odd[0]} first: {remedy}.")


def draw(members: Sequence[Member], config: Config, server_round: int) -> list[Member]:
    """The clients of one round: all, or ``clients-per-round`` drawn from the run's own stream by name."""
    wanted = config.clients_per_round or len(members)
    if wanted >= len(members):
        return list(members)
    chosen = numpy_rng(config.seed, "participants", server_round).choice(len(members), wanted, replace=False)
    return [members[i] for i in sorted(chosen)]
