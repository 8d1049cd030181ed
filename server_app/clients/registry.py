"""The clients of a run as they come and go."""

import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from server_app.clients.class_names import ClassLimit, describe_spellings, small_classes, warn_of_missing_images
from server_app.clients.client_info import ClientInfo
from server_app.clients.hello import AbsentNode, say_hello
from server_app.errors import RunError
from server_app.tables import align
from server_app.transport.base import Transport
from task.config.schema import APPEARING, Config
from task.data.images import Dataset
from task.utils.versions import node_versions

log = logging.getLogger(__name__)

_MAX_TRIES = 3  # hellos to a node that gives no answer, or an error: its disk may not be mounted yet
_MAX_LINES = 40  # clients in the log's table
_SHARED_NAME = "it has the name of another node: give each its own name or partition-id"


class ClientRegistry:
    """The clients of a run, ``clients``, sorted by name; ``absent`` are the other nodes, by handle."""

    def __init__(
        self,
        transport: Transport,
        nodes: Sequence[int],
        config: Config,
        dataset: Dataset | None,
        checksums: tuple[str, str],
        expected: int,
        planned: Sequence[str],
    ) -> None:
        """Say hello to the connected nodes.

        ``dataset`` is None where each node has its own; ``checksums`` are SHA-256 of the server's backbone weights and
        of its copy of the code; ``planned`` are the classes of a run that is resumed. Where a node cannot take part, or
        nodes share a name, the run begins without them, if ``expected`` others, the quorum and enough for a secure sum
        are there.

        Raises:
            RunError: too few that can take part.
        """
        self.config, self._transport, self._dataset, self._checksums = config, transport, dataset, checksums
        self._asked: set[int] = set()  # nodes that get no further hello
        self._tries: Counter[int] = Counter()  # hellos that a node has not answered
        self._warnings: set[str] = set()
        self._class_limit = ClassLimit(planned)
        self.absent: dict[int, AbsentNode] = {}
        self.clients, absent = say_hello(transport, nodes, config, dataset)
        # the classes of a run that is resumed are settled, unless more may appear
        settled = bool(planned) and config.class_order != APPEARING
        absent = [*self._take_out_misfits(counts_classes=config.own_data and not settled), *absent]
        self._note_absent(absent, set(nodes), newcomers=bool(self.clients))
        self._note_asked(self.clients, absent)
        self._require_enough(absent, expected)
        self._warn_of_statistics()
        self._warn_of_shared_parts()
        if config.own_data:
            warn_of_missing_images(self.clients)
        log_clients(self.clients)

    def _note_asked(self, clients: Sequence[ClientInfo], absent: Sequence[AbsentNode]) -> None:
        """Note who gets no further hello: a node whose hello can be read, or one that has failed a few times."""
        self._tries.update(node.node for node in absent)
        given_up = {node.node for node in absent if node.said or self._tries[node.node] >= _MAX_TRIES}
        self._asked |= {client.node for client in clients} | given_up
        for client in clients:
            del self._tries[client.node]  # what fails later is a new incident

    def _note_absent(self, absent: Sequence[AbsentNode], connected: set[int], newcomers: bool) -> None:
        """Add nodes to ``absent``; leave out those that take part by now, under the same handle or a new one.

        One that never said its name is left out too once it has gone and there are ``newcomers``, under handles that
        were not known: it may be one of them.
        """
        nodes, names = {client.node for client in self.clients}, {client.name for client in self.clients}

        def is_absent(node: AbsentNode) -> bool:
            if node.node in nodes:
                return False
            if node.node in connected:
                return True
            return node.name not in names if node.said else not newcomers

        known = self.absent | {node.node: node for node in absent}
        self.absent = {n: node for n, node in known.items() if is_absent(node)}

    def _take_out_misfits(self, counts_classes: bool) -> list[AbsentNode]:
        """Take nodes that do not fit, and those that share a name, out of the clients."""
        reasons = {client.node: self._find_misfit(client) for client in self.clients}
        counts = Counter(client.name for client in self.clients if not reasons[client.node])
        for client in self.clients:
            if not reasons[client.node] and counts[client.name] > 1:
                reasons[client.node] = _SHARED_NAME
        if counts_classes:
            fitting = [client for client in self.clients if not reasons[client.node]]
            reasons |= self._class_limit.find_excessive(fitting)
        misfits = [self._refuse(client, r) for client in self.clients if (r := reasons[client.node])]
        self.clients = [client for client in self.clients if not reasons[client.node]]
        return misfits

    def _refuse(self, client: ClientInfo, reason: str) -> AbsentNode:
        """A node that does not fit; the log says why, once."""
        self._warn_once(f"{client.name} (node {client.node}) does not take part: {reason}")
        return AbsentNode(client.node, client.name, reason, answered=True, said=client)

    def _find_misfit(self, client: ClientInfo) -> str:
        """Why a node cannot be a client of this run at any time, or an empty text."""
        if self.config.own_data and not client.classes and self.config.class_order != APPEARING:
            return (
                "it has no image: its data-dir needs a folder of images per class (that of fcil run, a folder per node "
                "with a folder per class in each)"
            )
        backbone_sha256, code_sha256 = self._checksums
        if client.backbone_sha256 != backbone_sha256:
            return "it has other backbone weights than the server: give every node the same backbone-weights"
        if client.code_sha256 != code_sha256:
            return (
                "it has another copy of the code than the server: a simulation imports it from the folder in which the "
                "local SuperLink was started: stop that SuperLink, or use 'fcil run', which starts its own"
            )
        return ""

    def _require_enough(self, absent: Sequence[AbsentNode], expected: int) -> None:
        needs = {"quorum": self.config.quorum}
        # if num-clients was given, all of them must be usable: the operator can repair a node before anything runs
        if any(node.answered for node in absent):
            needs["num-clients"] = expected
        if self.config.secure_aggregation != "off":
            needs["secure-aggregation-threshold"] = self.config.unmask_threshold(0)
        needed = max(needs.values())
        if len(self.clients) < needed:
            keys = ", ".join(key for key, number in needs.items() if number == needed)
            reason = f"{absent[0].name}: {absent[0].reason}" if absent else "no answer"
            raise RunError(
                f"{len(self.clients)} clients can take part, but {needed} are needed ({keys}). {len(absent)} nodes "
                f"cannot; the first is {reason}"
            )

    def _warn_of_statistics(self) -> None:
        least, method = self.config.min_class_count, self.config.method
        if least <= 1:  # no class is below it, and thousands of clients may have thousands of classes
            return
        names, no_others = small_classes(self.clients, least)
        if names:
            lost = "at all" if no_others else "of them"
            log.warning(
                "min-class-count = %d: no client has as many images of %s, so %s gets no statistics %s",
                *(least, ", ".join(names), method, lost),
            )

    def _warn_of_shared_parts(self) -> None:
        names = defaultdict[int, list[str]](list)
        for client in self.clients:
            names[client.partition].append(client.name)
        for part, sharing in names.items():
            line = f"{', '.join(sharing)} have the same images: each needs a partition-id of its own, not {part}"
            if part >= 0 and len(sharing) > 1:
                self._warn_once(line)

    def _warn_once(self, line: str) -> None:
        if line not in self._warnings:
            self._warnings.add(line)
            log.warning("%s", line)

    def admit_new(self) -> list[ClientInfo]:
        """Say hello to nodes that have connected or become free since the last hello.

        A node that comes back under the name of a client that is gone replaces it. A node that cannot take part is
        noted among the absent. While it stays connected it is asked again in two cases only: its hello failed, which
        is tried _MAX_TRIES times; or another node has its name, until that one has gone.

        Returns:
            the clients that take part from now on.
        """
        connected = set(self._transport.nodes())
        self._asked = (self._asked & connected) - self._without_twin(connected)
        nodes = sorted(connected - self._asked - self._transport.busy())
        if not nodes:
            return []
        clients, absent = say_hello(self._transport, nodes, self.config, self._dataset)
        self._note_asked(clients, absent)
        self._drop({node.node for node in absent if node.answered})
        admitted, known = [], {client.node for client in self.clients}
        for client in clients:
            if reason := self._find_objection(client, connected):
                absent.append(self._refuse(client, reason))
                self._drop({client.node})
            else:
                admitted.append(client)
                self._add(client)
        self._note_absent(absent, connected, newcomers=any(client.node not in known for client in admitted))
        self._warn_of_shared_parts()
        log_clients(admitted)
        return admitted

    def _without_twin(self, connected: set[int]) -> set[int]:
        """Nodes that shared their name with another, which has gone since."""
        twins = [node for node in self.absent.values() if node.reason == _SHARED_NAME and node.node in connected]
        counts = Counter(node.name for node in twins)
        return {node.node for node in twins if counts[node.name] == 1}

    def _drop(self, nodes: set[int]) -> None:
        """Take out clients that were asked again under the handle they had, and can no longer take part."""
        self.clients = [client for client in self.clients if client.node not in nodes]

    def _find_objection(self, newcomer: ClientInfo, connected: set[int]) -> str:
        """Why a node cannot be a client now, or an empty text."""
        if reason := self._find_misfit(newcomer):
            return reason
        nodes = {client.name: client.node for client in self.clients}
        node = nodes.get(newcomer.name, newcomer.node)
        if node != newcomer.node and node in connected:
            self._asked.discard(newcomer.node)  # the other node may be gone, and Flower has not noticed yet
            return "a node of this name takes part already"
        if self.config.class_order != APPEARING:  # classes that are not in the plan are left out
            return ""
        return self._class_limit.find_excessive([newcomer]).get(newcomer.node, "")

    def _add(self, client: ClientInfo) -> None:
        # a node that comes back under another name is still one client
        others = [c for c in self.clients if c.name != client.name and c.node != client.node]
        self.clients = sorted([*others, client], key=lambda c: c.name)

    def refresh_counts(self) -> None:
        """Ask the connected clients again what they hold; one that does not answer keeps its earlier answer."""
        connected = set(self._transport.nodes())
        nodes = [client.node for client in self.clients if client.node in connected]
        clients, absent = say_hello(self._transport, nodes, self.config, self._dataset)
        for client in clients:
            if reason := self._find_objection(client, connected - {client.node}):
                log.warning("%s said what cannot be used, and counts as before: %s", client.name, reason)
            else:
                self._add(client)
        for node in absent:
            log.warning("%s said nothing new: %s", node.name, node.reason)

    def assign_class_ids(self, class_names: Sequence[str]) -> None:
        """Count each client's images by the class ids of a run whose nodes have images of their own.

        Names that differ only in case, punctuation or white space are one class; the log warns of it once.
        """
        self.clients = [replace(c, class_counts=c.by_class_id(c.own_counts, class_names)) for c in self.clients]
        for line in describe_spellings(self.clients, class_names):
            self._warn_once(line)


