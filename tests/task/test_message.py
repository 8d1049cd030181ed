"""What a message counts."""

import io

import numpy as np
import pytest

from task.message import Packet, payload_bytes


@pytest.mark.parametrize(
    "array",
    [
        np.ones((3, 4), np.float32),
        np.array(1.5),
        np.zeros((0, 768)),
        np.asfortranarray(np.ones((5, 2))),
        np.array(["ß"]),
    ],
    ids=lambda a: f"{a.dtype}{list(a.shape)}",
)
def test_an_array_counts_as_its_file(array: np.ndarray) -> None:
    file = io.BytesIO()
    np.save(file, array)
    assert payload_bytes(Packet({"a": array})) == payload_bytes(Packet(statistics={"a": array})) == 1 + file.tell()


def test_names_texts_and_numbers_by_hand() -> None:
    """Names 1 + 2 ("ß") + 3 + 2 = 8; numbers 2 x 8, two in a list 16; the text 6 bytes in UTF-8."""
    packet = Packet(metrics={"a": 0.1, "ß": 10**18}, config={"ids": [1, 2], "no": "straßen"[:5] + "!"})
    assert payload_bytes(packet) == 8 + 16 + 16 + len("straß!".encode())
    assert payload_bytes(Packet()) == 0
    assert payload_bytes(Packet(config={"a": True})) == payload_bytes(Packet(config={"a": False})) == 9
    assert payload_bytes(Packet(config={"a": "\udcff"})) == 1 + len(r"\udcff")
