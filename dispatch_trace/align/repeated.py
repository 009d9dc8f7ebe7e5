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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dispatch_trace.align.folded_pairs import FoldedPairs
from dispatch_trace.align.named import keeps_first_output, keeps_last_call
from dispatch_trace.align.pairs import Pair
from dispatch_trace.align.step_table import BlockKey, StepTable
from dispatch_trace.align.steps import pair_models, pair_steps
from dispatch_trace.align.within_step import repeats_of, same_form
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
# So many blocks on either side of one that went astray are looked at by themselves as well.
_BESIDE = 2


@dataclass(frozen=True, slots=True)
class _Group:
    """Blocks that are alike on both sides, in order."""

    blocks: tuple[BlockKey, ...]
    together: Together
    offsets: tuple[Numbers, Numbers]  # of the records' numbers in each block, from those of the first
    runs: Numbers  # [num blocks], which of the runs of blocks that follow each other one is in


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
        self.content_table = side.contents
        self._side = side
        self._number = number
        self._seq = side.seq.astype(np.int64)  # as what is searched for: else NumPy copies it for each search
        shown = np.ones(len(side.seq), dtype=bool)
        self._group_of = np.full(len(side.seq), -1, dtype=np.int32)  # of each record that shows
        self._groups = groups
        self._several: list[tuple[Together, Numbers]] = []
        self._numbers: list[Numbers] = []  # by group, of the slots of its first block
        self._geometries: list[dict[int, tuple[Any, ...]]] = []
        self._arguments: list[dict[int, tuple[Any, ...]]] = []
        for at, group in enumerate(groups):
            for block in group.blocks[1:]:
                begin, end = side.blocks[block]
                shown[begin:end] = False
            begin, end = side.blocks[group.blocks[0]]
            self._group_of[begin:end] = at
            self._numbers.append(self._numbered(group))
            self._geometries.append(side.geometries_of(group.blocks, group.together))
            self._arguments.append(side.arguments_of(group.blocks, group.together))
        self._sources = self._read_across()
        rows = np.flatnonzero(shown)
        self._rows = dict(zip(side.seq[rows].tolist(), rows.tolist(), strict=True))  # by number, that show
        self._contents: dict[int, StoredContent] = {}
        self.num_shown = len(rows)
        self.reads_across = bool(self._sources)
        self.doubted: set[int] = set()

    def _numbered(self, group: _Group) -> Numbers:
        """[num slots] of the first of some blocks: numbers of contents that stand for those of all."""
        held = self._side.slots_of(group.blocks, self._side.table.slot["content"])
        numbers = held[:, 0].astype(np.int64)
        known: dict[bytes, int] = {}
        for at in np.flatnonzero((held != held[:, :1]).any(1)):
            key = held[at].tobytes()
            if key not in known:
                known[key] = _PER_STEP + len(self._several)
                self._several.append((group.together, self._side.contents.places(held[at])))
            numbers[at] = known[key]
        return numbers

    def _read_across(self) -> dict[int, dict[tuple[int, int], Numbers]]:
        """What stands for several or is read by such, of another block, by the slot that shows and reads it;
        with [n, 2], the positions of the blocks that read it, in order, and of those that made it."""
        side, table = self._side, self._side.table
        slot, made_by, index = side.across
        # Each record by the one that shows for it, and its number in its block.
        shown = np.arange(len(side.seq))
        position = np.full(len(side.seq), -1)
        for group in self._groups:
            first, last = side.blocks[group.blocks[0]]
            for number, block in enumerate(group.blocks):
                begin, end = side.blocks[block]
                shown[begin:end], position[begin:end] = np.arange(first, last), number
        row = np.repeat(np.arange(len(side.seq)), np.diff(table.first_slot))[slot]
        chosen = (position[row] >= 0) | (position[made_by] >= 0)
        seen = table.first_slot[shown[row]] + slot - table.first_slot[row]
        keys = np.stack([column[chosen] for column in (seen, side.seq[shown[made_by]], index)], axis=1)
        positions = np.stack([position[row][chosen], position[made_by][chosen]], axis=1)
        order = np.lexsort(keys.T[::-1])
        keys, positions = keys[order], positions[order]
        begins = np.flatnonzero((np.diff(keys, axis=0, prepend=-1) != 0).any(1))
        found: dict[int, dict[tuple[int, int], Numbers]] = defaultdict(dict)
        parts = np.split(positions, begins[1:])
        for (at, seq, place), part in zip(keys[begins].tolist(), parts, strict=False):  # none: one empty part
            found[at][seq, place] = part
        return dict(found)

    def records(self, **where: Any) -> Iterator[StoredRecord]:
        for row in self._rows.values():
            record = self._side.record(row)
            if all(getattr(record, name) == wanted for name, wanted in where.items()):
                yield self._seen(record, row)

    def record(self, seq: int) -> StoredRecord:
        return self._seen(self._whole.record(seq), self._row(seq))

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
    def is_astray(self) -> bool:
        return any(group.together.astray.any() for group in self._groups)

    @property
    def unfolded(self) -> RankReader:
        return self._side.reader

    def in_step(self, record: StoredRecord, position: int) -> StoredRecord:
        if not self.reads_across and self._group(record) is None:
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
        return 1 if group is None else len(group.blocks)

    def doubt(self, record: StoredRecord) -> None:
        number = int(self._group_of[self._row(record.seq)])
        if number >= 0:
            self.doubted.add(number)

    def lose_readers(self, record: StoredRecord, slot: StoredSlot, source: tuple[int, int]) -> None:
        group, at = self._group(record), self._slot_at(record, slot)
        if group is None:
            self.lose(self._whole.record(source[0]))
        else:
            # What is wrong in one block is likely so in those behind it, too.
            lost = self._sources[at][source][:, 0]
            first = np.full(int(group.runs[-1]) + 1, len(group.runs))
            np.minimum.at(first, group.runs[lost], lost)
            group.together.leave(np.flatnonzero(np.arange(len(group.runs)) >= first[group.runs]))

    def joined(self, record: StoredRecord) -> Together | None:
        group = self._group(record)
        return None if group is None else group.together

    def run_of(self, record: StoredRecord, position: int) -> int:
        group = self._group(record)
        return -1 if group is None else int(group.runs[position])

    def num_runs(self, record: StoredRecord) -> int:
        group = self._group(record)
        return 0 if group is None else int(group.runs[-1]) + 1

    def turns(self) -> list[tuple[int, Together, int]]:
        """Of all blocks that stand for each other, in order, the number of the first record, with whom and at
        which position."""
        found = [
            (self._side.first_seq(block), group.together, position)
            for group in self._groups
            for position, block in enumerate(group.blocks)
        ]
        return sorted(found, key=lambda turn: turn[0])

    def _group(self, record: StoredRecord) -> _Group | None:
        number = int(self._group_of[self._row(record.seq)])
        return None if number < 0 else self._groups[number]

    def _row(self, seq: int) -> int:
        row = self._rows.get(seq)
        return int(self._seq.searchsorted(seq)) if row is None else row

    def _first(self, id: int) -> StoredContent:
        found = self._contents.get(id)
        if found is None:
            one = id if id < _PER_STEP else self._side.contents.id_of(self._several[id - _PER_STEP][1][0])
            found = self._contents[id] = self._whole.content(one)
        return found

    def _seen(self, record: StoredRecord, row: int) -> StoredRecord:
        group, first_slot = int(self._group_of[row]), self._side.table.first_slot
        first = int(first_slot[row])
        if group < 0 and not (
            self.reads_across
            and any(map(self._is_across, range(first, first + len(record.slots)), record.slots))
        ):
            return record
        slots = [self._seen_slot(group, first + slot.index, slot) for slot in record.slots]
        if record.kind == "param" and first in self._sources:
            # What wrote a parameter stands in a slot of its own.
            slots.append(replace(slots[0], index=1, role="in"))
            slots[0] = replace(slots[0], producers=((record.seq, 1),))
        args = record.args
        if group >= 0:
            begin, _ = self._side.blocks[self._groups[group].blocks[0]]
            args = self._arguments[group].get(row - begin, args)
        return replace(record, slots=tuple(slots), args=args)

    def _is_across(self, at: int, slot: StoredSlot) -> bool:
        return at in self._sources or self._renewed(slot) is not None

    def _seen_slot(self, group: int, at: int, slot: StoredSlot) -> StoredSlot:
        changed: dict[str, Any] = {}
        if group >= 0:
            begin, _ = self._side.blocks[self._groups[group].blocks[0]]
            place = at - int(self._side.table.first_slot[begin])
            if slot.content != self._numbers[group][place]:
                changed["content"] = int(self._numbers[group][place])
            if place in self._geometries[group]:
                changed |= zip(("shape", "strides", "offset"), self._geometries[group][place], strict=True)
        renewed = self._renewed(slot)
        if at in self._sources:
            changed["producers"] = ()
        elif renewed is not None:
            changed["producers"] = (slot.producers[0], (renewed, 1))
        return replace(slot, **changed) if changed else slot

    def _renewed(self, slot: StoredSlot) -> int | None:
        """The parameter whose writer a slot names behind it, where that stands for several."""
        if len(slot.producers) != 2 or not self.reads_across:
            return None
        seq = slot.producers[0][0]
        row = self._row(seq)
        if not self._side.is_version[row] or int(self._side.table.first_slot[row]) not in self._sources:
            return None
        return seq

    def sources(self, record: StoredRecord, slot: StoredSlot) -> Sequence[tuple[int, int]]:
        if not self.reads_across:
            return ()
        if record.kind == "param" and slot.role != "in":
            return ()
        return tuple(self._sources.get(self._slot_at(record, slot), ()))

    def handed(self, record: StoredRecord, slot: StoredSlot) -> Mapping[tuple[int, int], Numbers]:
        if not self.sources(record, slot):
            return {}
        return self._sources[self._slot_at(record, slot)]

    def _slot_at(self, record: StoredRecord, slot: StoredSlot) -> int:
        at = 0 if record.kind == "param" else slot.index
        return int(self._side.table.first_slot[self._row(record.seq)]) + at


