"""All records and contents of a rank as arrays: for questions about all of them at once.

What a frame numbers for itself (texts, arguments, geometries) has one number in the whole table, and in all
tables that share its `Names`. Nothing is decoded to objects. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from dispatch_trace.per_step import Together, each
from dispatch_trace.schema import STATISTICS, StoredContent
from dispatch_trace.sketch import K
from dispatch_trace.store.reader import RankReader

Numbers: TypeAlias = npt.NDArray[np.int64]
T = TypeVar("T")

_TEXTS = ("kind", "model", "grad_phase", "module", "op", "overload", "name", "note")
_PLAIN = ("seq", "step", "call", "n", "producer", "opened", "thread", "flags", "num_slots")
_SLOT_TEXTS = ("name", "role", "note")
_SLOT_PLAIN = ("storage", "flags", "content", "num_producers")
_AT = {name: at for at, name in enumerate(STATISTICS)}


class Names:
    """Numbers for texts and packed values, the same in every table that shares them."""

    def __init__(self) -> None:
        self._numbers: dict[str | bytes, int] = {}
        self._keys: list[str | bytes] = []

    def number(self, key: str | bytes) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def key(self, number: int) -> str | bytes:
        """The text or packed value that has a number."""
        if len(self._keys) < len(self._numbers):
            self._keys = list(self._numbers)
        return self._keys[number]

    def numbers(self, keys: Sequence[str] | Sequence[bytes]) -> Numbers:
        """[len(keys) + 1], with -1 at the end: what has number -1 in a frame has it everywhere."""
        return np.array([*map(self.number, keys), -1], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class RecordTable:
    """The records of a rank, in the order of writing.

    Attributes:
      record: columns of `RawRecord` by name, [num records]; texts and "args" by number.
      slot: columns of `RawSlot`, [num slots]; "geometry" is dtype, shape, strides, offset, device and layout.
      producer: "seq" and "slot" of what wrote the slots' values, of all slots in order.
      first_slot: [num records + 1], where the slots of each begin.
      first_producer: [num slots + 1], where the producers of each begin.
    """

    record: dict[str, Numbers]
    slot: dict[str, Numbers]
    producer: dict[str, Numbers]
    first_slot: Numbers
    first_producer: Numbers

    @classmethod
    def of(cls, reader: RankReader, names: Names) -> RecordTable:
        """
        Raises:
          TraceFormatError: a frame cannot be read.
        """
        record: dict[str, list[Numbers]] = {name: [] for name in (*_PLAIN, *_TEXTS, "args")}
        slot: dict[str, list[Numbers]] = {
            name: [] for name in (*_SLOT_PLAIN, *_SLOT_TEXTS, "geometry", "value")
        }
        producer: dict[str, list[Numbers]] = {"seq": [], "slot": []}
        for frame in reader.frames():
            texts = names.numbers([reader.model_names.get(text, text) for text in frame.strings])
            plain_texts = names.numbers(frame.strings)
            values = names.numbers(frame.packed_values())
            for name, column in zip(_PLAIN, frame.record_arrays(_PLAIN), strict=True):
                record[name].append(column)
            for name, column in zip(_TEXTS, frame.record_arrays(_TEXTS), strict=True):
                record[name].append((texts if name == "model" else plain_texts)[column])
            record["args"].append(values[frame.record_arrays(("args",))[0]])
            for name, column in zip(_SLOT_PLAIN, frame.slot_arrays(_SLOT_PLAIN), strict=True):
                slot[name].append(column)
            for name, column in zip(_SLOT_TEXTS, frame.slot_arrays(_SLOT_TEXTS), strict=True):
                slot[name].append(plain_texts[column])
            for name, column in zip(
                ("geometry", "value"), frame.slot_arrays(("geometry", "value")), strict=True
            ):
                slot[name].append(values[column])
            for name, column in zip(("seq", "slot"), frame.producer_arrays(), strict=True):
                producer[name].append(column)
        records, slots, producers = (
            {name: _joined(parts) for name, parts in table.items()} for table in (record, slot, producer)
        )
        first_slot, first_producer = _starts(records["num_slots"]), _starts(slots["num_producers"])
        return cls(records, slots, producers, first_slot, first_producer)

    def rows(self, order: Numbers) -> RecordTable:
        """The same records in another order.

        Args:
          order: [num records], rows of this table.
        """
        slots, first_slot = _parts(self.first_slot, order)
        producers, first_producer = _parts(self.first_producer, slots)
        return RecordTable(
            {name: column[order] for name, column in self.record.items()},
            {name: column[slots] for name, column in self.slot.items()},
            {name: column[producers] for name, column in self.producer.items()},
            first_slot,
            first_producer,
        )


def _parts(first: Numbers, order: Numbers) -> tuple[Numbers, Numbers]:
    """Where the parts of rows lie that are put in another order, and where those of each begin then."""
    counts = np.diff(first)[order]
    starts = _starts(counts)
    return np.repeat(first[:-1][order] - starts[:-1], counts) + np.arange(starts[-1]), starts


class ContentTable:
    """The contents of a rank: what is known of each, without its data.

    Attributes:
      kind: [num contents], the number of dtype, shape and of which statistics there are.
      hashed: [num contents], whether a hash was taken.
      has_data, has_sketch: [num contents].
      digest: [num contents, 2] uint64, the hash; zeros where none was taken.
      stats: [num contents, len(STATISTICS)], NaN where undefined.
      summarised: [num contents], whether there are statistics.
    """

    def __init__(self, reader: RankReader, names: Names) -> None:
        """
        Raises:
          TraceFormatError: a frame cannot be read, or contents are missing between others.
        """
        kinds, hashes, stats, summarised, shards, rows, ends = [], [], [], [], [], [], [0]
        self._frames: list[Any] = []
        for frame in reader.frames():
            if not frame.num_contents:
                continue
            types, given, shard, row = frame.content_arrays(("type", "summarised", "shard", "sketch_row"))
            values = names.numbers(frame.packed_values())
            table = frame.statistics()
            undefined = (np.isnan(table) << np.arange(len(STATISTICS))).sum(1)
            kinds.append((values[types] << 16) + (undefined << 1) + (row >= 0))
            hashes += frame.hashes()
            stats.append(table)
            summarised.append(given != 0)
            shards.append(shard)
            rows.append(row)
            ends.append(ends[-1] + frame.num_contents)
            self._frames.append((frame.first_content, frame.sketch))
        self._reader = reader
        self._ends = np.array(ends)
        self._firsts = np.array([first for first, _ in self._frames], dtype=np.int64)
        self.kind = _joined(kinds)
        self.stats = np.concatenate(stats) if stats else np.empty((0, len(STATISTICS)))
        self.summarised = np.concatenate(summarised) if stats else np.empty(0, dtype=bool)
        self.hashed = np.array([bool(h) for h in hashes], dtype=bool)
        self.digest = np.frombuffer(b"".join(h.ljust(16, b"\0")[:16] for h in hashes), "<u8").reshape(-1, 2)
        self.has_data = _joined(shards) >= 0
        self._rows = _joined(rows)
        self.has_sketch = self._rows >= 0
        self._beside: dict[int, Any] = {}

    def places(self, ids: Numbers) -> Numbers:
        """Rows of this table, by number of the contents.

        Raises:
          KeyError: there is no such content.
        """
        frame = np.searchsorted(self._firsts, ids, side="right") - 1
        found = ids - self._firsts[frame] + self._ends[frame]
        if ids.size and (frame.min() < 0 or (found >= self._ends[frame + 1]).any()):
            raise KeyError("no such content")
        return np.asarray(found)

    def beside(self, other: ContentTable, make: Callable[[ContentTable, ContentTable], T]) -> T:
        """What is kept about the contents of this table and of another; made where it is asked for first."""
        found = self._beside.get(id(other))
        if found is None:
            found = self._beside[id(other)] = other, make(self, other)  # with the other, which keeps its id
        made: T = found[1]
        return made

    def id_of(self, place: int) -> int:
        """The number of the content in a row."""
        frame = int(np.searchsorted(self._ends, place, side="right")) - 1
        return int(self._firsts[frame] + place - self._ends[frame])

    def content(self, place: int) -> StoredContent:
        """The content in a row."""
        return self._reader.content(self.id_of(place))

    def stat(self, name: str, places: Numbers) -> npt.NDArray[np.float64]:
        """One statistic of some contents, NaN where undefined."""
        found: npt.NDArray[np.float64] = self.stats[places, _AT[name]]
        return found

    def sketches(self, places: Numbers) -> npt.NDArray[np.float32]:
        """[len(places), K], of contents that have a sketch; narrow ones [len(places), NARROW].

        Raises:
          TraceFormatError: a shard that holds them is missing or corrupt.
        """
        found = np.empty((len(places), self._width(places)), dtype=np.float32)
        frames = np.searchsorted(self._ends, places, side="right") - 1
        for number in np.unique(frames):
            chosen = frames == number
            table = self._reader.sketch_table(self._frames[number][1])
            found[chosen] = table[self._rows[places[chosen]]]
        return found

    def _width(self, places: Numbers) -> int:
        """Of the sketches: the writer makes all of one rank alike."""
        if not len(places):
            return K
        frame = int(np.searchsorted(self._ends, places[0], side="right")) - 1
        return int(self._reader.sketch_table(self._frames[frame][1]).shape[1])


def same_hash(
    first: ContentTable, first_places: Numbers, second: ContentTable, second_places: Numbers
) -> npt.NDArray[np.bool_]:
    """[num places], whether contents in some rows of two tables have hashes, and the same."""
    same = (first.digest[first_places] == second.digest[second_places]).all(1)
    found: npt.NDArray[np.bool_] = same & first.hashed[first_places] & second.hashed[second_places]
    return found


@dataclass(frozen=True, slots=True)
class StepContents:
    """One content of each of some steps, alike in all but its values.

    Attributes:
      first: that of the first step.
      table: where they stand.
      places: [num steps], their rows.
    """

    first: StoredContent
    table: ContentTable
    places: Numbers

    def has_hash_of(self, other: StepContents) -> npt.NDArray[np.bool_]:
        """[num steps], whether both have the same hash there."""
        return same_hash(self.table, self.places, other.table, other.places)

    def contents(self) -> list[StoredContent]:
        """[num steps], that of each."""
        return [self.table.content(place) for place in self.places.tolist()]

    def sketches(self) -> list[npt.NDArray[np.float32] | None]:
        """[num steps], the sketch of each, None where none was taken."""
        has_sketch = self.table.has_sketch[self.places]
        found: list[npt.NDArray[np.float32] | None] = [None] * len(self.places)
        rows = self.table.sketches(self.places[has_sketch])
        for at, row in zip(np.flatnonzero(has_sketch).tolist(), rows, strict=True):
            found[at] = row
        return found

    def stats(self, steps: Together) -> dict[str, float | None]:
        """The statistics, by name; a plain number where all steps have the same."""
        columns = np.ascontiguousarray(self.table.stats[self.places].T)
        firsts = columns[:, 0]
        plain = (columns == firsts[:, None]).all(1).tolist()
        found: dict[str, float | None] = {}
        for name, first, values, is_plain in zip(STATISTICS, firsts.tolist(), columns, plain, strict=True):
            if first != first:
                found[name] = None
            else:
                found[name] = first if is_plain else each(values, steps)
        return found


def _joined(parts: Sequence[Numbers]) -> Numbers:
    """One column, in half the memory where its numbers allow."""
    small = np.iinfo(np.int32)
    fits = all(not p.size or (small.min <= p.min() and p.max() <= small.max) for p in parts)
    dtype = np.int32 if fits else np.int64
    return np.concatenate([p.astype(dtype) for p in parts]) if parts else np.empty(0, dtype=dtype)


def _starts(counts: Numbers) -> Numbers:
    return np.concatenate(([0], np.cumsum(counts)))


__all__ = ["ContentTable", "Names", "RecordTable", "StepContents", "same_hash"]
