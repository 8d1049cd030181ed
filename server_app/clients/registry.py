"""The clients of a run as they come and go."""

import logging
from collections import Counter
from collections.abc import Sequence

from server_app.clients.class_names import misspelt, overview, require_agreement
from server_app.clients.client_info import Member
from server_app.clients.hello import Absence, greet, mismatch
from server_app.errors import RunError
from server_app.transport.base import Transport
from task.config.schema import Config
from task.data.images import Dataset

log = logging.getLogger(__name__)

_TRIES = 3  # hellos to a node that gives no answer


class Roster:
    """Who takes part.

    Attributes:
        members: sorted by name.
        absent: name and reason of each node that cannot take part.
    """

    def __init__(
        self,
        transport: Transport,
        nodes: Sequence[int],
        config: Config,
        dataset: Dataset | None,
        ground: tuple[str, str],
    ) -> None:
        """Say hello to the nodes that are there.

        Args:
            transport: reaches them.
            nodes: their handles.
            config: the run keys, the number of clients known.
            dataset: the run's, or None where each node has its own.
            ground: SHA-256 of the server's backbone weights and of its copy of the code.

        Raises:
            RunError: too few that can take part, two of one name, or nodes that cannot work together.
        """
        self.config, self._transport, self._dataset, self._ground = config, transport, dataset, ground
        self.members, absent = greet(transport, nodes, self.config, dataset)
        self._asked: set[int] = set()
        self._tries: Counter[int] = Counter()
        self.absent: list[dict[str, str]] = []
        self._note(absent)
        self._tick_off(self.members, absent)
        self._require_enough(absent)
        self._require_same()
        self._warn_of_statistics()
        if config.own_data:
            require_agreement(self.members, config)
        for line in overview(self.members):
            log.info(line)

    def _tick_off(self, found: Sequence[Member], absent: Sequence[Absence]) -> None:
        """Who has spoken is not asked again; who was silent or broke down is, once it is free, but not for ever."""
        self._tries.update(a.node for a in absent)
        gone = {a.node for a in absent if a.answered or self._tries[a.node] >= _TRIES}
        self._asked |= {m.node for m in found} | gone

    def _require_enough(self, absent: Sequence[Absence]) -> None:
        wrong = [a for a in absent if a.answered and self.config.own_data]
        if wrong:  # somebody's data are not where they should be: better said now than in the morning
            raise RunError(f"{len(wrong)} nodes cannot take part. First reason: {wrong[0].reason}")
        if len(self.members) < self.config.quorum:
            first = absent[0].reason if absent else "no answer"
            raise RunError(
                f"{len(self.members)} clients answered hello, the quorum is {self.config.quorum}. First reason: {first}"
            )

    def _require_same(self) -> None:
        twice = [name for name, times in Counter(m.name for m in self.members).items() if times > 1]
        if twice:
            raise RunError(f"several nodes are called {twice}: give each its own name or partition-id.")
        odd = [(m.name, reason) for m in self.members if (reason := mismatch(m, *self._ground))]
        if odd:
            raise RunError(f"{len(odd)} clients have {odd[0][1]}. The first is {odd[0][0]}.")

    def _warn_of_statistics(self) -> None:
        most = max((int(m.own_counts.max(initial=0)) for m in self.members), default=0)
        if self.config.min_class_count > most:
            log.warning(
                "min-class-count = %d: no client has more than %d images of a class, so %s gets no statistics at all",
                *(self.config.min_class_count, most, self.config.method),
            )

    def welcome(self) -> list[Member]:
        """Say hello to nodes that have connected or become free since; returns those that take part from now on.

        One that comes back under the name of a client that is gone takes its place. One that says it cannot take part
        is noted among the absent, and not asked again while it stays connected.
        """
        connected = set(self._transport.nodes())
        fresh = sorted(connected - self._asked - self._transport.busy())
        self._asked &= connected
        if not fresh:
            return []
        found, absent = greet(self._transport, fresh, self.config, self._dataset)
        self._tick_off(found, absent)
        welcome = []
        for member in found:
            if reason := self._objection(member, connected):
                absent.append(Absence(member.node, member.name, reason, answered=True))
                log.warning("%s does not take part: %s", member.name, reason)
            else:
                welcome.append(member)
                self._enter(member)
        self._note(absent)
        for line in overview(welcome) if welcome else []:
            log.info(line)
        return welcome

    def _objection(self, newcomer: Member, connected: set[int]) -> str:
        if reason := mismatch(newcomer, *self._ground):
            return reason
        namesake = next((m for m in self.members if m.name == newcomer.name), None)
        if namesake and namesake.node != newcomer.node and namesake.node in connected:
            self._asked.discard(newcomer.node)  # the one before may only not have been missed yet: ask again
            return "a node of this name takes part already"
        if self.config.own_data and not self.config.similar_classes:
            known = {m.name: set(m.classes) for m in self.members if m is not namesake}
            return misspelt(known | {newcomer.name: set(newcomer.classes)})
        return ""

    def _enter(self, member: Member) -> None:
        # also one that has come back under another name: a node can be only one client
        others = [m for m in self.members if m.name != member.name and m.node != member.node]
        self.members = sorted([*others, member], key=lambda m: m.name)

    def ask_again(self) -> None:
        """Let every connected member say anew what it holds; one that does not answer keeps what it said before."""
        connected = set(self._transport.nodes())
        found, absent = greet(
            self._transport, [m.node for m in self.members if m.node in connected], self.config, self._dataset
        )
        for member in found:
            if not self._objection(member, connected - {member.node}):
                self._enter(member)
        for a in absent:
            log.warning("%s said nothing new: %s", a.name, a.reason)

    def _note(self, absent: Sequence[Absence]) -> None:
        newest = {entry["name"]: entry for entry in self.absent}
        self.absent[:] = (newest | {a.name: {"name": a.name, "reason": a.reason} for a in absent}).values()

    def place(self, class_names: Sequence[str]) -> None:
        """Count what members hold under the class ids of a run whose nodes have data of their own."""
        self.members = [m.placed(class_names) for m in self.members]
