"""A client's side of a sum that the server cannot take apart; the messages are in :mod:`task.secure_sum`.

Imports no torch: in a deployment every message starts a process.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag

from client_app.node import Node
from task.keys import ConfigError
from task.message import Kind, Packet
from task.secure_sum.crypto import (
    SEALED,
    SECRET,
    mask,
    new_secret,
    pair_mask,
    public_key,
    seal,
    share_key,
    split,
    unseal,
)
from task.secure_sum.fixed_point import RangeError, encode

log = logging.getLogger(__name__)

_MEMORY = "secure-sum"  # name in the node's memory


@dataclass
class _Secrets:
    """What a client remembers between the messages of a round; secrets and keys as hexadecimal text."""

    expects: str  # the only step that it takes next: keys, shares, sum, unmask
    sealing: str = field(default_factory=lambda: new_secret().hex())  # private key for sealed shares
    masking: str = field(default_factory=lambda: new_secret().hex())  # private key for masks between two clients
    seed: str = field(default_factory=lambda: new_secret().hex())  # of its own mask
    threshold: int = 0
    keys: list[tuple[str, str]] = field(default_factory=list)  # public, for sealing and masking, of U1 by place
    members: list[int] = field(default_factory=list)  # places of U2

    def public(self) -> tuple[str, str]:
        """Its public keys, for sealing and masking."""
        return public_key(bytes.fromhex(self.sealing)).hex(), public_key(bytes.fromhex(self.masking)).hex()

    @property
    def place(self) -> int:
        """Its own place in U1."""
        return self.keys.index(self.public())

    def share_key(self, other: int, *, sends: bool) -> bytes:
        """The key for shares to the client at a place, or from it."""
        mine, theirs = bytes.fromhex(self.public()[0]), bytes.fromhex(self.keys[other][0])
        parties = (mine, theirs) if sends else (theirs, mine)
        return share_key(bytes.fromhex(self.sealing), theirs, *parties)


def _recall(node: Node, step: str) -> _Secrets:
    """Take the secrets out of the node's memory; whoever goes on puts them back.

    Raises:
        ConfigError: this is not the next step; the secrets are gone then too.
    """
    text = node.memory.pop(_MEMORY, "")
    secrets = _Secrets(**json.loads(text)) if text else _Secrets(expects="keys")
    secrets.keys = [(sealing, masking) for sealing, masking in secrets.keys]
    if secrets.expects != step:
        raise ConfigError(f"step {step!r} of a secure sum was asked for where {secrets.expects!r} was expected.")
    return secrets


def _remember(node: Node, secrets: _Secrets) -> None:
    node.memory[_MEMORY] = json.dumps(asdict(secrets))


def _send_keys(packet: Packet, node: Node) -> Packet:
    secrets = _Secrets(expects="shares")
    _remember(node, secrets)
    return Packet({"keys": _rows(bytes.fromhex("".join(secrets.public())), SECRET)})


def _send_shares(packet: Packet, node: Node) -> Packet:
    secrets = _recall(node, "shares")
    keys = packet.arrays["keys"]
    secrets.keys = [(bytes(sealing).hex(), bytes(masking).hex()) for sealing, masking in keys]
    secrets.threshold, number = int(str(packet.config["threshold"])), len(secrets.keys)
    if secrets.keys.count(secrets.public()) != 1 or len({key for pair in secrets.keys for key in pair}) != 2 * number:
        raise ConfigError("the keys of this round's clients are not distinct, or this node's are missing.")
    if not max(1, number / 2) < secrets.threshold <= number:
        raise ConfigError(
            f"a threshold of {secrets.threshold} for {number} clients: more than half, and two, are needed."
        )
    shares = [split(bytes.fromhex(secret), secrets.threshold, number) for secret in (secrets.seed, secrets.masking)]
    sealed = [seal(secrets.share_key(v, sends=True), shares[0][v] + shares[1][v]) for v in range(number)]
    secrets.expects = "sum"
    _remember(node, secrets)
    return Packet({"shares": _rows(b"".join(sealed), SEALED)})


def hide_in_sum(values: np.ndarray, largest: float, packet: Packet, node: Node) -> np.ndarray:
    """The numbers that a client adds to a sum, float64 [P], under its masks, uint64 [P].

    Raises:
        ConfigError: a number above ``largest``, or a message that is not the next one of a secure sum.
    """
    secrets, length = _recall(node, "sum"), len(values)
    place, members = secrets.place, sorted({int(m) for m in _listed(packet, "members")})
    if place not in members or not set(members) <= set(range(len(secrets.keys))) or len(members) < secrets.threshold:
        raise ConfigError("this round's secure sum has too few clients, or is not this node's.")
    try:
        hidden = encode(values, largest, len(secrets.keys))
    except RangeError as error:
        log.warning("%s: the largest is %g", error, np.abs(values).max())  # here only: it says something of the images
        raise ConfigError(
            f"a sum of this node exceeds secure-aggregation-range = {largest:g}: raise it, or train with smaller steps."
        ) from error
    hidden = hidden + mask(bytes.fromhex(secrets.seed), length)
    for other in members:
        if other != place:
            key = bytes.fromhex(secrets.keys[other][1])
            hidden += pair_mask(bytes.fromhex(secrets.masking), key, place, other, length)
    secrets.expects, secrets.members = "unmask", members
    _remember(node, secrets)
    return hidden


def _open_shares(packet: Packet, node: Node) -> Packet:
    """Of each survivor the share of its seed, of each other member that of its mask key; never both of one."""
    secrets = _recall(node, "unmask")
    survivors = {int(place) for place in _listed(packet, "survivors")}
    if not survivors <= set(secrets.members) or len(survivors) < secrets.threshold or secrets.place not in survivors:
        raise ConfigError("the clients whose sums came are too few, or others than those of this round.")
    opened = []
    for member, sealed in zip(secrets.members, packet.arrays["shares"], strict=True):
        try:
            shares = unseal(secrets.share_key(member, sends=False), bytes(sealed))
        except InvalidTag:  # whoever sends such a thing spoils the sum, but must not stop the others
            log.warning("the shares of the client at place %d of this round cannot be opened", member)
            shares = bytes(2 * SECRET)
        opened.append(shares[:SECRET] if member in survivors else shares[SECRET:])
    return Packet({"shares": _rows(b"".join(opened), SECRET)})


def _rows(content: bytes, length: int) -> np.ndarray:
    return np.frombuffer(content, np.uint8).reshape(-1, length)


def _listed(packet: Packet, name: str) -> list[Any]:
    value = packet.config.get(name)
    return value if isinstance(value, list) else []


_ANSWERS: dict[Kind, Callable[[Packet, Node], Packet]] = {
    "keys": _send_keys,
    "shares": _send_shares,
    "unmask": _open_shares,
}


def handle(kind: Kind, packet: Packet, node: Node) -> Packet:
    """Answer a message of a secure sum; a failure is an answer too, its reason under ``error`` in the config."""
    try:
        return _ANSWERS[kind](packet, node)
    except Exception as error:
        log.warning("%s failed: %s", kind, error or type(error).__name__)
        return Packet(config={"error": str(error) or type(error).__name__})
