"""The four messages of a secure sum: what comes out, who may be lost when, and what a server gets to see."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from client_app.client import handle
from client_app.node import Node
from client_app.secure_aggregation import _Secrets, hide_in_sum
from server_app.clients.client_info import ClientInfo
from server_app.run_files.results import RoundReport
from server_app.secure_aggregation.secure_sum import SecureSum, SpoiledSum, TooFewClients
from server_app.transport import base
from server_app.transport.base import Reply
from task.keys import ConfigError
from task.message import Kind, Packet, copy_packet, payload_bytes
from task.secure_aggregation.crypto import combine, mask, pair_mask
from task.secure_aggregation.fixed_point import encode, fraction_bits

LARGEST = 1000.0
MODULUS = 2**64
Lost = Mapping[Kind, set[int]]


class Clients:
    """Clients that each add a vector, a transport to them, and all that a server could write down."""

    def __init__(self, vectors: np.ndarray, lost: Lost | None = None) -> None:
        self.vectors, self.lost = vectors, lost or {}
        self.nodes = {i: Node({}) for i in range(len(vectors))}
        self.sent: dict[tuple[Kind, int], Packet] = {}
        self.answers: dict[tuple[Kind, int], Packet] = {}
        self.secrets: dict[int, dict[str, Any]] = {}  # of each client before it answers train; no server sees them
        self.tamper: Callable[[Kind, int, Packet], Packet] = lambda kind, node, answer: answer
        self.report = RoundReport(1, 1, [f"client-{i}" for i in self.nodes])

    def answer(self, kind: Kind, node: int, packet: Packet) -> Packet:
        if kind != "train":
            return handle(kind, packet, self.nodes[node])
        self.secrets[node] = dict(self.nodes[node].memory)
        return Packet({"hidden": hide_in_sum(self.vectors[node], LARGEST, packet, self.nodes[node])})

    def exchange(
        self, kind: Kind, packets: Mapping[int, Packet], timeout: float, largest_answer: int = 0
    ) -> Iterator[Reply]:
        for node, packet in packets.items():
            self.sent[kind, node] = copy_packet(packet)
            if node in self.lost.get(kind, ()):
                yield Reply(node, None, "no answer within 5 s", payload_bytes(packet), 0)
            else:
                answer = self.tamper(kind, node, copy_packet(self.answer(kind, node, self.sent[kind, node])))
                self.answers[kind, node] = answer
                yield Reply(node, answer, "", payload_bytes(packet), payload_bytes(answer))

    def sum(self, threshold: int) -> np.ndarray:
        infos = [ClientInfo(f"client-{i}", i, (), *[np.empty(0)] * 3, 0, (), (), "", "", (), "", 0) for i in self.nodes]
        secure_sum = SecureSum(self, infos, threshold, 5.0, self.report)
        values, survivors = secure_sum.collect("train", Packet(), self.vectors.shape[1], LARGEST)
        self.survivors = [client.node for client in survivors]
        self.seconds = secure_sum.seconds
        return values

    def hidden(self, node: int) -> np.ndarray:
        return self.answers["train", node].arrays["hidden"]


def vectors(clients: int, length: int = 50) -> np.ndarray:
    return np.random.default_rng(3).uniform(-LARGEST, LARGEST, (clients, length))


def assert_is_sum(values: np.ndarray, terms: np.ndarray, clients: int) -> None:
    """But for half a step of each of the terms, and the last bits of float64 in a sum by NumPy."""
    limit = len(terms) * 2.0 ** -(fraction_bits(LARGEST, clients) + 1) + 1e-12
    np.testing.assert_allclose(values, terms.sum(axis=0), rtol=0, atol=limit)


KINDS: tuple[Kind, ...] = ("keys", "shares", "train", "unmask")


@pytest.mark.parametrize("clients", [2, 3, 5])
def test_the_sum_is_that_of_all_clients(clients):
    given = Clients(vectors(clients))
    assert_is_sum(given.sum(clients // 2 + 1), given.vectors, clients)
    assert given.report.failures == []
    assert given.report.bytes_up == sum(map(payload_bytes, given.answers.values()))
    assert given.report.bytes_down == sum(map(payload_bytes, given.sent.values()))


def test_a_sum_that_goes_on_says_how_many_have_answered_each_message(monkeypatch, caplog):
    monkeypatch.setattr(base, "SILENCE", 0.0)
    with caplog.at_level("INFO"):
        Clients(vectors(3)).sum(2)
    assert caplog.messages == ["answers of 1 of 3 clients", "answers of 2 of 3 clients"] * len(KINDS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("node", [0, 4])
def test_one_client_may_be_lost_before_any_message(kind, node):
    given = Clients(vectors(5), {kind: {node}})
    others = [i for i in range(5) if i != node or kind == "unmask"]
    total = given.sum(3)
    assert given.survivors == others
    assert_is_sum(total, given.vectors[others], 5)
    gone = (
        {}
        if kind == "unmask"
        else {f"client-{node}": ("" if kind == "train" else f"{kind}: ") + "no answer within 5 s"}
    )
    assert {f["name"]: f["reason"] for f in given.report.failures} == gone


def test_clients_may_be_lost_before_every_message_down_to_the_threshold():
    lost: dict[Kind, set[int]] = {"keys": {8}, "shares": {0}, "train": {3}, "unmask": {1}}
    given = Clients(vectors(9), lost)
    assert_is_sum(given.sum(5), given.vectors[[1, 2, 4, 5, 6, 7]], 8)
    given = Clients(vectors(9), lost | {"unmask": {1, 7}})
    with pytest.raises(TooFewClients, match="4 of 9 clients have helped to open the sum"):
        given.sum(5)


@pytest.mark.parametrize(
    ("kind", "have"),
    [
        ("keys", "sent keys"),
        ("shares", "sent shares"),
        ("train", "sent their part of the sum"),
        ("unmask", "helped to open the sum"),
    ],
)
def test_below_the_threshold_there_is_no_sum(kind, have):
    given = Clients(vectors(5), {kind: {0, 1, 2}})
    with pytest.raises(TooFewClients, match=f"2 of 5 clients have {have}, secure-aggregation-threshold is 3"):
        given.sum(3)


def own_mask(seed: bytes, length: int) -> list[int]:
    """Python's integers."""
    stream = Cipher(algorithms.ChaCha20(seed, bytes(16)), None).encryptor().update(bytes(8 * length))
    return [int.from_bytes(stream[i : i + 8], "little") for i in range(0, 8 * length, 8)]


