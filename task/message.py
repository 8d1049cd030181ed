"""Messages between server and clients, the same for every transport."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Kind = Literal["hello", "train", "evaluate", "keys", "shares", "unmask"]
SECURE_SUM: tuple[Kind, ...] = ("keys", "shares", "unmask")  # messages of task/secure_aggregation beside train
Scalar = bool | int | float | str
Arrays = dict[str, np.ndarray]
NPY_HEADER = 128  # bytes of a .npy file before its values


@dataclass
class Packet:
    """One message. Arrays have stable names; ``config`` holds scalars, or lists of scalars of one type."""

    arrays: Arrays = field(default_factory=dict)
    statistics: Arrays = field(default_factory=dict)
    metrics: dict[str, int | float] = field(default_factory=dict)
    config: dict[str, Scalar | list[int] | list[str]] = field(default_factory=dict)


def payload_bytes(packet: Packet) -> int:
    """Size of a message in bytes, the same through every transport: a function of what the packet holds alone.

    An array counts as the .npy file in which it travels, a name and a text as UTF-8, a number or bool as 8 bytes, so
    that the size does not depend on how long a round took. The framing of the transport is not counted.
    """
    arrays = [*packet.arrays.items(), *packet.statistics.items()]
    scalars = [*packet.metrics.items(), *packet.config.items()]
    names = sum(_scalar_bytes(name) for name, _ in (*arrays, *scalars))
    files = sum(NPY_HEADER + array.nbytes for _, array in arrays)
    return names + files + sum(_scalar_bytes(value) for _, value in scalars)


def _scalar_bytes(value: Scalar | list[int] | list[str]) -> int:
    if isinstance(value, list):
        return sum(map(_scalar_bytes, value))
    return len(value.encode("utf-8", "backslashreplace")) if isinstance(value, str) else 8


_INTEGERS = range(-(2**63), 2**64)  # integers that Flower's records can hold


def copy_packet(packet: Packet) -> Packet:
    """A deep copy of ``packet``, equal to what the receiver of the message gets.

    Raises:
        TypeError, ValueError: an entry cannot be sent; the message names it.
    """
    return Packet(
        arrays={name: np.array(to_wire_array(name, a), copy=True) for name, a in packet.arrays.items()},
        statistics={name: np.array(to_wire_array(name, a), copy=True) for name, a in packet.statistics.items()},
        metrics=to_plain_metrics(packet.metrics),
        config=to_plain_config(packet.config),
    )


def to_wire_array(name: str, array: np.ndarray) -> np.ndarray:
    """``array`` in C order, with the same dtype and shape; not copied if it is in C order already.

    The order matters: sums over another memory layout round differently, and both transports must give equal bits.

    Raises:
        TypeError: not an array, or an array of Python objects.
    """
    if not isinstance(array, np.ndarray) or array.dtype.hasobject:
        kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise TypeError(f"array {name!r} is of type {kind}; only NumPy arrays of numbers or text travel")
    return np.asarray(array, order="C")


def to_plain_metrics(metrics: Mapping[str, Any]) -> dict[str, int | float]:
    """Convert metrics to Python's int and float, also from NumPy scalars and bool.

    Raises:
        TypeError, ValueError: a value is no number, or too large an integer; the message names it.
    """
    plain: dict[str, int | float] = {}
    for name, value in metrics.items():
        number = _scalar(name, value)
        if isinstance(number, str):
            raise TypeError(f"metric {name!r} is of type str; only numbers travel")
        plain[name] = int(number) if isinstance(number, bool) else number
    return plain


def to_plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert settings to Python's bool, int, float, str, or lists of one of these, also from NumPy scalars.

    Raises:
        TypeError, ValueError: a value of another type, a mixed list, too large an integer; the message names it.
    """
    return {name: _list(name, v) if isinstance(v, list) else _scalar(name, v) for name, v in config.items()}


def _list(name: str, values: list[Any]) -> list[Scalar]:
    plain = [_scalar(name, value) for value in values]
    if len({type(value) for value in plain}) > 1:
        raise TypeError(f"{name!r} is a list of mixed types")
    return plain


def _scalar(name: str, value: Any) -> Scalar:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        # a path in an error message may hold bytes that are no text, which cannot be encoded
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if not isinstance(value, (int, float)):  # bool is an int
        raise TypeError(f"{name!r} is of type {type(value).__name__}; only bool, int, float and str travel")
    if isinstance(value, int) and value not in _INTEGERS:
        raise ValueError(f"{name!r} = {value} does not fit into 64 bits")
    return value
