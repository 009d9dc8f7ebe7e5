"""Steps that repeat: one of them is lined up and judged, with the values of all of them at once.

A program that serves request after request runs the same ops on the same shapes again and again, and only
the values change: its steps are alike (`step_table`). Where steps of the reference are alike, and those of
the target with the same numbers are too, the first of each stands for the rest: it shows in a view of the
rank in which the others do not, and the contents of its slots get numbers that stand for those of all steps
(`RankReader.per_step`). Judges then work on one number a step (`per_step`), and whatever a step does
otherwise than the first sends it astray.

A decoder does the same ops on more keys and values with each step, and reads those that the step before made
(`growing`). Such steps are folded where each is the same in both traces, sizes included: sizes are numbers a
step then, and what another step made is taken to be right where it is read, which the judge checks where it
was made (`RankReader.sources`).

What is not certain does not repeat: steps with tensors kept, steps that read what others wrote piece by
piece, steps whose records are mixed with those of others, and what only one trace has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dispatch_trace.align.folded_pairs import FoldedPairs
from dispatch_trace.align.named import keeps_first_output, keeps_last_call
from dispatch_trace.align.pairs import Pair
from dispatch_trace.align.step_table import StepTable
from dispatch_trace.align.steps import pair_models, pair_steps
from dispatch_trace.errors import TraceFormatError
from dispatch_trace.per_step import Together
from dispatch_trace.schema import StoredContent, StoredRecord, StoredSlot
from dispatch_trace.store.reader import RankReader
from dispatch_trace.store.table import Names, Numbers, StepContents
from dispatch_trace.store.view import ReaderView

# Fewer steps than this are not worth it.
MIN_STEPS = 3
# Contents from here on are those of several steps; fewer than `content.LAID_OUT`, more than lenses have.
_PER_STEP = 1 << 56


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

    def __init__(self, side: StepTable, number: int, groups: Sequence[_Group]) -> None:
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
        self._geometries: dict[int, dict[int, tuple[Any, ...]]] = {}
        self._arguments: dict[int, dict[int, tuple[Any, ...]]] = {}
        self._sources: dict[int, dict[int, list[tuple[int, int]]]] = {}
        stands_for = {step: group.steps[0] for group in groups for step in group.steps}
        known: dict[bytes, int] = {}
        for group in groups:
            for step in group.steps[1:]:
                begin, end = side.blocks[step]
                self._shown[begin:end] = False
            held = side.slots_of(group.steps, side.table.slot["content"])
            numbers = held[:, 0].astype(np.int64)
            for at in np.flatnonzero((held != held[:, :1]).any(1)):
                key = held[at].tobytes()
                if key not in known:
                    known[key] = _PER_STEP + len(self._several)
                    self._several.append((group.together, side.contents.places(held[at])))
                numbers[at] = known[key]
            first = group.steps[0]
            self._numbers[first] = numbers
            self._geometries[first] = side.geometries_of(group.steps, group.together)
            self._arguments[first] = side.arguments_of(group.steps, group.together)
            self._sources[first] = {
                at: sorted(
                    {(side.first_seq(stands_for.get(step, step)) + place, index) for step, place, index in s}
                )
                for at, s in side.sources_of(group.steps).items()
            }
            known.clear()
        self.num_shown = int(self._shown.sum())
        self.reads_across = any(self._sources.values())

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
        geometries, sources = self._geometries[record.step], self._sources[record.step]
        slots = []
        for place, slot in enumerate(record.slots, at):
            if slot.content != numbers[place]:
                slot = replace(slot, content=int(numbers[place]))
            if place in geometries:
                shape, strides, offset = geometries[place]
                slot = replace(slot, shape=shape, strides=strides, offset=offset)
            if place in sources:
                slot = replace(slot, producers=())
            slots.append(slot)
        args = self._arguments[record.step].get(row - begin, record.args)
        return replace(record, slots=tuple(slots), args=args)

    def sources(self, record: StoredRecord, slot: StoredSlot) -> Sequence[tuple[int, int]]:
        sources = None if record.kind == "param" else self._sources.get(record.step)
        if not sources:
            return ()
        first_slot, (begin, _) = self._side.table.first_slot, self._side.blocks[record.step]
        row = int(np.searchsorted(self._side.seq, record.seq))
        return sources.get(int(first_slot[row] - first_slot[begin]) + slot.index, ())


class Folded:
    """Two ranks in which of steps that repeat only the first shows.

    Attributes:
      ref, target: the views.
      grows: sizes differ between steps that stand for each other, or they read what those before made.
    """

    def __init__(
        self, sides: tuple[StepTable, StepTable], groups: Sequence[Sequence[int]], *, grows: bool = False
    ) -> None:
        self.grows = grows
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
        return Folded(self._sides, kept, grows=self.grows) if kept else None

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
        sides = StepTable(ref, names), StepTable(target, names)
        alike: dict[tuple[bytes, bytes], list[int]] = defaultdict(list)
        (ours, our_plain), (theirs, their_plain) = (side.signatures() for side in sides)
    except (TraceFormatError, KeyError):
        return None  # who reads it record by record says what is wrong
    if any(names.number("op") not in side.table.record["kind"] for side in sides):
        return None  # modules alone: equal contents say what they read
    for step in sorted(ours.keys() & theirs.keys()):
        alike[ours[step], theirs[step]].append(step)
    groups = [steps for steps in alike.values() if len(steps) >= MIN_STEPS]
    # Sizes may differ from step to step where they do not from trace to trace.
    taken = {step for steps in groups for step in steps}
    growing: dict[tuple[bytes, bytes], list[int]] = defaultdict(list)
    for step in sorted((our_plain.keys() & their_plain.keys()) - taken):
        if our_plain[step][1] == their_plain[step][1]:
            growing[our_plain[step][0], their_plain[step][0]].append(step)
    grown = [steps for steps in growing.values() if len(steps) >= MIN_STEPS]
    groups = sorted([*groups, *grown])
    return Folded(sides, groups, grows=bool(grown)) if groups else None


__all__ = ["Folded", "FoldedReader", "fold"]