def test_masks_between_clients_cancel_in_the_sum():
    """With Python's integers: the hidden numbers of all less their own masks are the numbers in steps, modulo 2^64."""
    given = Clients(vectors(4))
    given.sum(3)
    columns = zip(*(given.hidden(i).tolist() for i in range(4)), strict=True)
    masks = zip(*(own_mask(given.secrets[i]["seed"], 50) for i in range(4)), strict=True)
    steps = 2 ** fraction_bits(LARGEST, 4)
    for hidden, own, exact in zip(columns, masks, given.vectors.T, strict=True):
        expected = sum(round(value * steps) for value in exact) % MODULUS
        assert (sum(hidden) - sum(own)) % MODULUS == expected


# What a server sees. Bytes of uniform noise have a chi-square of 255 degrees of freedom: mean 255, deviation 22.6. Ten
# deviations above happen by chance less than once in 10^15 tests.
UNIFORM = 255 + 10 * 22.6
LENGTH = 20_000


def unevenness(numbers: np.ndarray) -> float:
    """The largest chi-square of the frequencies of byte values, at each of the 8 places in a number and over all."""
    content = numbers.astype("<u8").view(np.uint8).reshape(-1, 8)
    counts = [np.bincount(content[:, place], minlength=256) for place in range(8)]
    return max(float(np.square(c - c.mean()).sum() / c.mean()) for c in (*counts, sum(counts)))


def constant(clients: int) -> np.ndarray:
    return np.full((clients, LENGTH), 12.5)


def test_the_measure_of_noise_tells_numbers_from_noise():
    assert unevenness(encode(constant(1)[0], LARGEST, 3)) > 1e5
    assert unevenness(encode(vectors(1, LENGTH)[0], LARGEST, 3)) > 1e3
    assert unevenness(mask(bytes(range(32)), LENGTH)) < UNIFORM


@pytest.mark.parametrize("content", [constant, lambda clients: vectors(clients, LENGTH)], ids=["constant", "random"])
def test_every_message_of_a_client_is_noise(content):
    given = Clients(content(3))
    given.sum(2)
    for node in range(3):
        assert unevenness(given.hidden(node)) < UNIFORM
        assert unevenness(given.hidden(node) - encode(given.vectors[node], LARGEST, 3)) < UNIFORM
    assert unevenness(given.hidden(0) - given.hidden(1)) < UNIFORM


