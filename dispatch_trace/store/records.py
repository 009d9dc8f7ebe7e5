"""Batches of records to columns of one frame, and back.

Every frame stands alone: strings and plain values are interned per frame, so that a lost frame loses
only its own records, and so that a filter costs one look into a short table. Nothing here needs torch.

The hot half is `encode_records`: it runs on the writer's thread and holds the interpreter lock, so it
works column by column, with C-level calls (`attrgetter`, `zip`) wherever there is a choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from dispatch_trace.errors import TraceFormatError
from dispatch_trace.schema import STATISTICS, RawRecord, StoredContent, StoredRecord, StoredSlot
from dispatch_trace.store.columns import (
    Column,
    Interner,
    column_array,
    decode_column,
    int_column,
    pack_plain,
    plain_packer,
    unpack_plain,
    value_column,
)
from dispatch_trace.store.quick import quick_maker

_make_record = quick_maker(StoredRecord)
_make_slot = quick_maker(StoredSlot)
_make_content = quick_maker(StoredContent)

LIGHT, RANDOM = 1, 2
IS_TENSOR, LEAF, UNINITIALISED = 1, 2, 4

_RECORD_STRINGS = ("kind", "model", "grad_phase", "module", "op", "overload", "name", "note")
_RECORD_NUMBERS = ("seq", "step", "call", "n", "producer", "opened", "thread")
_SLOT_STRINGS = ("name", "role", "note")
_SLOT_NUMBERS = ("storage", "storage_bytes", "alignment")
_geometry = attrgetter("dtype", "shape", "strides", "offset", "device", "layout")


# What decoding raises on columns that are whole but do not fit together.
_CONTRADICTIONS = (AttributeError, IndexError, KeyError, TypeError, UnicodeError)


@dataclass(slots=True)
class ContentRow:
    """What the writer learnt of one content; `tensor` is the number of its first part, -1 without data."""

    id: int
    dtype: str
    shape: tuple[int, ...]
    hash: bytes = b""
    stats: dict[str, int | float | None] = field(default_factory=dict)
    sketch_row: int = -1
    shard: int = -1
    tensor: int = -1
    encoding: dict[str, Any] = field(default_factory=dict)


def encode_records(
    records: Sequence[RawRecord], contents: Sequence[ContentRow], sketch: tuple[int, int, int] | None
) -> bytes:
    """One `records` frame.

    Args:
      records: in the order in which they shall be read.
      contents: those processed with these records, ids ascending without gaps.
      sketch: (shard, tensor number, crc32) of the batch's sketches.
    """
    strings, values = Interner(), Interner()
    slots = [slot for record in records for slot in record.slots]
    producers = [producer for slot in slots for producer in slot.producers]
    return frame_of(
        [record.seq for record in records],
        len(slots),
        strings=strings,
        values=values,
        record=record_table(records, strings, values),
        slot=slot_table(slots, strings, values),
        producers=producers,
        contents=contents,
        sketch=sketch,
    )


def frame_of(
    seqs: Sequence[int],
    num_slots: int,
    *,
    strings: Interner,
    values: Interner,
    record: dict[str, Column],
    slot: dict[str, Column],
    producers: Sequence[tuple[int, int]] = (),
    contents: Sequence[ContentRow] = (),
    sketch: tuple[int, int, int] | None = None,
) -> bytes:
    """A `records` frame from its tables.

    Args:
      seqs: of the records.
      record, slot: columns; their strings and values are numbered in `strings` and `values`.
      producers: (seq, slot) of all slots, one slot after the other.
    """
    frame = {
        "type": "records",
        "num_records": len(seqs),
        "num_contents": len(contents),
        "first_content": contents[0].id if contents else -1,
        "first_seq": min(seqs, default=-1),
        "last_seq": max(seqs, default=-1),
        "sketch": list(sketch) if sketch is not None else None,
        "num_slots": num_slots,
        "num_producers": len(producers),
        "record": pack_plain(record),
        "slot": pack_plain(slot),
        "producer": pack_plain(
            {
                "seq": int_column([seq for seq, _ in producers]),
                "slot": int_column([slot for _, slot in producers]),
            }
        ),
        "content": pack_plain(_content_table(contents, values)),
        "strings": pack_plain(strings.entries),
        # Entries are packed already; a msgpack array is its header followed by them.
        "values": _array_header(len(values.entries)) + b"".join(values.entries),
    }
    return pack_plain(frame)


def _array_header(length: int) -> bytes:
    return b"\xdd" + length.to_bytes(4, "big")


def _string_columns(rows: Sequence[Any], names: Sequence[str], strings: Interner) -> dict[str, Column]:
    table: dict[str, Column] = {}
    for name in names:
        column = list(map(attrgetter(name), rows))
        local = {text: strings.number(text) for text in dict.fromkeys(column)}
        table[name] = int_column(list(map(local.__getitem__, column)))
    return table


def _number_columns(rows: Sequence[Any], names: Sequence[str]) -> dict[str, Column]:
    return {name: int_column(list(map(attrgetter(name), rows))) for name in names}


def record_table(records: Sequence[RawRecord], strings: Interner, values: Interner) -> dict[str, Column]:
    table = _string_columns(records, _RECORD_STRINGS, strings)
    table.update(_number_columns(records, _RECORD_NUMBERS))
    sources = [record.source or ("", -1) for record in records]
    table["source_file"] = int_column([strings.number(file) for file, _ in sources])
    table["source_line"] = int_column([line for _, line in sources])
    table["flags"] = int_column([record.light * LIGHT | record.random * RANDOM for record in records])
    pack = plain_packer()
    table["args"] = int_column([values.number(pack(record.args)) for record in records])
    table["num_slots"] = int_column([len(record.slots) for record in records])
    return table


def slot_table(slots: Sequence[Any], strings: Interner, values: Interner) -> dict[str, Column]:
    table = _string_columns(slots, _SLOT_STRINGS, strings)
    table.update(_number_columns(slots, _SLOT_NUMBERS))
    table["flags"] = int_column(
        [slot.is_tensor * IS_TENSOR | slot.leaf * LEAF | slot.uninitialised * UNINITIALISED for slot in slots]
    )
    pack = plain_packer()
    # Packed once per distinct geometry, found again by the tuple itself.
    geometries: dict[tuple[Any, ...], int] = {}
    numbers = []
    for geometry in map(_geometry, slots):
        number = geometries.get(geometry)
        if number is None:
            number = geometries[geometry] = values.number(pack(geometry))
        numbers.append(number)
    table["geometry"] = int_column(numbers)
    table["value"] = int_column(
        [-1 if slot.value is None else values.number(pack(slot.value)) for slot in slots]
    )
    table["content"] = int_column([-1 if slot.content is None else slot.content.id for slot in slots])
    table["num_producers"] = int_column([len(slot.producers) for slot in slots])
    return table


def _content_table(contents: Sequence[ContentRow], values: Interner) -> dict[str, Column]:
    table = {
        "type": int_column([values.number(pack_plain((row.dtype, row.shape))) for row in contents]),
        "hash": value_column([row.hash for row in contents]),
        "sketch_row": int_column([row.sketch_row for row in contents]),
        "shard": int_column([row.shard for row in contents]),
        "tensor": int_column([row.tensor for row in contents]),
        "encoding": int_column(
            [values.number(pack_plain(row.encoding)) if row.encoding else -1 for row in contents]
        ),
        "summarised": int_column([int(bool(row.stats)) for row in contents]),
    }
    for name in STATISTICS:
        table[f"stat.{name}"] = value_column([row.stats.get(name) for row in contents])
    return table


# Decoding -----------------------------------------------------------------------------------------


class _Table:
    """A table of a frame; each column is decoded when first asked for."""

    def __init__(self, packed: bytes, num_rows: int) -> None:
        self._columns: dict[str, Column] = unpack_plain(packed)
        self._decoded: dict[str, list[Any]] = {}
        self.num_rows = num_rows

    def __getitem__(self, name: str) -> list[Any]:
        decoded = self._decoded.get(name)
        if decoded is None:
            column = self._columns.get(name)
            if column is None:
                raise TraceFormatError(f"a records frame lacks the column {name!r}")
            decoded = self._decoded[name] = decode_column(column, self.num_rows)
        return decoded

    def array(self, name: str) -> npt.NDArray[np.int64]:
        """A column of integers."""
        column = self._columns.get(name)
        if column is None:
            raise TraceFormatError(f"a records frame lacks the column {name!r}")
        return column_array(column, self.num_rows)


class RecordsFrame:
    """One `records` frame, decoded as far as it was asked.

    Args:
      model_names: models by the names they got later.
    """

    def __init__(
        self, frame: dict[str, Any], rank: int, model_names: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._rank = rank
        self._model_names = model_names
        self.num_records: int = frame["num_records"]
        self.num_contents: int = frame["num_contents"]
        self.first_content: int = frame["first_content"]
        self.sketch: tuple[int, int, int] | None = (
            tuple(frame["sketch"]) if frame["sketch"] is not None else None
        )
        self._record = _Table(frame["record"], self.num_records)
        self._slot = _Table(frame["slot"], frame["num_slots"])
        self._producer = _Table(frame["producer"], frame["num_producers"])
        self._content = _Table(frame["content"], self.num_contents)
        self._packed_strings: bytes = frame["strings"]
        self._packed_values: bytes = frame["values"]
        self._converted_args: dict[int, tuple[tuple[str, Any], ...]] = {}
        self._converted_geometries: dict[int, tuple[Any, ...]] = {}
        self._contents: dict[int, StoredContent] = {}
        self._records: dict[int, StoredRecord] = {}

    @cached_property
    def strings(self) -> list[str]:
        strings: list[str] = unpack_plain(self._packed_strings)
        return strings

    @cached_property
    def values(self) -> list[Any]:
        values: list[Any] = unpack_plain(self._packed_values)
        return values

    def rows(self, where: dict[str, Any]) -> Sequence[int]:
        """The rows whose columns equal the given values, found without building records.

        Raises:
          KeyError: no such column.
        """
        rows: Sequence[int] = range(self.num_records)
        for name, wanted in where.items():
            if name in _RECORD_STRINGS:
                if name == "model" and self._model_names:
                    written = [old for old, new in self._model_names.items() if new == wanted]
                    wanted = None if wanted in self._model_names else next(iter(written), wanted)
                if wanted not in self.strings:
                    return ()
                wanted = self.strings.index(wanted)
            elif name not in _RECORD_NUMBERS:
                raise KeyError(name)
            column = self._record[name]
            rows = [row for row in rows if column[row] == wanted]
        return rows

    def row_of(self, seq: int) -> int | None:
        """The row of the record with this sequence number."""
        column = self._record["seq"]
        row = seq - column[0] if column else 0
        if 0 <= row < len(column) and column[row] == seq:  # nearly always: no gaps
            return row
        return column.index(seq) if seq in column else None

    def record(self, row: int) -> StoredRecord:
        """Raises TraceFormatError where the columns contradict each other."""
        known = self._records.get(row)
        if known is not None:
            return known
        try:
            known = self._records[row] = self._build_record(row)
            return known
        except _CONTRADICTIONS as error:
            raise TraceFormatError(f"record in row {row} cannot be decoded: {error!r}") from error

    def _build_record(self, row: int) -> StoredRecord:
        flags, line, file, args, num_slots, *others = self._record_rows[row]
        kind, model, grad_phase, module, op, overload, name, note = others[:8]
        seq, step, call, n, producer, opened, thread = others[8:]
        first = self._slot_starts[row]
        return _make_record(
            seq,
            kind,
            self._rank,
            step,
            model,
            grad_phase,
            module,
            call,
            op,
            n,
            overload,
            name,
            self._args(args),
            self._slots(first, first + num_slots),
            (self.strings[file], line) if line >= 0 else None,
            bool(flags & LIGHT),
            bool(flags & RANDOM),
            producer,
            opened,
            thread,
            note,
        )

    def records(self, rows: Sequence[int]) -> Iterator[StoredRecord]:
        return map(self.record, rows)

    @cached_property
    def _slot_starts(self) -> list[int]:
        return _running_sum(self._record["num_slots"])

    @cached_property
    def _record_rows(self) -> list[tuple[Any, ...]]:
        record = self._record
        columns: list[list[Any]] = [
            record[name] for name in ("flags", "source_line", "source_file", "args", "num_slots")
        ]
        columns += [self._texts(record[name]) for name in _RECORD_STRINGS]
        if self._model_names:
            at = 5 + _RECORD_STRINGS.index("model")
            columns[at] = [self._model_names.get(name, name) for name in columns[at]]
        columns += [record[name] for name in _RECORD_NUMBERS]
        return list(zip(*columns, strict=True))

    @cached_property
    def _slot_rows(self) -> list[tuple[Any, ...]]:
        slot = self._slot
        columns: list[list[Any]] = [self._texts(slot[name]) for name in _SLOT_STRINGS]
        columns += [slot[name] for name in _SLOT_NUMBERS]
        columns += [slot[name] for name in ("flags", "geometry", "value", "content", "num_producers")]
        return list(zip(*columns, _running_sum(columns[-1])[:-1], strict=True))

    def _texts(self, column: list[int]) -> list[str]:
        return list(map(self.strings.__getitem__, column))

    def _args(self, number: int) -> tuple[tuple[str, Any], ...]:
        args = self._converted_args.get(number)
        if args is None:
            args = tuple((name, value) for name, value in self.values[number])
            self._converted_args[number] = args
        return args

    def _geometry(self, number: int) -> tuple[Any, ...]:
        geometry = self._converted_geometries.get(number)
        if geometry is None:
            dtype, shape, strides, *others = self.values[number]
            geometry = (dtype, tuple(shape), tuple(strides) if strides is not None else None, *others)
            self._converted_geometries[number] = geometry
        return geometry

    @cached_property
    def _producers(self) -> list[tuple[int, int]]:
        return list(zip(self._producer["seq"], self._producer["slot"], strict=True))

    def _slots(self, start: int, stop: int) -> tuple[StoredSlot, ...]:
        values, found = self.values, []
        for index, row in enumerate(self._slot_rows[start:stop]):
            name, role, note, storage, num_bytes, alignment, flags, geometry, value, content, count, first = (
                row
            )
            dtype, shape, strides, offset, device, layout = self._geometry(geometry)
            found.append(
                _make_slot(
                    name,
                    role,
                    index,
                    values[value] if value >= 0 else None,
                    bool(flags & IS_TENSOR),
                    dtype,
                    shape,
                    strides,
                    offset,
                    device,
                    layout,
                    storage,
                    num_bytes,
                    alignment,
                    content,
                    tuple(self._producers[first : first + count]) if count else (),
                    bool(flags & LEAF),
                    bool(flags & UNINITIALISED),
                    note,
                )
            )
        return tuple(found)

    def content(self, content_id: int) -> StoredContent:
        """Raises TraceFormatError where the columns contradict each other."""
        content = self._contents.get(content_id)
        if content is not None:
            return content
        try:
            content = self._contents[content_id] = self._build_content(content_id)
            return content
        except _CONTRADICTIONS as error:
            raise TraceFormatError(f"content {content_id} cannot be decoded: {error!r}") from error

    def _build_content(self, content_id: int) -> StoredContent:
        content, row = self._content, content_id - self.first_content
        dtype, shape = self.values[content["type"][row]]
        number = content["encoding"][row]
        encoding = self.values[number] if number >= 0 else {}
        if not isinstance(encoding, dict):
            raise TypeError(f"encoding {encoding!r}")
        stats = dict(zip(STATISTICS, self._stat_rows[row], strict=True)) if content["summarised"][row] else {}
        return _make_content(
            content_id,
            dtype,
            tuple(shape),
            bytes(content["hash"][row] or b"").hex(),
            stats,
            content["sketch_row"][row] >= 0,
            content["shard"][row] >= 0,
            encoding,
        )

    @cached_property
    def _stat_rows(self) -> list[tuple[Any, ...]]:
        return list(zip(*(self._content[f"stat.{name}"] for name in STATISTICS), strict=True))

    # Whole columns, as arrays ---------------------------------------------------------------------

    def record_arrays(self, names: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """Columns of the records, [num_records] each; texts and arguments by their numbers in this frame."""
        return [self._record.array(name) for name in names]

    def slot_arrays(self, names: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """The same of the slots, those of one record after the other."""
        return [self._slot.array(name) for name in names]

    def producer_arrays(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Numbers of the records, and of their slots, that wrote what slots hold: of all slots in order."""
        return self._producer.array("seq"), self._producer.array("slot")

    def content_arrays(self, names: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """The same of the contents, [num_contents] each."""
        return [self._content.array(name) for name in names]

    def hashes(self) -> list[bytes]:
        """The digests of the contents, b"" where none was taken."""
        return [bytes(value or b"") for value in self._content["hash"]]

    def statistics(self) -> npt.NDArray[np.float64]:
        """[num_contents, len(STATISTICS)]; NaN for what is undefined or was not wanted."""
        table = np.empty((self.num_contents, len(STATISTICS)))
        for at, name in enumerate(STATISTICS):
            table[:, at] = np.array(self._content[f"stat.{name}"], dtype=np.float64)
        return table

    def packed_values(self) -> list[bytes]:
        """The plain values of this frame as they are packed: equal bytes are equal values."""
        unpacker = msgpack.Unpacker(max_buffer_size=0)
        unpacker.feed(self._packed_values)
        found, begin = [], 0
        for _ in range(unpacker.read_array_header()):
            begin = unpacker.tell()
            unpacker.skip()
            found.append(self._packed_values[begin : unpacker.tell()])
        return found

    def place(self, content_id: int) -> tuple[int, int]:
        """(shard, number of the first part) of a content; (-1, -1) without data."""
        row = content_id - self.first_content
        return self._content["shard"][row], self._content["tensor"][row]

    def sketch_row(self, content_id: int) -> int:
        row: int = self._content["sketch_row"][content_id - self.first_content]
        return row


def _running_sum(counts: list[int]) -> list[int]:
    sums: list[int] = np.concatenate(([0], np.cumsum(counts, dtype=np.int64))).tolist()
    return sums
