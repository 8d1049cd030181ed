"""Packets as Flower's records, on the wire and back; the same in process."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from client_app.flower_records import from_records, to_records
from task.message import Packet, copy_packet
from tests.helpers.flower import LoopbackGrid, echo, through_wire


def same_array(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


ARRAYS = [
    *(np.arange(12).reshape(3, 4).astype(kind) for kind in "?bBhHiIlLefdFD"),
    np.array(1.5, np.float32),
    np.zeros((0, 768), np.float32),
    np.zeros((0,), np.int64),
    np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1)[::2],
    np.arange(4, dtype=">i4"),
    np.array([np.nan, np.inf, -0.0]),
    np.array(["a", "straße"]),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype}{list(a.shape)}")
def test_arrays_arrive_alike_by_wire_and_in_process(array):
    LoopbackGrid(echo)
    sent = Packet(arrays={"a.b": array}, statistics={"π": array})
    arrived = from_records(through_wire(Message(to_records(sent), 1, "train")).content)
    for one in (arrived, copy_packet(sent)):
        assert list(one.arrays) == ["a.b"]
        assert list(one.statistics) == ["π"]
        assert same_array(one.arrays["a.b"], np.ascontiguousarray(array).reshape(array.shape))
        assert one.arrays["a.b"].flags.c_contiguous
        assert one.arrays["a.b"].flags.writeable
        assert not np.shares_memory(one.arrays["a.b"], array)


whole = st.integers(-(2**63), 2**64 - 1)


scalars = st.one_of(st.booleans(), whole, st.floats(), st.text())


lists = st.one_of(*(st.lists(kind, max_size=4) for kind in (st.booleans(), whole, st.floats(), st.text())))


small = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4)


@given(
    st.dictionaries(st.text(max_size=5), scalars | lists.filter(lambda v: not mixed_signs(v))),
    st.dictionaries(st.text(max_size=5), whole | st.floats()),
)
def test_scalars_arrive_alike_by_wire_and_in_process(config, metrics):
    LoopbackGrid(echo)
    sent = Packet(config=config, metrics=metrics)
    arrived = from_records(through_wire(Message(to_records(sent), 1, "train")).content)
    for one in (arrived, copy_packet(sent)):
        assert repr(one.config) == repr(config)  # tells True from 1, and NaN is like NaN
        assert repr(one.metrics) == repr(metrics)


def mixed_signs(values: list) -> bool:
    """Flower has no list for both negative numbers and numbers above 2**63."""
    numbers = [v for v in values if type(v) is int]
    return bool(numbers) and min(numbers) < 0 and max(numbers) >= 2**63


def test_numpy_scalars_become_pythons():
    sent = Packet(metrics={"a": np.float32(0.5), "b": np.int64(3), "c": np.True_}, config={"d": np.bool_(False)})
    for one in (from_records(to_records(sent)), copy_packet(sent)):
        assert repr(one) == "Packet(arrays={}, statistics={}, metrics={'a': 0.5, 'b': 3, 'c': 1}, config={'d': False})"


@pytest.mark.parametrize(
    "bad",
    [
        Packet(arrays={"bad": np.array([{}])}),
        Packet(arrays={"bad": [1.0]}),
        Packet(metrics={"bad": "text"}),
        Packet(metrics={"bad": 2**64}),
        Packet(config={"bad": None}),
        Packet(config={"bad": {}}),
        Packet(config={"bad": [1, 2.0]}),
        Packet(config={"bad": [[1]]}),
        Packet(config={"bad": np.zeros(2)}),
    ],
    ids=repr,
)
@pytest.mark.parametrize("convert", [to_records, copy_packet])
def test_what_cannot_travel_is_refused_by_name(convert, bad):
    with pytest.raises((TypeError, ValueError), match="'bad'"):
        convert(bad)


def test_text_that_is_no_unicode_travels():
    arrived = from_records(to_records(Packet(config={"error": "no file /data/\udcff"}))).config
    assert arrived == {"error": r"no file /data/\udcff"}


def test_records_have_fixed_names_and_empty_ones_stay_at_home():
    full = Packet(arrays={"a": np.zeros(1)}, statistics={"p": np.zeros(1)}, metrics={"m": 1}, config={"c": 1})
    assert list(to_records(full)) == ["arrays", "prototypes", "metrics", "config"]
    assert list(to_records(Packet())) == []
    assert from_records(RecordDict({"other": MetricRecord({"m": 1})})) == Packet()


def test_a_zip_file_is_no_array():
    """numpy.load makes something of it that is none."""
    record = ArrayRecord({"w": Array("float32", (2,), "numpy.ndarray", b"PK\x05\x06" + bytes(18))})
    with pytest.raises(ValueError, match="the bytes of 'w' are no array but a NpzFile"):
        from_records(RecordDict({"arrays": record}))