def test_the_same_numbers_are_hidden_otherwise_in_the_next_round():
    given = Clients(constant(3))
    given.sum(2)
    first = given.hidden(0)
    given.sum(2)
    assert unevenness(first) < UNIFORM
    assert unevenness(given.hidden(0) - first) < UNIFORM


def test_opening_the_sum_opens_no_part_of_it():
    """After the last message a server knows the seeds of the clients in the sum; masks of pairs hide each of them."""
    given = Clients(constant(4))
    given.sum(3)
    for node in range(4):
        alone = given.hidden(node) - mask(given.secrets[node]["seed"], LENGTH)
        assert unevenness(alone) < UNIFORM
    for pair in combinations(range(4), 2):
        both = sum(given.hidden(i) - mask(given.secrets[i]["seed"], LENGTH) for i in pair)
        assert unevenness(both) < UNIFORM


def test_a_part_that_comes_too_late_stays_hidden():
    """The others have given its mask key away, so that nothing but its own mask is left."""
    given = Clients(constant(4), {"train": {2}})
    given.sum(3)
    late = given.answer("train", 2, given.sent["train", 2]).arrays["hidden"]
    secrets, everyone = given.secrets[2], [0, 1, 2, 3]
    key = combine({i: bytes(given.answers["unmask", i].arrays["shares"][2]) for i in (0, 1, 3)})
    assert key == secrets["masking"]
    pairs = [pair_mask(key, secrets["masking_keys"][i], 2, i, LENGTH) for i in everyone if i != 2]
    assert unevenness(late - sum(pairs)) < UNIFORM
    own = mask(secrets["seed"], LENGTH)
    np.testing.assert_array_equal(late - sum(pairs) - own, encode(given.vectors[2], LARGEST, 4))


def test_clients_below_the_threshold_that_help_the_server_see_noise():
    """Two of five, at a threshold of three: the server takes off all masks of the two, and tries their shares."""
    given = Clients(constant(5), {"unmask": {2, 3, 4}})
    with pytest.raises(TooFewClients):
        given.sum(3)
    left = given.hidden(4)
    for node in (0, 1):
        keys = given.secrets[node]
        left = left + pair_mask(keys["masking"], keys["masking_keys"][4], node, 4, LENGTH)
    seed = combine({i: bytes(given.answers["unmask", i].arrays["shares"][4]) for i in (0, 1)})
    assert seed != given.secrets[4]["seed"]
    assert unevenness(left) < UNIFORM
    assert unevenness(left - mask(seed, LENGTH)) < UNIFORM


def test_sealed_shares_and_opened_ones_are_noise():
    """Over 60 rounds of the same numbers, 360 sealed rows of 92 bytes of which 64 are shares."""
    content = []
    for _ in range(60):
        given = Clients(np.zeros((3, 1)))
        given.sum(2)
        content += [
            given.answers[kind, i].arrays["shares"].tobytes() for kind in ("shares", "unmask") for i in range(3)
        ]
        content += [given.answers["keys", i].arrays["keys"][0, :31].tobytes() for i in range(3)]
    counts = np.bincount(np.frombuffer(b"".join(content), np.uint8), minlength=256)
    assert float(np.square(counts - counts.mean()).sum() / counts.mean()) < UNIFORM


# A client does not do everything that it is asked.


def asked_to_unmask(change: Callable[[Packet], None]) -> str:
    """What client 1 of 4 says to a last message that was changed; client 3 was lost."""
    given = Clients(vectors(4), {"train": {3}, "unmask": {1}})
    with pytest.raises(TooFewClients):
        given.sum(3)
    packet = given.sent["unmask", 1]
    change(packet)
    first = given.answer("unmask", 1, packet)
    assert given.nodes[1].memory == {}  # whatever it was, the secrets are gone
    return str(first.config.get("error", ""))


@pytest.mark.parametrize(
    ("survivors", "accepted"),
    [([0, 1, 2], True), ([0, 1], False), ([0, 2, 3], False), ([0, 1, 2, 4], False), ([], False), ([0, 1, 2, 3], True)],
    ids=["as it was", "too few", "without itself", "a stranger", "none", "all"],
)
def test_the_sum_is_opened_for_a_whole_round_only(survivors, accepted):
    reason = asked_to_unmask(lambda packet: packet.config.update({"survivors": survivors}))
    assert ("are too few, or others" in reason) != accepted


