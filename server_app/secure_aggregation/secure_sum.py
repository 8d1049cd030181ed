"""One round's sum over clients: the server's side of the messages in :mod:`task.secure_aggregation`."""

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from server_app.clients.client_info import ClientInfo, failure
from server_app.errors import one_line
from server_app.run_files.results import RoundReport
from server_app.transport.base import SMALL_ANSWER, Transport, count_answers
from task.message import SECURE_SUM, Kind, Packet
from task.secure_aggregation.crypto import SEALED, SECRET, combine, is_key, mask, pair_mask, public_key
from task.secure_aggregation.fixed_point import decode

log = logging.getLogger(__name__)

_MAX_SECONDS = 1e9  # of one client's work in a round
_SMALL = 1 / 8  # of a round's time for each of its three small messages; the rest is for the sums


class TooFewClients(RuntimeError):
    """Fewer clients than the threshold are left; the message says after what."""


class SpoiledSum(RuntimeError):
    """The shares of a lost client give another key than its own; the message names the client."""


class SecureSum:
    """Sends the four messages of a secure sum and adds up what the clients answer.

    ``report`` records the bytes, and each client that is not in the sum, with the reason. ``timeout`` seconds hold for
    the four messages together: clients that are lost one after the other cannot use them four times. ``seconds`` has
    the times that the clients' answers name, added up by name.
    """

    def __init__(
        self, transport: Transport, clients: Sequence[ClientInfo], threshold: int, timeout: float, report: RoundReport
    ) -> None:
        self._transport, self._threshold, self._timeout, self._report = transport, threshold, timeout, report
        self._clients = {client.node: client for client in clients}
        self._everyone: list[int] = []  # nodes of U1, by place
        self._keys: dict[int, np.ndarray] = {}  # of each node for sealing and for masks, uint8 [2, SECRET]
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def collect(self, kind: Kind, packet: Packet, length: int, largest: float) -> tuple[np.ndarray, list[ClientInfo]]:
        """Send a message and add up the answers; returns the sum and the clients whose answers are in it.

        An answer is ``length`` numbers, none above ``largest`` in size. The sum is float64 [length].

        Raises:
            TooFewClients: a message was answered by fewer clients than the threshold.
            SpoiledSum: a lost client had shared something else than its key.
        """
        keys = dict(self._ask("keys", dict.fromkeys(self._clients, Packet()), "keys", (2, SECRET)))
        self._keys = self._usable_keys(keys)
        self._everyone = self._require_enough(self._keys, "sent keys")
        number = len(self._everyone)
        question = Packet({"keys": np.stack([self._keys[node] for node in self._everyone])})
        question.config["threshold"] = self._threshold
        sealed = dict(self._ask("shares", dict.fromkeys(self._everyone, question), "shares", (number, SEALED)))
        members = self._require_enough(sealed, "sent shares")
        packet = replace(packet, config=packet.config | {"members": self._places(members)})
        total, arrived = np.zeros(length, np.uint64), []
        for node, hidden in self._ask(kind, dict.fromkeys(members, packet), "hidden", (length,)):
            total += hidden
            arrived.append(node)
        survivors = self._require_enough(arrived, "sent their part of the sum")
        for node, shares in self._open_shares(sealed, members, survivors).items():
            total -= self._mask_left(node, survivors, shares, length)
        return decode(total, largest, number), [self._clients[node] for node in survivors]

    def _usable_keys(self, keys: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """The valid keys, by node. An invalid key must go, because all other clients would refuse to go on with it."""
        owners = Counter(bytes(key) for pair in keys.values() for key in pair)
        refused = [n for n, pair in keys.items() if not all(owners[k] == 1 and is_key(k) for k in map(bytes, pair))]
        for node in refused:
            self._note("keys", node, "what came is no key, or not its own")
        return {node: pair for node, pair in keys.items() if node not in refused}

    def _places(self, nodes: Iterable[int]) -> list[int]:
        return [self._everyone.index(node) for node in nodes]

    def _require_enough(self, nodes: Iterable[int], have: str) -> list[int]:
        """The nodes, unless they are fewer than the threshold, in the order in which their clients were drawn."""
        present = set(nodes)
        if len(present) < self._threshold:
            raise TooFewClients(
                f"{len(present)} of {len(self._clients)} clients have {have}, secure-aggregation-threshold is "
                f"{self._threshold}"
            )
        return [node for node in self._clients if node in present]

    def _ask(
        self, kind: Kind, packets: Mapping[int, Packet], name: str, shape: tuple[int, ...]
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Node and array ``name`` of each usable answer, as they come; the reason of every other one is noted."""
        dtype = np.dtype(np.uint64 if name == "hidden" else np.uint8)
        timeout = self._timeout * (_SMALL if kind in SECURE_SUM else 1 - 3 * _SMALL)
        largest = SMALL_ANSWER + dtype.itemsize * math.prod(shape)
        answers = self._transport.exchange(kind, packets, timeout, largest)
        for reply in count_answers(answers, len(packets)):
            self._report.bytes_up += reply.bytes_up
            self._report.bytes_down += reply.bytes_down
            answer, problem = reply.packet or Packet(), failure(reply)
            array = answer.arrays.get(name, np.empty(0))
            if not problem and (array.dtype != dtype or array.shape != shape):
                problem = f"{name} is {array.dtype} {list(array.shape)}; {dtype} {list(shape)} was expected"
            if problem:
                self._note(kind, reply.node, problem)
                continue
            for seconds in ("seconds-train", "seconds-statistics"):
                value: Any = answer.metrics.get(seconds)  # a client may send anything
                if type(value) in (int, float) and 0 <= value <= _MAX_SECONDS:
                    self.seconds[seconds] += value
            yield reply.node, array

    def _note(self, kind: Kind, node: int, problem: str) -> None:
        stage = {"train": "", "evaluate": "evaluation: "}.get(kind, f"{kind}: ")
        name, reason = self._clients[node].name, one_line(stage + problem)
        if kind == "unmask":  # its numbers are in the sum all the same
            log.warning("%s: %s", name, reason)
        else:
            self._report.failures.append({"name": name, "reason": reason})

    def _open_shares(
        self, sealed: Mapping[int, np.ndarray], members: Sequence[int], survivors: Sequence[int]
    ) -> dict[int, dict[int, bytes]]:
        """``threshold`` shares for each member, by place: of a survivor's seed, of a lost client's mask key."""
        places, packets = self._places(survivors), {}
        for node, place in zip(survivors, places, strict=True):
            to_node = np.stack([sealed[member][place] for member in members])
            packets[node] = Packet({"shares": to_node}, config={"survivors": places})
        opened = dict(self._ask("unmask", packets, "shares", (len(members), SECRET)))
        helpers = self._require_enough(opened, "helped to open the sum")[: self._threshold]
        by_place = list(zip(self._places(helpers), (opened[node] for node in helpers), strict=True))
        return {member: {place: bytes(shares[i]) for place, shares in by_place} for i, member in enumerate(members)}

    def _mask_left(self, node: int, survivors: Sequence[int], shares: Mapping[int, bytes], length: int) -> np.ndarray:
        """The masks of a client that are still in the sum, [length].

        They are the own mask of a survivor, or the negative pair masks of a lost client.
        """
        secret = combine(shares)
        if node in survivors:
            return mask(secret, length)
        if public_key(secret) != bytes(self._keys[node][1]):
            raise SpoiledSum(f"the shares of {self._clients[node].name}, which was lost, are not of its key")
        left, place = np.zeros(length, np.uint64), self._everyone.index(node)
        for other in survivors:
            left -= pair_mask(secret, bytes(self._keys[other][1]), place, self._everyone.index(other), length)
        return left
