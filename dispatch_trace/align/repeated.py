"""Steps that repeat: one of them is lined up and judged, with the values of all of them at once.

A program that serves request after request runs the same ops on the same shapes again and again, and only the
values change. Two steps of a trace are alike when their records are the same but for numbers (`_signatures`).
Where steps of the reference are alike, and those of the target with the same numbers are too, the first of
each stands for the rest: it shows in a view of the rank in which the others do not, and the contents of its
slots get numbers that stand for those of all steps (`RankReader.per_step`). Judges then work on one number a
step (`per_step`), and whatever a step does otherwise than the first sends it astray.

What is not certain does not repeat: steps with tensors kept, steps that read what another one made (a cache),
steps whose records are mixed with those of others, and what only one trace has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from dispatch_trace.align.folded_pairs import FoldedPairs
from dispatch_trace.align.named import keeps_first_output, keeps_last_call
from dispatch_trace.align.pairs import Pair
from dispatch_trace.align.steps import pair_models, pair_steps
from dispatch_trace.errors import TraceFormatError
from dispatch_trace.per_step import Together
from dispatch_trace.schema import StoredContent, StoredRecord
from dispatch_trace.store.reader import RankReader
from dispatch_trace.store.records import LEAF
from dispatch_trace.store.table import ContentTable, Names, Numbers, RecordTable, StepContents
from dispatch_trace.store.view import ReaderView

# Fewer steps than this are not worth it.
MIN_STEPS = 3
# Contents from here on are those of several steps; fewer than `content.LAID_OUT`, more than lenses have.
_PER_STEP = 1 << 56

_RECORD_COLUMNS = (
    "kind",
    "model",
    "grad_phase",
    "module",
    "op",
    "overload",
    "name",
    "note",
    "args",
    "call",
    "n",
    "flags",
    "thread",
    "num_slots",
)
_SLOT_COLUMNS = ("name", "role", "note", "flags", "geometry", "value", "num_producers")
_Block: TypeAlias = tuple[int, int]  # rows of its first record, and of the first behind it


class _Side:
    """One rank in columns, cut into steps."""

    def __init__(self, reader: RankReader, names: Names) -> None:
        """
        Raises:
          TraceFormatError: a frame cannot be read.
        """
        self.reader = reader
        self.table = RecordTable.of(reader, names)
        self.contents = ContentTable(reader, names)
        self.seq = self.table.record["seq"]
        self.is_param = self.table.record["kind"] == names.number("param")
        self._read = names.number("in")
        self.blocks = self._cut()

    def _cut(self) -> dict[int, _Block]:
        """By number of the step its rows; {} where steps are mixed, or not in order."""
        if len(self.seq) < 2 or not (np.diff(self.seq) > 0).all():
            return {}
        rows = np.flatnonzero(~self.is_param)
        step = self.table.record["step"][rows]
        begins = np.flatnonzero(np.diff(step, prepend=step[:1] - 1))
        if not (np.diff(step[begins]) > 0).all():
            return {}
        ends = np.append(begins[1:], len(rows))
        return {
            int(step[begin]): (int(rows[begin]), int(rows[end - 1]) + 1)
            for begin, end in zip(begins, ends, strict=True)
        }

    def signatures(self) -> dict[int, bytes]:
        """Of each step that could repeat a digest of all but its numbers; alike means the same digest."""
        record, slot, table = self.table.record, self.table.slot, self.table
        num_records, num_slots = len(self.seq), len(slot["name"])
        starts = np.full(num_records, -1, dtype=np.int64)  # row at which the step of each record begins
        for begin, end in self.blocks.values():
            starts[begin:end] = begin
        base = self.seq[starts]
        row_of_slot = np.repeat(np.arange(num_records), np.diff(table.first_slot))
        slot_of_producer = np.repeat(np.arange(num_slots), np.diff(table.first_producer))

        producer_row = np.searchsorted(self.seq, table.producer["seq"]).clip(max=max(num_records - 1, 0))
        recorded = self.seq[producer_row] == table.producer["seq"]
        from_param = recorded & self.is_param[producer_row]
        reader_row = row_of_slot[slot_of_producer]
        inside = recorded & ~from_param & (starts[producer_row] == starts[reader_row])
        outside = ~(inside | from_param)
        # What another step read first and did not make is no work of it: a constant, or a parameter.
        place = (table.first_slot[producer_row] + table.producer["slot"]).clip(max=max(num_slots - 1, 0))
        was_read = recorded & (slot["role"][place] == self._read)
        odd = np.zeros(num_records, dtype=bool)  # records of steps that cannot repeat
        odd[reader_row[outside & ~was_read]] = True
        odd[producer_row[outside & recorded]] = True
        odd |= self.is_param  # in the midst of a step
        made_by = np.where(inside, table.producer["seq"] - base[reader_row], -2 - table.producer["seq"])

        held = slot["content"]
        has_content = held >= 0
        kind = np.full(num_slots, -1, dtype=np.int64)
        if has_content.any():
            places = self.contents.places(held[has_content])
            kind[has_content] = self.contents.kind[places]
            fine = self.contents.hashed & self.contents.summarised & ~self.contents.has_data
            odd[row_of_slot[has_content][~fine[places]]] = True

        columns: list[Numbers] = [record[name] for name in _RECORD_COLUMNS]
        columns += [
            self.seq - base,
            record["opened"] - base,
            np.where(record["producer"] >= 0, record["producer"] - base, -1),
        ]
        slots: list[Numbers] = [slot[name] for name in _SLOT_COLUMNS]
        slots += [kind, self._leaves(row_of_slot, starts)]
        producers = [made_by, table.producer["slot"]]
        found = {}
        for step, (begin, end) in self.blocks.items():
            if odd[begin:end].any():
                continue
            hasher = xxhash.xxh3_128()
            rows: Any = begin, end
            for parts in (columns, slots, producers):
                for part in parts:
                    hasher.update(part[rows[0] : rows[1]].astype(np.int64).tobytes())
                starts_within = table.first_slot if parts is columns else table.first_producer
                rows = starts_within[rows[0]], starts_within[rows[1]]
            found[step] = hasher.digest()
        return found

    def _leaves(self, row_of_slot: Numbers, starts: Numbers) -> Numbers:
        """[num slots], which leaf each slot reads: one that this step read first by its place in the step,
        another by its content; -1 for what is no leaf."""
        slot = self.table.slot
        of_param = self.is_param[row_of_slot]
        is_leaf = ((slot["flags"] & LEAF) != 0) & (slot["content"] >= 0)
        # Parameters own their contents, wherever they stand.
        order = np.concatenate(
            (np.flatnonzero(of_param & (slot["content"] >= 0)), np.flatnonzero(is_leaf & ~of_param))
        )
        contents, first, which = np.unique(slot["content"][order], return_index=True, return_inverse=True)
        found = np.full(len(row_of_slot), -1, dtype=np.int64)
        if not contents.size:
            return found
        owner = order[first][which]
        own = ~of_param[owner] & (starts[row_of_slot[owner]] == starts[row_of_slot[order]])
        begins = self.table.first_slot[starts[row_of_slot[order]]]
        found[order] = np.where(own, owner - begins, -2 - slot["content"][order])
        return found

    def contents_of(self, steps: Sequence[int]) -> Numbers:
        """[num slots of a step, num steps], what the slots of steps that are alike hold."""
        first_slot, content = self.table.first_slot, self.table.slot["content"]
        parts = []
        for step in steps:
            begin, end = self.blocks[step]
            parts.append(content[first_slot[begin] : first_slot[end]])
        return np.stack(parts, axis=1)

    def first_seq(self, step: int) -> int:
        return int(self.seq[self.blocks[step][0]])


@dataclass(frozen=True, slots=True)
class _Group:
    """Steps that are alike on both sides, in order."""

    steps: tuple[int, ...]
    together: Together
    offsets: tuple[Numbers, Numbers]  # of the records' numbers in each step, from those of the first


class FoldedReader(ReaderView):
    """A rank in which of steps that repeat only the first shows.

    Attributes:
      num_shown: records that show.
    """

    def __init__(self, side: _Side, number: int, groups: Sequence[_Group]) -> None:
        """
        Args:
          number: 0 for the reference, 1 for the target.
        """
        super().__init__(side.reader)
        self._side = side
        self._number = number
        self._groups = {group.steps[0]: group for group in groups}
        self._shown = np.ones(len(side.seq), dtype=bool)
        self._several: list[tuple[Together, Numbers]] = []
        self._numbers: dict[int, Numbers] = {}  # by step that stands for others, of its slots
        known: dict[bytes, int] = {}
        for group in groups:
            for step in group.steps[1:]:
                begin, end = side.blocks[step]
                self._shown[begin:end] = False
            held = side.contents_of(group.steps)
            numbers = held[:, 0].astype(np.int64)
            for at in np.flatnonzero((held != held[:, :1]).any(1)):
                key = held[at].tobytes()
                if key not in known:
                    known[key] = _PER_STEP + len(self._several)
                    self._several.append((group.together, side.contents.places(held[at])))
                numbers[at] = known[key]
            self._numbers[group.steps[0]] = numbers
            known.clear()
        self.num_shown = int(self._shown.sum())

    def records(self, **where: Any) -> Iterator[StoredRecord]:
        begin = 0
        for frame in self.frames():
            shown = self._shown[begin : begin + frame.num_records]
            if shown.any():
                rows = [row for row in frame.rows(where) if shown[row]]
                for row, record in zip(rows, frame.records(rows), strict=True):
                    yield self._seen(record, begin + row)
            begin += frame.num_records

    def record(self, seq: int) -> StoredRecord:
        return self._seen(self._whole.record(seq), int(np.searchsorted(self._side.seq, seq)))

    def content(self, id: int) -> StoredContent:
        steps = self.together(id)
        if steps is not None:
            steps.lose()  # who asks for one content knows nothing of the others
        return self._first(id)

    def has_hash(self, id: int) -> bool:
        return bool(self._first(id).hash)  # steps that repeat are alike in that

    def sketch(self, id: int) -> np.ndarray[Any, Any] | None:
        steps = self.together(id)
        if steps is not None:
            steps.lose()
        return self._whole.sketch(self._first(id).id)

    def together(self, id: int) -> Together | None:
        return self._several[id - _PER_STEP][0] if id >= _PER_STEP else None

    def per_step(self, id: int, steps: Together) -> StepContents:
        table = self._side.contents
        if id >= _PER_STEP:
            places = self._several[id - _PER_STEP][1]
        else:
            places = np.repeat(table.places(np.array([id])), len(steps.astray))
        return StepContents(self._first(id), table, places)

    def chosen(self, first: int, second: int, where: npt.NDArray[np.bool_], steps: Together) -> int:
        places = [self.per_step(id, steps).places for id in (first, second)]
        self._several.append((steps, np.where(where, places[1], places[0])))
        return _PER_STEP + len(self._several) - 1

    @property
    def unfolded(self) -> RankReader:
        return self._side.reader

    def in_step(self, record: StoredRecord, position: int) -> StoredRecord:
        if self._group(record) is None:
            return record
        return self._side.reader.record(self.seq_in_step(record, position))

    def seq_in_step(self, record: StoredRecord, position: int) -> int:
        """The number of the record that one stands for in one of the steps that repeat."""
        group = self._group(record)
        if group is None:
            return record.seq
        return record.seq + int(group.offsets[self._number][position])

    def seqs(self, record: StoredRecord) -> Numbers:
        """[num steps], the numbers of all records that one stands for."""
        group = self._group(record)
        return np.array([record.seq]) if group is None else record.seq + group.offsets[self._number]

    def lose(self, record: StoredRecord) -> None:
        group = self._group(record)
        if group is not None:
            group.together.lose()

    def repeats(self, record: StoredRecord) -> int:
        group = self._group(record)
        return 1 if group is None else len(group.steps)

    def _group(self, record: StoredRecord) -> _Group | None:
        return None if record.kind == "param" else self._groups.get(record.step)

    def _first(self, id: int) -> StoredContent:
        if id < _PER_STEP:
            return self._whole.content(id)
        return self._whole.content(self._side.contents.id_of(int(self._several[id - _PER_STEP][1][0])))

    def _seen(self, record: StoredRecord, row: int) -> StoredRecord:
        numbers = None if record.kind == "param" else self._numbers.get(record.step)
        if numbers is None:
            return record
        first_slot, (begin, _) = self._side.table.first_slot, self._side.blocks[record.step]
        at = int(first_slot[row] - first_slot[begin])
        slots = [
            slot if slot.content == number else replace(slot, content=number)
            for slot, number in zip(record.slots, numbers[at : at + len(record.slots)].tolist(), strict=True)
        ]
        return replace(record, slots=tuple(slots))


class Folded:
    """Two ranks in which of steps that repeat only the first shows.

    Attributes:
      ref, target: the views.
    """

    def __init__(self, sides: tuple[_Side, _Side], groups: Sequence[Sequence[int]]) -> None:
        self._sides = sides
        self._groups = []
        for steps in groups:
            firsts = [[side.first_seq(step) for step in steps] for side in sides]
            ref, target = (np.array(seqs) - seqs[0] for seqs in firsts)
            self._groups.append(_Group(tuple(steps), Together(len(steps)), (ref, target)))
        self._by_step = {group.steps[0]: group for group in self._groups}
        self.ref, self.target = (FoldedReader(sides[n], n, self._groups) for n in (0, 1))

    def astray(self) -> set[int]:
        """The steps that do not take the way of the one that stands for them."""
        return {
            step
            for group in self._groups
            for step, lost in zip(group.steps, group.together.astray.tolist(), strict=True)
            if lost
        }

    @property
    def num_records(self) -> int:
        """Records of both ranks."""
        return len(self._sides[0].seq) + len(self._sides[1].seq)

    @property
    def num_shown(self) -> int:
        """Records that show in the views."""
        return self.ref.num_shown + self.target.num_shown

    def parted(self) -> Folded | None:
        """The same with steps that went astray apart from the others; None where none repeat any more.

        Those that left the way of the first at one place stand for themselves together.
        """
        parts: list[list[int]] = []
        for group in self._groups:
            by_place: dict[int, list[int]] = defaultdict(list)
            for step, place in zip(group.steps, group.together.parted_at.tolist(), strict=True):
                by_place[place].append(step)
            parts += by_place.values()
        kept = sorted(part for part in parts if len(part) >= MIN_STEPS)
        return Folded(self._sides, kept) if kept else None

    def steps(self, first: int) -> tuple[int, ...]:
        """The steps that one of the views stands for, in order; itself where it does not repeat."""
        group = self._by_step.get(first)
        return (first,) if group is None else group.steps

    def unfolded(self, pairs: Sequence[Pair]) -> FoldedPairs:
        """The rows of all steps, in the order of the target.

        Args:
          pairs: those of the views.
        """
        places = self._places_behind(pairs)
        # Of each row: the record of the target, what stands behind it in which order, its number, its step.
        parts: list[list[Numbers]] = [[], [], [], []]
        for number, pair in enumerate(pairs):
            record = pair.target or pair.ref
            assert record is not None
            num = self._num_steps(record)
            if pair.target is not None:
                place, behind = self.target.seqs(pair.target), np.zeros(num, dtype=np.int64)
            else:
                place, behind = np.array(places[number]), self.ref.seqs(record) + 1
            row = place, behind, np.full(num, number), np.arange(num)
            for part, column in zip(parts, row, strict=True):
                part.append(column)
        columns = [np.concatenate(part) if part else np.empty(0, dtype=np.int64) for part in parts]
        order = np.lexsort(columns[::-1])
        rows = np.stack(columns[2:], axis=1)[order].astype(np.int32)
        return FoldedPairs(self.ref, self.target, pairs, rows)

    def _places_behind(self, pairs: Sequence[Pair]) -> dict[int, list[int]]:
        """Of rows without a record of the target, in each step the target's record that they stand behind:
        the last one that a record of the reference before it is paired with."""
        lone = [(number, pair.ref) for number, pair in enumerate(pairs) if pair.target is None and pair.ref]
        if not lone:
            return {}
        events = [  # (numbers in the reference, numbers in the target) of paired records
            (self.ref.seqs(pair.ref), self.target.seqs(pair.target))
            for pair in pairs
            if pair.ref is not None and pair.target is not None
        ]
        if not events:
            return {number: [-1] * self._num_steps(ref) for number, ref in lone}
        ours, theirs = (np.concatenate(side) for side in zip(*events, strict=True))
        order = np.argsort(ours)
        last = np.concatenate(([-1], np.maximum.accumulate(theirs[order])))
        return {
            number: last[np.searchsorted(ours[order], self.ref.seqs(ref))].tolist() for number, ref in lone
        }

    def _num_steps(self, record: StoredRecord) -> int:
        group = None if record.kind == "param" else self._by_step.get(record.step)
        return 1 if group is None else len(group.steps)


def fold(ref: RankReader, target: RankReader) -> Folded | None:
    """Both ranks with the steps that repeat in both shown once; None where there are none.

    Steps pair by number here: None where requests or phases say otherwise.
    """
    headers = ref.header, target.header
    if any("format" in header for header in headers) or any(
        keeps_first_output(r) or keeps_last_call(r) for r in (ref, target)
    ):
        return None  # a dump of another tool
    saves = [(header.get("options") or {}).get("save") for header in headers]
    if (
        any(save not in ("stats", "meta") for save in saves)
        or min(len(ref.steps), len(target.steps)) < MIN_STEPS
    ):
        return None
    try:
        if pair_steps(ref, target, pair_models(ref, target)) is not None:
            return None
        names = Names()
        sides = _Side(ref, names), _Side(target, names)
        alike: dict[tuple[bytes, bytes], list[int]] = defaultdict(list)
        ours, theirs = (side.signatures() for side in sides)
    except (TraceFormatError, KeyError):
        return None  # who reads it record by record says what is wrong
    if any(names.number("op") not in side.table.record["kind"] for side in sides):
        return None  # modules alone: equal contents say what they read
    for step in sorted(ours.keys() & theirs.keys()):
        alike[ours[step], theirs[step]].append(step)
    groups = [steps for steps in alike.values() if len(steps) >= MIN_STEPS]
    return Folded(sides, groups) if groups else None


__all__ = ["Folded", "FoldedReader", "fold"]