def test_no_client_gives_both_shares_of_a_peer():
    """Once client 1 has helped without client 3, it does not help with it, nor a second time at all."""
    given = Clients(vectors(4), {"train": {3}})
    given.sum(3)
    again = given.sent["unmask", 1]
    for survivors in ([0, 1, 2], [0, 1, 2, 3]):
        again.config["survivors"] = survivors
        answer = given.answer("unmask", 1, again)
        assert answer.arrays == {}
        assert answer.config["error"] == "step 'unmask' of a secure sum was asked for where 'keys' was expected."


@pytest.mark.parametrize("kind", ["shares", "train"])
def test_no_message_is_answered_twice_with_the_same_secrets(kind):
    """Two different vectors under one mask would give their difference away."""
    given = Clients(vectors(3), {KINDS[KINDS.index(kind) + 1]: {0, 1, 2}})
    with pytest.raises(TooFewClients):
        given.sum(2)
    given.vectors = -given.vectors
    if kind == "train":
        with pytest.raises(ConfigError, match="step 'sum' of a secure sum was asked for where 'unmask'"):
            given.answer("train", 1, given.sent["train", 1])
    else:
        assert "step 'shares'" in given.answer("shares", 1, given.sent["shares", 1]).config["error"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda p: p.config.update({"threshold": 2}), "a threshold of 2 is"),
        (lambda p: p.config.update({"threshold": 5}), "a threshold of 5 is"),
        (lambda p: p.arrays.update({"keys": p.arrays["keys"][[0, 0, 1, 2]]}), "not distinct"),
        (lambda p: p.arrays.update({"keys": p.arrays["keys"][[0, 2, 3]]}), "lack this node's"),
        (
            lambda p: (p.arrays.update({"keys": p.arrays["keys"][[1]]}), p.config.update({"threshold": 1})),
            "of the 1 clients",
        ),
        (lambda p: p.arrays.clear(), "keys"),
    ],
    ids=["two sets could be opened", "never opened", "twice", "not its own", "alone", "none"],
)
def test_shares_go_to_a_whole_round_only(change, reason):
    given = Clients(vectors(4), {"shares": {0, 1, 2, 3}})
    with pytest.raises(TooFewClients):
        given.sum(3)
    packet = given.sent["shares", 1]
    change(packet)
    assert reason in given.answer("shares", 1, packet).config["error"]


@pytest.mark.parametrize("members", [[0, 1], [0, 2, 3], [0, 1, 4], []], ids=["few", "without it", "a stranger", "none"])
def test_numbers_are_hidden_among_enough_clients_only(members):
    given = Clients(vectors(4), {"train": {0, 1, 2, 3}})
    with pytest.raises(TooFewClients):
        given.sum(3)
    packet = given.sent["train", 1]
    packet.config["members"] = members
    with pytest.raises(ConfigError, match="too few clients, or is not this node's"):
        given.answer("train", 1, packet)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_is_not_put_down_to_the_range(value: float) -> None:
    """No range has room for it: fp16 statistics with noise may overflow, a training may diverge in its last step."""
    with pytest.raises(ConfigError) as refused:
        Clients(np.full((3, 2), value)).sum(2)
    assert "a sum of this node holds NaN or infinite values: train with smaller steps" in str(refused.value)
    assert "range" not in str(refused.value)


def test_a_number_beyond_the_range_is_refused_without_saying_which(caplog):
    given = Clients(vectors(3))
    given.vectors[1, 7] = 4321.0
    with pytest.raises(ConfigError) as refused:
        given.sum(2)
    assert "exceeds secure-aggregation-range = 1000: raise it" in str(refused.value)
    assert "4321" not in str(refused.value)
    assert "the largest is 4321" in caplog.text  # on the node


# Clients that send something else.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "wrong",
    [lambda a: a[..., :-1], lambda a: a.astype(np.float32), lambda a: np.empty(0), lambda a: np.array(["x"])],
    ids=["short", "float", "empty", "text"],
)
def test_an_answer_of_another_shape_or_type_is_left_out(kind, wrong):
    given = Clients(vectors(4))

    def tamper(of: Kind, node: int, answer: Packet) -> Packet:
        changed = {name: wrong(array) for name, array in answer.arrays.items()}
        return dataclasses.replace(answer, arrays=changed) if (of, node) == (kind, 2) else answer

    given.tamper = tamper
    assert_is_sum(given.sum(3), given.vectors[[0, 1, 2, 3] if kind == "unmask" else [0, 1, 3]], 4)
    assert [f["name"] for f in given.report.failures] == ([] if kind == "unmask" else ["client-2"])


