"""Tables in columns, and plain values, as msgpack: the smallest pieces of an index frame.

A column is a msgpack array, one of

* `["const", value]`: every row holds this value;
* `["range", first]`: first, first + 1, first + 2, ...;
* `["<i4", bin]` (or another NumPy name): packed little-endian numbers;
* `["values", bin]`: a msgpack array with one plain value a row.

Nothing is decoded before it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from dispatch_trace.errors import TraceFormatError

Column = list[Any]

_PACKED = frozenset(("i1", "<i2", "<i4", "<i8"))


def _default(value: Any) -> Any:
    """What msgpack has no type for: wide integers keep their value, anything else its type's name."""
    if isinstance(value, int):
        return {"int": str(int(value))}
    if isinstance(value, (set, frozenset, range)):
        return list(value)
    tolist = getattr(value, "tolist", None)  # NumPy scalars and small arrays
    if callable(tolist):
        return tolist()
    return {"opaque": type(value).__qualname__}


def _restore(value: dict[Any, Any]) -> Any:
    if len(value) == 1 and "int" in value:
        return int(value["int"])
    return value


def plain_packer() -> Callable[[Any], bytes]:
    """A `pack_plain` that is quicker when called often; for one thread only."""
    pack: Callable[[Any], bytes] = msgpack.Packer(default=_default, unicode_errors="backslashreplace").pack
    return pack


def pack_plain(value: Any) -> bytes:
    """A plain value as msgpack; tuples become arrays, integers beyond 64 bits `{"int": "<decimal>"}`."""
    return plain_packer()(value)


def unpack_plain(data: bytes | memoryview) -> Any:
    """The inverse of `pack_plain`, but that tuples come back as lists."""
    return msgpack.unpackb(data, object_hook=_restore, strict_map_key=False)


def int_column(values: Sequence[int] | npt.NDArray[np.int64]) -> Column:
    """Integers of at most 64 bits, in the smallest form that holds them."""
    if not len(values):
        return ["const", 0]
    if not isinstance(values, np.ndarray) and values.count(values[0]) == len(values):
        return ["const", values[0]]  # the usual case, without an array
    array = np.asarray(values, dtype=np.int64)
    first, last = int(array[0]), int(array[-1])
    if bool((array == first).all()):
        return ["const", first]
    if last - first == len(array) - 1 and bool((np.diff(array) == 1).all()):
        return ["range", first]
    low, high = int(array.min()), int(array.max())
    for name in ("i1", "<i2", "<i4"):
        bound = np.iinfo(name)
        if bound.min <= low and high <= bound.max:
            return [name, array.astype(name).tobytes()]
    return ["<i8", array.astype("<i8").tobytes()]


def value_column(values: Sequence[Any]) -> Column:
    """Any plain values."""
    if all(value is None for value in values):
        return ["const", None]
    return ["values", pack_plain(list(values))]


def decode_column(column: Column, num_rows: int) -> list[Any]:
    """The values of a column, one a row.

    Raises:
      TraceFormatError: the encoding is unknown or does not have `num_rows` rows.
    """
    try:
        encoding, data = column
        if encoding == "const":
            return [data] * num_rows
        if encoding == "range":
            return list(range(data, data + num_rows))
        if encoding == "values":
            values: list[Any] = unpack_plain(data)
        elif encoding in _PACKED:
            values = np.frombuffer(data, dtype=encoding).tolist()
        else:
            raise TraceFormatError(f"unknown column encoding {encoding!r}")
    except (TypeError, ValueError) as error:
        raise TraceFormatError(f"a column cannot be decoded: {error}") from error
    if len(values) != num_rows:
        raise TraceFormatError(f"a column holds {len(values)} rows instead of {num_rows}")
    return values


def column_array(column: Column, num_rows: int) -> npt.NDArray[np.int64]:
    """A column of integers, as an array.

    Raises:
      TraceFormatError: as `decode_column`, and for what is no integer of 64 bits.
    """
    try:
        encoding, data = column
        if encoding == "const":
            return np.full(num_rows, data, dtype=np.int64)
        if encoding == "range":
            return np.arange(data, data + num_rows, dtype=np.int64)
        if encoding in _PACKED:
            found = np.frombuffer(data, dtype=encoding).astype(np.int64)
        else:
            found = np.array(decode_column(column, num_rows), dtype=np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise TraceFormatError(f"a column cannot be decoded: {error}") from error
    if len(found) != num_rows:
        raise TraceFormatError(f"a column holds {len(found)} rows instead of {num_rows}")
    return found


class Interner:
    """Numbers equal keys alike, in order of first appearance."""

    __slots__ = ("entries", "numbers")

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}
        self.entries: list[Any] = []

    def number(self, key: Any, entry: Callable[[Any], Any] | None = None) -> int:
        """The number of `key`; the entry kept for a new one is `entry(key)`, or the key itself."""
        number = self.numbers.get(key)
        if number is None:
            number = self.numbers[key] = len(self.entries)
            self.entries.append(key if entry is None else entry(key))
        return number
