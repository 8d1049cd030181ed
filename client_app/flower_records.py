"""Packets as Flower's records and back, used at both ends of the wire.

The records are named arrays, prototypes, metrics and config; an empty one does not travel.
"""

from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from task.message import SECURE_SUM, Arrays, Kind, Packet, to_plain_config, to_plain_metrics, to_wire_array

QUERIES: tuple[Kind, ...] = ("hello", *SECURE_SUM)


def message_type(kind: Kind) -> str:
    """Flower's message type for a message of this kind."""
    return f"query.{kind}" if kind in QUERIES else kind


def to_records(packet: Packet) -> RecordDict:
    """New records with the contents of ``packet``.

    Raises:
        TypeError, ValueError: something in the packet cannot travel; the message names it.
    """
    records = RecordDict()
    if packet.arrays:
        records["arrays"] = record_of(packet.arrays)
    if packet.statistics:
        records["prototypes"] = record_of(packet.statistics)
    if packet.metrics:
        records["metrics"] = MetricRecord(dict(to_plain_metrics(packet.metrics)))
    if packet.config:
        records["config"] = ConfigRecord(to_plain_config(packet.config))
    return records


def from_records(records: RecordDict) -> Packet:
    """The packet in ``records``; missing records are empty, records of other names are ignored.

    Raises:
        TypeError, ValueError: a record is of the wrong kind, or its bytes are no arrays.
    """
    return Packet(
        arrays=arrays_of(_record(records, "arrays", ArrayRecord)),
        statistics=arrays_of(_record(records, "prototypes", ArrayRecord)),
        metrics=dict(_record(records, "metrics", MetricRecord)),
        config=dict(_record(records, "config", ConfigRecord)),
    )


def record_of(arrays: Arrays) -> ArrayRecord:
    """Named arrays of any shape as one of Flower's records; errors as of :func:`to_records`."""
    return ArrayRecord({name: Array.from_numpy_ndarray(to_wire_array(name, array)) for name, array in arrays.items()})


def arrays_of(record: ArrayRecord) -> Arrays:
    """The arrays in a record, as copies that may be written to.

    Raises:
        ValueError: the bytes are no arrays.
    """
    arrays = {name: array.numpy() for name, array in record.items()}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):  # numpy.load makes something else of a zip file
            raise ValueError(f"the bytes of {name!r} are no array but a {type(array).__name__}")
    return arrays


def _record(records: RecordDict, name: str, kind: type) -> Any:
    record = records.get(name, kind())
    if not isinstance(record, kind):
        raise TypeError(f"record {name!r} is a {type(record).__name__}, not a {kind.__name__}")
    return record