def test_shares_that_nobody_can_open_stop_nobody_else():
    given = Clients(vectors(4), {"train": {2}})
    given.tamper = lambda kind, node, answer: (
        Packet({"shares": answer.arrays["shares"] ^ 1}) if (kind, node) == ("shares", 2) else answer
    )
    with pytest.raises(SpoiledSum, match="the shares of client-2, which was lost, are not of its key"):
        given.sum(3)
    assert given.report.failures == [{"name": "client-2", "reason": "no answer within 5 s"}]


@pytest.mark.parametrize("key", [bytes(32), bytes([1] + [0] * 31), b"twice"], ids=["zero", "one", "twice"])
def test_keys_that_the_others_would_refuse_are_left_out(key):
    """With some points of the curve nobody can agree on anything; one key for two purposes is no better."""
    given = Clients(vectors(4))

    def tamper(kind: Kind, node: int, answer: Packet) -> Packet:
        if (kind, node) == ("keys", 3):
            keys = answer.arrays["keys"].copy()
            keys[1] = keys[0] if key == b"twice" else np.frombuffer(key, np.uint8)
            return Packet({"keys": keys})
        return answer

    given.tamper = tamper
    assert_is_sum(given.sum(3), given.vectors[:3], 3)
    assert given.report.failures == [{"name": "client-3", "reason": "keys: what came is no key, or not its own"}]


def test_keys_that_two_clients_send_are_left_out_both_times() -> None:
    """Nobody can tell whose they are."""
    given = Clients(vectors(5))
    given.tamper = lambda kind, node, answer: (
        copy_packet(given.answers["keys", 1]) if (kind, node) == ("keys", 3) else answer
    )
    assert_is_sum(given.sum(3), given.vectors[[0, 2, 4]], 3)
    assert [f["name"] for f in given.report.failures] == ["client-1", "client-3"]


@pytest.mark.parametrize("seconds", [-1.0, np.inf, np.nan, 10**400, "long", [1.0]])
def test_seconds_that_cannot_be_are_not_added(seconds):
    given = Clients(vectors(3))
    given.tamper = lambda kind, node, answer: dataclasses.replace(
        answer, metrics={"seconds-train": seconds if node == 1 else 2.5}
    )
    given.sum(2)
    assert given.seconds["seconds-train"] == 2.5 * 2 * 4  # of the answers of two clients to four messages


def test_a_failure_on_the_client_is_named():
    given = Clients(vectors(4))
    given.tamper = lambda kind, node, answer: Packet(config={"error": "out of memory"}) if node == 3 else answer
    assert_is_sum(given.sum(3), given.vectors[:3], 4)
    assert given.report.failures == [{"name": "client-3", "reason": "keys: out of memory"}]


def test_nothing_is_remembered_after_the_round():
    given = Clients(vectors(4))
    given.sum(3)
    assert [node.memory for node in given.nodes.values()] == [{}] * 4


class SlowClients(Clients):
    """Whoever is lost uses up all the time of a message."""

    waited = 0.0

    def exchange(
        self, kind: Kind, packets: Mapping[int, Packet], timeout: float, largest_answer: int = 0
    ) -> Iterator[Reply]:
        self.waited += timeout if self.lost[kind] & set(packets) else 0.0
        yield from super().exchange(kind, packets, timeout, largest_answer)


def test_clients_that_are_lost_one_after_the_other_use_the_time_of_a_round_once() -> None:
    """5 s; and there is time left for what follows each of them."""
    clients = SlowClients(vectors(9), {"keys": {0}, "shares": {1}, "train": {2}, "unmask": {3}})
    clients.sum(threshold=5)
    assert clients.waited == pytest.approx(5)


def test_shares_have_a_key_for_each_direction() -> None:
    one, other = _Secrets(), _Secrets()
    one.sealing_keys = other.sealing_keys = [one.public()[0], other.public()[0]]
    there, back = one.share_key(1, 0, 1), one.share_key(1, 1, 0)
    assert there != back
    assert (other.share_key(0, 0, 1), other.share_key(0, 1, 0)) == (there, back)