class Folded:
    """Two ranks in which of steps that repeat only the first shows.

    Attributes:
      ref, target: the views.
      grows: sizes differ between steps that stand for each other, or they read what those before made.
    """

    def __init__(
        self,
        sides: tuple[StepTable, StepTable],
        groups: Sequence[Sequence[BlockKey]],
        *,
        grows: bool = False,
        is_whole: bool = True,
    ) -> None:
        """
        Args:
          is_whole: no blocks that are alike were taken apart.
        """
        self.grows = grows
        self._is_whole = is_whole
        self._sides = sides
        self._groups = []
        self._order = {block: at for at, block in enumerate(sides[0].blocks)}
        for blocks in groups:
            firsts = [[side.first_seq(block) for block in blocks] for side in sides]
            ref, target = (np.array(seqs) - seqs[0] for seqs in firsts)
            places = np.array([self._order[block] for block in blocks])
            runs = (np.diff(places, prepend=places[0] - 1) > 1).astype(np.int64).cumsum()
            self._groups.append(_Group(tuple(blocks), Together(len(blocks)), (ref, target), runs))
        self._by_step = {group.blocks[0][0]: group for group in self._groups}
        self.ref, self.target = (FoldedReader(sides[n], n, self._groups) for n in (0, 1))

    def astray(self) -> set[int]:
        """The steps that do not take the way of the one that stands for them."""
        return {
            block[0]
            for group in self._groups
            for block, lost in zip(group.blocks, group.together.astray.tolist(), strict=True)
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
        """The same with blocks that went astray apart from the others; None where none repeat any more.

        Those that left the way of the first at one place stand for themselves together. Where blocks read
        what others made, few of them, and those that are not right, stand each by itself, with those beside
        them; at first, those behind one that went astray stand apart from those before it.
        """
        parts: list[list[BlockKey]] = []
        order = self._order
        alone = np.zeros(len(order), dtype=bool)
        for number, group in enumerate(self._groups):
            by_place: dict[int, list[BlockKey]] = defaultdict(list)
            places = group.together.parted_at.copy()
            if self._is_whole and self.target.reads_across and group.together.astray.any():
                # What is wrong in one block is likely so in those behind it, too.
                behind = places[int(group.together.astray.argmax()) :]
                behind[behind == -1] = -2
            for block, place in zip(group.blocks, places.tolist(), strict=True):
                by_place[place].append(block)
            for part in by_place.values():
                if self.grows and (number in self.target.doubted or len(part) < MIN_STEPS):
                    for block in part:
                        at = order[block]
                        alone[max(at - _BESIDE, 0) : at + _BESIDE + 1] = True
                parts.append(part)
        parts = [[block for block in part if not alone[order[block]]] for part in parts]
        kept = sorted(part for part in parts if len(part) >= MIN_STEPS)
        if not kept:
            return None
        return Folded(self._sides, kept, grows=self.grows, is_whole=False)

    def steps(self, first: int) -> tuple[int, ...]:
        """The steps that one of the views stands for, in order; itself where it does not repeat."""
        group = self._by_step.get(first)
        return (first,) if group is None else tuple(step for step, _ in group.blocks)

    def is_about_several(self, seq: int, ref_seq: int) -> bool:
        """Whether a record of the target, or one of the reference, stands for several; -1 for none."""
        sides = (self.target, seq), (self.ref, ref_seq)
        return any(number >= 0 and side.repeats(side.record(number)) > 1 for side, number in sides)

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
            num = (self.target if pair.target is not None else self.ref).repeats(record)
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
            return {number: [-1] * self.ref.repeats(ref) for number, ref in lone}
        ours, theirs = (np.concatenate(side) for side in zip(*events, strict=True))
        order = np.argsort(ours)
        last = np.concatenate(([-1], np.maximum.accumulate(theirs[order])))
        return {
            number: last[np.searchsorted(ours[order], self.ref.seqs(ref))].tolist() for number, ref in lone
        }


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
    if any(save not in ("stats", "meta") for save in saves):
        return None
    try:
        if pair_steps(ref, target, pair_models(ref, target)) is not None:
            return None
        names = Names()
        sides = StepTable(ref, names), StepTable(target, names)
        if any(names.number("op") not in side.table.record["kind"] for side in sides):
            return None  # modules alone: equal contents say what they read
        groups, grows = _alike(sides)
        taken = {block for blocks in groups for block in blocks}
        if _cut_within(sides, taken, names):
            groups, grows = _alike(sides)
    except (TraceFormatError, KeyError):
        return None  # who reads it record by record says what is wrong
    return Folded(sides, groups, grows=grows) if groups else None


def _alike(sides: tuple[StepTable, StepTable]) -> tuple[list[list[BlockKey]], bool]:
    """Blocks that are alike on both sides, and whether some are so only beside sizes and what others made."""
    if min(len(side.blocks) for side in sides) < MIN_STEPS:
        return [], False
    alike: dict[tuple[bytes, bytes], list[BlockKey]] = defaultdict(list)
    (ours, our_plain), (theirs, their_plain) = (side.signatures() for side in sides)
    for block in sorted(ours.keys() & theirs.keys()):
        alike[ours[block], theirs[block]].append(block)
    groups = [blocks for blocks in alike.values() if len(blocks) >= MIN_STEPS]
    # Sizes may differ from step to step where they do not from trace to trace.
    taken = {block for blocks in groups for block in blocks}
    growing: dict[tuple[bytes, bytes], list[BlockKey]] = defaultdict(list)
    for block in sorted((our_plain.keys() & their_plain.keys()) - taken):
        if our_plain[block][1] == their_plain[block][1]:
            growing[our_plain[block][0], their_plain[block][0]].append(block)
    grown = [blocks for blocks in growing.values() if len(blocks) >= MIN_STEPS]
    return sorted([*groups, *grown]), bool(grown)


def _cut_within(sides: tuple[StepTable, StepTable], taken: Collection[BlockKey], names: Names) -> bool:
    """Cuts steps that stand for themselves into repeats, where some of them are most of the records."""
    ref, target = sides
    alone = [block for block in ref.blocks if block not in taken and block in target.blocks]
    if 2 * sum(ref.num_rows(block) for block in alone) < len(ref.seq):
        return False
    cut: dict[BlockKey, list[tuple[int, int]]] = {}
    for block in alone:
        if same_form(ref, target, block, names):
            found = repeats_of(ref, block, names)
            if found:
                cut[block] = found
    for side in sides:
        side.cut(cut)
    return bool(cut)


__all__ = ["Folded", "FoldedReader", "fold"]
