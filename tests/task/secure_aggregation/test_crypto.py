"""Fixed point, masks and shares of a secure sum, against integers, published vectors and a field of our own."""

import hmac
from fractions import Fraction

import numpy as np
import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from task.secure_aggregation.crypto import (
    SECRET,
    agree,
    combine,
    mask,
    new_secret,
    pair_mask,
    public_key,
    seal,
    split,
    unseal,
)
from task.secure_aggregation.fixed_point import decode, encode, fraction_bits

MODULUS = 2**64


@pytest.mark.parametrize("clients", [2, 3, 10, 100])
@pytest.mark.parametrize("largest", [1.0, 1e9, 1e15])
def test_a_sum_is_that_of_the_numbers_but_for_half_a_step_of_each(clients: int, largest: float) -> None:
    """Exact fractions; the first two columns are the largest numbers there are, which do not overflow."""
    rng = np.random.default_rng(0)
    values = rng.uniform(-largest, largest, (clients, 40)) * 10.0 ** rng.integers(-12, 1, 40)
    values[:, 0], values[:, 1] = largest, -largest
    total = sum(encode(row, largest, clients) for row in values)
    step = Fraction(2) ** -fraction_bits(largest, clients)
    for got, column in zip(decode(total, largest, clients), values.T, strict=True):
        exact = sum(map(Fraction, column))
        assert abs(Fraction(got) - exact) <= clients * step / 2 + abs(exact) / 2**52
    assert clients * Fraction(largest) / step <= 2**62
    assert step * 2**61 <= clients * Fraction(largest)  # and no coarser than that needs


def test_whole_numbers_are_exact() -> None:
    values = np.array([[3.0, 0.0, -7.0, 1e9], [4.0, 0.0, 7.0, 1.0], [5.0, 0.0, -1.0, 0.0]])
    total = sum(encode(row, 1e15, 3) for row in values)
    assert decode(total, 1e15, 3).tolist() == [12.0, 0.0, -1.0, 1e9 + 1]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1000.0001, -1000.0001])
def test_a_number_beyond_the_range_is_refused(value: float) -> None:
    encode(np.array([1000.0, -1000.0]), 1000.0, 3)
    with pytest.raises(ValueError, match=r"not within -1000 \.\. 1000"):
        encode(np.array([0.0, value]), 1000.0, 3)


def test_a_mask_is_the_key_stream_of_chacha20() -> None:
    """RFC 8439, appendix A.1, test vector 1: key, nonce and counter are zero."""
    stream = bytes.fromhex(
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )
    assert mask(bytes(32), 8).tolist() == [int.from_bytes(stream[i : i + 8], "little") for i in range(0, 64, 8)]


def test_masks_of_a_pair_cancel() -> None:
    """Python's integers, not NumPy's."""
    first, second = new_secret(), new_secret()
    one = pair_mask(first, public_key(second), 2, 5, 1000)
    other = pair_mask(second, public_key(first), 5, 2, 1000)
    assert {(a + b) % MODULUS for a, b in zip(one.tolist(), other.tolist(), strict=True)} == {0}
    assert len(set(one.tolist())) == 1000


def test_the_mask_of_a_pair_has_a_purpose_of_its_own() -> None:
    """X25519, then HKDF-SHA256 (RFC 5869) written out: without salt, information "mask"."""
    first, second = new_secret(), new_secret()
    secret = X25519PrivateKey.from_private_bytes(first).exchange(X25519PublicKey.from_public_bytes(public_key(second)))
    extracted = hmac.digest(bytes(32), secret, "sha256")
    key = hmac.digest(extracted, b"mask\x01", "sha256")
    assert (pair_mask(first, public_key(second), 0, 1, 9) == mask(key, 9)).all()


def test_keys_of_another_purpose_or_pair_are_others() -> None:
    a, b, c = new_secret(), new_secret(), new_secret()
    pa, pb = public_key(a), public_key(b)
    assert agree(a, pb, b"shares") == agree(b, pa, b"shares")
    assert len({agree(a, pb, b"shares"), agree(a, pb, b"mask"), agree(c, pb, b"mask")}) == 3


def test_what_is_sealed_is_read_with_its_key_only_and_unchanged() -> None:
    key, text = new_secret(), bytes(range(64))
    sealed = seal(key, text)
    assert unseal(key, sealed) == text
    assert seal(key, text) != sealed
    for wrong_key, wrong in ((new_secret(), sealed), (key, sealed[:-1] + bytes([sealed[-1] ^ 1]))):
        with pytest.raises(InvalidTag):
            unseal(wrong_key, wrong)


@pytest.mark.parametrize(("threshold", "number"), [(2, 2), (2, 3), (4, 6)])
def test_any_shares_up_to_the_threshold_give_the_secret_and_fewer_do_not(threshold: int, number: int) -> None:
    secret = new_secret()
    shares = dict(enumerate(split(secret, threshold, number)))
    for start in range(number):
        places = [(start + i) % number for i in range(threshold)]
        assert combine({place: shares[place] for place in places}) == secret
        if threshold > 2:
            assert combine({place: shares[place] for place in places[1:]}) != secret


def multiply(a: int, b: int) -> int:
    """In the field of 2^128 numbers, modulo x^128 + x^7 + x^2 + x + 1."""
    product = 0
    for bit in range(128):
        product ^= (a << bit) * (b >> bit & 1)
    for bit in range(254, 127, -1):
        if product >> bit & 1:
            product ^= (2**128 | 0b10000111) << (bit - 128)
    return product


def invert(a: int) -> int:
    """a^(2^128 - 2)."""
    result, power = 1, a
    for _ in range(127):
        power = multiply(power, power)
        result = multiply(result, power)
    return result


def interpolate(points: dict[int, int], at: int) -> int:
    """The value at ``at`` of the one polynomial of least degree through ``points``."""
    total = 0
    for x, y in points.items():
        term = y
        for other in points:
            if other != x:
                term = multiply(term, multiply(at ^ other, invert(x ^ other)))
        total ^= term
    return total


@pytest.mark.parametrize("claimed", [bytes(SECRET), b"\xff" * SECRET, bytes(range(SECRET))])
def test_fewer_shares_than_the_threshold_fit_every_secret(claimed: bytes) -> None:
    """Two of three needed shares are real; whatever the secret is said to be, a third share makes it so."""
    shares = split(new_secret(), 3, 5)
    third = b""
    for half in (slice(0, 16), slice(16, 32)):
        points = {0: int.from_bytes(claimed[half])} | {i + 1: int.from_bytes(shares[i][half]) for i in (0, 3)}
        third += interpolate(points, at=3).to_bytes(16)
    assert combine({0: shares[0], 3: shares[3], 2: third}) == claimed
