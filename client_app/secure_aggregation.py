"""A client's side of a sum that the server cannot take apart; the messages are in :mod:`task.secure_aggregation`.

Imports no torch: in a deployment every message starts a process.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from client_app.node import Node
from task.keys import ConfigError
from task.message import Kind, Packet
from task.secure_aggregation.crypto import (
    SEALED,
    SECRET,
    agree,
    mask,
    new_secret,
    pair_mask,
    public_key,
    seal,
    split,
    unseal,
)
from task.secure_aggregation.fixed_point import encode

log = logging.getLogger(__name__)


@dataclass
class _Secrets:
    """What a client remembers between the messages of a round; it makes up the node's memory."""

    expects: str = "shares"  # the only step that it takes next: shares, sum, unmask
    sealing: bytes = field(default_factory=new_secret)  # private key for sealed shares
    masking: bytes = field(default_factory=new_secret)  # private key for masks between two clients
    seed: bytes = field(default_factory=new_secret)  # of its own mask
    threshold: int = 0
    sealing_keys: list[bytes] = field(default_factory=list)  # public, of U1 by place
    masking_keys: list[bytes] = field(default_factory=list)  # public, of U1 by place
    members: list[int] = field(default_factory=list)  # places of U2

    def public(self) -> tuple[bytes, bytes]:
        """Its public keys, for sealing and masking."""
        return public_key(self.sealing), public_key(self.masking)

    @property
    def place(self) -> int:
        """Its own place in U1."""
        return self.masking_keys.index(public_key(self.masking))

    def share_key(self, other: int, sender: int, receiver: int) -> bytes:
        """The key for shares from ``sender`` to ``receiver``; ``other`` is the one that is not its own."""
        direction = self.sealing_keys[sender] + self.sealing_keys[receiver]
        return agree(self.sealing, self.sealing_keys[other], b"shares" + direction)


def _take_secrets(node: Node, step: str) -> _Secrets:
    """Take the secrets out of the node's memory; each step but the last puts them back.

    Raises:
        ConfigError: this is not the next step; the secrets are gone then too.
    """
    remembered = dict(node.memory)
    node.memory.clear()
    expected = remembered.get("expects", "keys")
    if expected != step:
        raise ConfigError(f"step {step!r} of a secure sum was asked for where {expected!r} was expected.")
    return _Secrets(**remembered)


def _send_keys(packet: Packet, node: Node) -> Packet:
    secrets = _Secrets()
    node.memory.update(vars(secrets))
    return Packet({"keys": _rows(secrets.public(), SECRET)})


def _send_shares(packet: Packet, node: Node) -> Packet:
    secrets, keys = _take_secrets(node, "shares"), packet.arrays["keys"]
    secrets.sealing_keys, secrets.masking_keys = ([bytes(key) for key in keys[:, i]] for i in (0, 1))
    secrets.threshold, number = int(str(packet.config["threshold"])), len(keys)
    pairs = list(zip(secrets.sealing_keys, secrets.masking_keys, strict=True))
    all_distinct = len({*secrets.sealing_keys, *secrets.masking_keys}) == 2 * number
    safe_threshold = max(1, number / 2) < secrets.threshold <= number
    if not (secrets.public() in pairs and all_distinct and safe_threshold):
        raise ConfigError(
            f"the keys of the {number} clients of this round are not distinct or lack this node's, or a threshold of "
            f"{secrets.threshold} is not more than half of them, and two."
        )
    place = secrets.place
    both = zip(*(split(secret, secrets.threshold, number) for secret in (secrets.seed, secrets.masking)), strict=True)
    sealed = [seal(secrets.share_key(v, place, v), of_seed + of_key) for v, (of_seed, of_key) in enumerate(both)]
    secrets.expects = "sum"
    node.memory.update(vars(secrets))
    return Packet({"shares": _rows(sealed, SEALED)})


def hide_in_sum(values: np.ndarray, largest: float, packet: Packet, node: Node) -> np.ndarray:
    """The numbers that a client adds to a sum, float64 [P], under its masks, uint64 [P].

    Raises:
        ConfigError: a number above ``largest`` or not finite, or a message that is not the next one of a secure sum.
    """
    secrets = _take_secrets(node, "sum")
    place, number, members = secrets.place, len(secrets.masking_keys), set(cast("list[int]", packet.config["members"]))
    if place not in members or not members <= set(range(number)) or len(members) < secrets.threshold:
        raise ConfigError("this round's secure sum has too few clients, or is not this node's.")
    try:
        hidden = encode(values, largest, number)
    except ValueError as error:
        # only in this node's log: the number says something of the images
        log.warning("%s: the largest is %g", error, np.abs(values).max())
        reason = f"exceeds secure-aggregation-range = {largest:g}: raise it, or train with smaller steps."
        if not np.isfinite(values).all():  # in any range
            reason = "holds NaN or infinite values: train with smaller steps, or set afcl-dtype, fedrda-dtype to fp32."
        raise ConfigError(f"a sum of this node {reason}") from error
    hidden = hidden + mask(secrets.seed, len(values))
    for other in members - {place}:
        hidden += pair_mask(secrets.masking, secrets.masking_keys[other], place, other, len(values))
    secrets.expects, secrets.members = "unmask", sorted(members)
    node.memory.update(vars(secrets))
    return hidden


def _open_shares(packet: Packet, node: Node) -> Packet:
    """Open one share of each client: of its seed if it answered, else of its mask key; never both of one client."""
    from cryptography.exceptions import InvalidTag

    secrets = _take_secrets(node, "unmask")
    place, survivors = secrets.place, set(cast("list[int]", packet.config["survivors"]))
    if not survivors <= set(secrets.members) or len(survivors) < secrets.threshold or place not in survivors:
        raise ConfigError("the clients whose sums came are too few, or others than those of this round.")
    opened = []
    for member, sealed in zip(secrets.members, packet.arrays["shares"], strict=True):
        try:
            shares = unseal(secrets.share_key(member, member, place), bytes(sealed))
        except InvalidTag:  # a client that sent such shares spoils the sum, but must not stop the others
            log.warning("the shares of the client at place %d of this round cannot be opened", member)
            shares = bytes(2 * SECRET)
        opened.append(shares[:SECRET] if member in survivors else shares[SECRET:])
    return Packet({"shares": _rows(opened, SECRET)})


def _rows(texts: Iterable[bytes], length: int) -> np.ndarray:
    return np.frombuffer(b"".join(texts), np.uint8).reshape(-1, length)


SUM_STEPS: dict[Kind, Callable[[Packet, Node], Packet]] = {
    "keys": _send_keys,
    "shares": _send_shares,
    "unmask": _open_shares,
}