def log_clients(clients: Sequence[ClientInfo]) -> None:
    """Log a table of who takes part with what, a line for each of the first clients, and classes they cannot read."""
    rows: list[tuple[str, ...]] = [
        ("client", "images", "held out", "classes", "unreadable", "disk free", "device", "versions")
    ]
    for client in clients[:_MAX_LINES]:
        classes = np.count_nonzero(client.own_counts + client.test_counts)
        counts = (client.own_counts.sum(), client.test_counts.sum(), classes, client.unreadable)
        disk = f"{client.free_disk / 1e9:.1f} GB"
        rows.append((client.name, *(str(n) for n in counts), disk, client.device, ", ".join(client.versions)))
    for line in align(rows) if clients else []:
        log.info("%s", line)
    if len(clients) > _MAX_LINES:
        log.info("and %d more", len(clients) - _MAX_LINES)
    here = _releases(node_versions())
    if others := [client.name for client in clients if _releases(client.versions) != here]:
        names = ", ".join(others[:_MAX_LINES])
        log.warning("other versions than this server's (%s) have %d clients: %s", ", ".join(here), len(others), names)
    for client in clients:
        if names := ", ".join(client.unreadable_classes):
            log.warning("%s cannot read a folder of class %s: its log says which", client.name, names)


def _releases(versions: Sequence[str]) -> list[str]:
    """Versions without their build, such as +cpu."""
    return [version.split("+")[0] for version in versions]
