"""Keys, sealed messages, shares of a secret, and masks: the libraries' own, put together for one round.

Key agreement X25519 (RFC 7748) and HKDF-SHA256 (RFC 5869), sealing ChaCha20-Poly1305, masks the key stream of ChaCha20
(RFC 8439), all of ``cryptography``; Shamir's shares of PyCryptodome. Randomness is the operating system's. Flower has
the same parts, but draws masks from a generator with a seed of 32 bits, which a server can try out. The libraries are
imported on use: other runs do not need them.
"""

import os
from collections.abc import Mapping

import numpy as np

SECRET = 32  # bytes of a key, a seed, and a share of either
_HALF, _NONCE, _TAG = 16, 12, 16  # bytes: what Shamir's field holds; what sealing adds
SEALED = _NONCE + 2 * SECRET + _TAG  # bytes of two sealed shares


def new_secret() -> bytes:
    """A private key or a seed."""
    return os.urandom(SECRET)


def public_key(private: bytes) -> bytes:
    """The public key of a private one."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, public: bytes, purpose: bytes) -> bytes:
    """The key that the owners of ``private`` and ``public`` have in common, another one for each ``purpose``.

    Raises:
        ValueError: ``public`` is no key.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    secret = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    return HKDF(SHA256(), SECRET, salt=None, info=purpose).derive(secret)


def is_key(public: bytes) -> bool:
    """Whether a public key can be used to agree on a key; a few values cannot."""
    try:
        agree(new_secret(), public, b"")
    except ValueError:
        return False
    return True


def seal(key: bytes, text: bytes) -> bytes:
    """Encrypt ``text``: only a holder of the key can read it, or change it unnoticed."""
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    nonce = os.urandom(_NONCE)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, text, None)


def unseal(key: bytes, sealed: bytes) -> bytes:
    """The text that was sealed.

    Raises:
        cryptography.exceptions.InvalidTag: it was sealed with another key, or changed.
    """
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return ChaCha20Poly1305(key).decrypt(sealed[:_NONCE], sealed[_NONCE:], None)


def split(secret: bytes, threshold: int, number: int) -> list[bytes]:
    """Shares of a secret for places 0 to ``number`` - 1; ``threshold`` of them give it, fewer say nothing of it."""
    from Crypto.Protocol.SecretSharing import Shamir

    halves = [Shamir.split(threshold, number, secret[i : i + _HALF], ssss=False) for i in (0, _HALF)]
    return [first + second for (_, first), (_, second) in zip(*halves, strict=True)]


def combine(shares: Mapping[int, bytes]) -> bytes:
    """The secret from its shares by place, of which there must be exactly as many as the threshold."""
    from Crypto.Protocol.SecretSharing import Shamir

    halves = [[(place + 1, share[i : i + _HALF]) for place, share in shares.items()] for i in (0, _HALF)]
    return b"".join(Shamir.combine(half, ssss=False) for half in halves)


def mask(seed: bytes, length: int) -> np.ndarray:
    """``length`` numbers, uint64, each as likely as any other to whoever does not know the seed.

    A seed is for one mask only.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    stream = Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor().update(bytes(8 * length))
    return np.frombuffer(stream, "<u8").astype(np.uint64, copy=False)


def pair_mask(private: bytes, public: bytes, place: int, other: int, length: int) -> np.ndarray:
    """The mask of the client at ``place`` for its pair with the one at ``other``, which has the negative mask.

    ``private`` is the private mask key of the first, ``public`` the public mask key of the second.
    """
    shared = mask(agree(private, public, b"mask"), length)
    return shared if place < other else -shared
