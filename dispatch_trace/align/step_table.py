"""A rank in columns, cut into blocks: which of them are alike, and in what they differ.

A block is a step, or one of the repeats that a step consists of (`within_step`). Two blocks are alike when
their records are the same but for numbers. Those that read what another block made are not; but blocks may
also be alike beside their sizes (`growing`), and then read what the block before made, whole and as it was
made. What another block made is written in four ways: whole (one producer), or as a parameter that has been
written since it was last recorded, by whom its new version, or both, name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from dispatch_trace.align.growing import (
    plain_arguments,
    plain_geometries,
    plain_kinds,
    plain_values,
    together_of,
    value_of,
)
from dispatch_trace.per_step import Together
from dispatch_trace.schema import StoredRecord
from dispatch_trace.store.reader import RankReader
from dispatch_trace.store.records import LEAF
from dispatch_trace.store.table import ContentTable, Names, Numbers, RecordTable

# What the step before made is numbered from here on down, by its place there.
_BEFORE = 1 << 40

# So many steps to each that differs, and none is looked at once more without its sizes.
_FEW = 4

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
# Number of the step, and which of the repeats in it; 0 for a step as a whole.
BlockKey: TypeAlias = tuple[int, int]


class StepTable:
    """One rank in columns, cut into steps.

    Attributes:
      reader: the rank.
      table, contents: its records and contents.
      seq: [num records], their numbers, ascending.
      is_param: [num records], parameters as they were first recorded.
      is_version: [num records], parameters that have been written since.
      is_module: [num records].
      blocks: in order, their rows; {} where steps are mixed, or not in order.
      across: [3, n], what blocks read that others made: the slot, the producer's record, and its slot.
    """

    def __init__(self, reader: RankReader, names: Names) -> None:
        """
        Raises:
          TraceFormatError: a frame cannot be read.
        """
        self.reader = reader
        self._names = names
        self.table = RecordTable.of(reader, names)
        seq = self.table.record["seq"]
        if len(seq) and not (np.diff(seq) > 0).all():  # where a batch was written while an op was running
            self.table = self.table.rows(np.argsort(seq, kind="stable"))
        self.contents = ContentTable(reader, names)
        self.seq = self.table.record["seq"]
        of_param = self.table.record["kind"] == names.number("param")
        made = np.diff(self.table.first_producer[self.table.first_slot]) > 0
        self.is_param, self.is_version = of_param & ~made, of_param & made
        self._read = names.number("in")
        self.is_module = self.table.record["kind"] == names.number("module")
        self.blocks = self._cut()
        self.across = np.empty((3, 0), dtype=np.int64)
        self._records: dict[int, StoredRecord] = {}

    def _cut(self) -> dict[BlockKey, _Block]:
        """The steps, and their rows; {} where steps are mixed, or not in order."""
        if len(self.seq) < 2 or not (np.diff(self.seq) > 0).all():
            return {}
        rows = np.flatnonzero(~self.is_param)
        step = self.table.record["step"][rows]
        begins = np.flatnonzero(np.diff(step, prepend=step[:1] - 1))
        if not (np.diff(step[begins]) > 0).all():
            return {}
        ends = np.append(begins[1:], len(rows))
        return {
            (int(step[begin]), 0): (int(rows[begin]), int(rows[end - 1]) + 1)
            for begin, end in zip(begins, ends, strict=True)
        }

    def cut(self, repeats: Mapping[BlockKey, Sequence[_Block]]) -> None:
        """Takes repeats within steps for blocks, instead of these steps.

        Args:
          repeats: by step, rows of each counted from the step's first.
        """
        blocks: dict[BlockKey, _Block] = {}
        for block, (begin, end) in self.blocks.items():
            parts = repeats.get(block)
            if parts is None:
                blocks[block] = begin, end
            for number, (first, last) in enumerate(parts or (), 1):
                blocks[block[0], number] = begin + first, begin + last
        self.blocks = blocks

    def record(self, row: int) -> StoredRecord:
        """The record in a row, decoded once: views show some again and again."""
        found = self._records.get(row)
        if found is None:
            found = self._records[row] = self.reader.record(int(self.seq[row]))
        return found

    def num_rows(self, block: BlockKey) -> int:
        begin, end = self.blocks[block]
        return end - begin

    def signatures(self) -> tuple[dict[BlockKey, bytes], dict[BlockKey, tuple[bytes, bytes]]]:
        """What tells which blocks are alike.

        Returns: of each block that could repeat a digest of all but its numbers; and of each that could if
          its sizes and what it reads of the block before were left out, a digest of that and one with sizes.
          Of repeats within a step the latter alone.
        """
        record, slot, table = self.table.record, self.table.slot, self.table
        num_records, num_slots = len(self.seq), len(slot["name"])
        within = any(repeat for _, repeat in self.blocks)
        starts = np.full(num_records, -1, dtype=np.int64)  # row at which the block of each record begins
        number = np.full(num_records, -2, dtype=np.int64)  # of the block; what stands in none is always seen
        for at, (begin, end) in enumerate(self.blocks.values()):
            starts[begin:end], number[begin:end] = begin, at
        base = self.seq[starts]
        row_of_slot = np.repeat(np.arange(num_records), np.diff(table.first_slot))
        slot_of_producer = np.repeat(np.arange(num_slots), np.diff(table.first_producer))

        producer_row = np.searchsorted(self.seq, table.producer["seq"]).clip(max=max(num_records - 1, 0))
        recorded = self.seq[producer_row] == table.producer["seq"]
        from_param = recorded & self.is_param[producer_row]
        reader_row = row_of_slot[slot_of_producer]
        inside = recorded & ~from_param & (starts[producer_row] == starts[reader_row])
        outside = ~(inside | from_param | (recorded & (starts[producer_row] < 0)))
        # What another step read first and did not make is no work of it: a constant, or a parameter.
        place = (table.first_slot[producer_row] + table.producer["slot"]).clip(max=max(num_slots - 1, 0))
        was_read = recorded & (slot["role"][place] == self._read)
        odd = np.zeros(num_records, dtype=bool)  # records of steps that cannot repeat
        odd[reader_row[outside & ~was_read]] = True
        odd[producer_row[outside & recorded]] = True
        odd |= self.is_param | self.is_version  # in the midst of a step
        made_by = np.where(inside, table.producer["seq"] - base[reader_row], -2 - table.producer["seq"])
        # What the block before made is the same by its place there, if it is one whole value.
        held = slot["content"]
        next_to = (number[producer_row] == number[reader_row] - 1) | (starts[reader_row] < 0)
        before = outside & recorded & ~was_read & next_to
        before &= (held[slot_of_producer] >= 0) & (held[slot_of_producer] == held[place])
        whole = (slot["num_producers"][slot_of_producer] == 1) & (
            (slot["role"][slot_of_producer] == self._read) | self.is_version[reader_row]
        )
        renewed = self._renewed(slot_of_producer, producer_row, place, inside)
        across = before & whole
        self.across = np.stack(
            [
                each[across].astype(np.int64)
                for each in (slot_of_producer, producer_row, table.producer["slot"])
            ]
        )
        before &= whole | renewed
        odd_across = np.zeros(num_records, dtype=bool)
        odd_across[reader_row[outside & ~was_read & ~before]] = True
        odd_across[producer_row[outside & recorded & ~was_read & ~before]] = True
        odd_across |= self.is_param
        if within:  # calls that go on beyond the repeat
            odd_across |= self.is_module & (starts >= 0) & (record["opened"] < base)
        made_across = np.where(
            before, -_BEFORE - (table.producer["seq"].astype(np.int64) - base[producer_row]), made_by
        )
        reads = self._reads(place[before], slot_of_producer[before], reader_row[before], starts)

        has_content = held >= 0
        kind = np.full(num_slots, -1, dtype=np.int64)
        if has_content.any():
            places = self.contents.places(held[has_content])
            kind[has_content] = self.contents.kind[places]
            fine = self.contents.hashed & self.contents.summarised & ~self.contents.has_data
            odd[row_of_slot[has_content][~fine[places]]] = True
            odd_across[row_of_slot[has_content][~fine[places]]] = True

        columns = [record[name] for name in _RECORD_COLUMNS] + [
            self.seq - base,
            record["opened"] - base,
            np.where(record["producer"] >= 0, record["producer"] - base, -1),
        ]
        slots = [slot[name] for name in _SLOT_COLUMNS]
        index = table.producer["slot"]
        alike: dict[BlockKey, bytes] = {}
        if not within:
            own = self._leaves(row_of_slot, starts)
            alike = self._digests(columns, [*slots, kind, own], [made_by, index], ~odd)
            if len(alike) == len(self.blocks) and _FEW * len(set(alike.values())) <= len(alike):
                return alike, {}
        else:
            columns[_RECORD_COLUMNS.index("call")], columns[_RECORD_COLUMNS.index("n")] = self._counts(number)
        # Sizes by themselves, beside all that is not one.
        plain_args = plain_arguments(record["args"], self._names)
        plain_geometry = plain_geometries(slot["geometry"], self._names)
        columns[_RECORD_COLUMNS.index("args")] = plain_args
        slots[_SLOT_COLUMNS.index("geometry")] = plain_geometry
        slots[_SLOT_COLUMNS.index("value")] = plain_values(slot["value"], self._names)
        own, fine = self._leaves(row_of_slot, starts, within=True), ~odd_across
        slots += [plain_kinds(kind, self._names), own, reads]
        plain = self._digests(columns, slots, [made_across, index], fine)
        sizes = self._digests([record["args"]], [slot["geometry"], kind], [], fine)
        return alike, {block: (plain[block], plain[block] + sizes[block]) for block in plain}

    def _reads(self, place: Numbers, slot: Numbers, row: Numbers, starts: Numbers) -> Numbers:
        """[num slots], which places in the next block read each slot, and which records that stand in none:
        another number for each set of them, 0 for none. The last block is read otherwise than those before.

        Args:
          place, slot, row: [n] each, the slot that is read, the slot that reads it, and the record of that.
        """
        in_block = starts[row] >= 0
        first = self.table.first_slot[starts[row].clip(min=0)]
        reader = np.where(
            in_block, slot - first, -1 - row
        )  # of many inputs of one record each is like another
        found = np.zeros(len(self.table.slot["name"]), dtype=np.uint64)
        np.add.at(found, place, mixed(reader.astype(np.uint64)))
        return found.view(np.int64)

    def _renewed(
        self,
        slot_of_producer: Numbers,
        producer_row: Numbers,
        place: Numbers,
        inside: npt.NDArray[np.bool_],
    ) -> npt.NDArray[np.bool_]:
        """[num producers], whether one is what a parameter was written by, named behind its new version."""
        slot, table = self.table.slot, self.table
        entry = np.arange(len(producer_row))
        second = np.flatnonzero(
            (slot["num_producers"][slot_of_producer] == 2)
            & (entry == table.first_producer[slot_of_producer] + 1)
        )
        found = np.zeros(len(producer_row), dtype=bool)
        version = second - 1
        by = table.first_producer[place[version]].clip(max=max(len(producer_row) - 1, 0))
        same = inside[version] & self.is_version[producer_row[version]]
        same &= slot["num_producers"][place[version]] == 1
        for column in table.producer.values():
            same &= column[by] == column[second]
        same &= slot["content"][slot_of_producer[second]] == slot["content"][place[version]]
        found[second] = same
        return found

    def _counts(self, number: Numbers) -> tuple[Numbers, Numbers]:
        """[num records] each, numbers of calls and of ops, counted within each repeat: calls of modules that
        return in it, and ops of calls that go on beyond it."""
        record = self.table.record
        call, n = record["call"].astype(np.int64), record["n"].astype(np.int64)
        rows = np.flatnonzero((number >= 0) & (call >= 0))
        of_module = _numbered(number[rows], record["model"][rows], record["module"][rows])
        of_call = _numbered(of_module, call[rows])
        returns = np.zeros(of_call.max(initial=-1) + 1, dtype=bool)
        returns[of_call[self.is_module[rows]]] = True
        within = returns[of_call]
        call[rows[within]] -= _least(of_module[within], call[rows[within]])
        beyond = np.concatenate((rows[~within], np.flatnonzero((number >= 0) & (record["call"] < 0))))
        names = ("model", "module", "call", "grad_phase", "kind", "op", "name")
        of_op = _numbered(number[beyond], *(record[name][beyond] for name in names))
        n[beyond] -= _least(of_op, n[beyond])
        return call, n

    def _digests(
        self,
        columns: Sequence[Numbers],
        slots: Sequence[Numbers],
        producers: Sequence[Numbers],
        fine: npt.NDArray[np.bool_],
    ) -> dict[BlockKey, bytes]:
        """Of each block whose records are all fine a digest of columns of records, slots and producers."""
        steps = [(step, block) for step, block in self.blocks.items() if fine[block[0] : block[1]].all()]
        rows = np.array([block for _, block in steps], dtype=np.int64).reshape(-1, 2)
        hashers = [xxhash.xxh3_128() for _ in steps]
        for parts, starts_within in (
            (columns, self.table.first_slot),
            (slots, self.table.first_producer),
            (producers, None),
        ):
            for part in parts:
                plain: Any = np.ascontiguousarray(part, dtype=np.int64)  # NumPy does not say it is a buffer
                whole = memoryview(plain).cast("B")
                for hasher, (begin, end) in zip(hashers, (rows * 8).tolist(), strict=True):
                    hasher.update(whole[begin:end])
            if starts_within is not None:
                rows = starts_within[rows]
        return {step: hasher.digest() for (step, _), hasher in zip(steps, hashers, strict=True)}

    def _leaves(self, row_of_slot: Numbers, starts: Numbers, *, within: bool = False) -> Numbers:
        """[num slots], which leaf each slot reads: one that this step read first by its place in the step,
        another by its content; -1 for what is no leaf.

        Args:
          within: what no parameter holds counts as read first by this step, whoever read it before.
        """
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
        if within:
            begins = starts[row_of_slot[order]]
            _, first, which = np.unique(
                np.stack([begins, slot["content"][order]]), axis=1, return_index=True, return_inverse=True
            )
            owner = np.where(of_param[owner], owner, order[first][which.reshape(-1)])
        own = ~of_param[owner] & (starts[row_of_slot[owner]] == starts[row_of_slot[order]])
        begins = self.table.first_slot[starts[row_of_slot[order]]]
        found[order] = np.where(own, owner - begins, -2 - slot["content"][order])
        return found

    def slots_of(self, steps: Sequence[BlockKey], column: Numbers) -> Numbers:
        """[num slots of a step, num steps], a column of the slots of steps that are alike."""
        begin, end = np.array([self.blocks[step] for step in steps]).T
        starts, count = self.table.first_slot[begin], self.table.first_slot[end[0]]
        found: Numbers = column[np.arange(count - starts[0])[:, None] + starts]
        return found

    def geometries_of(self, steps: Sequence[BlockKey], together: Together) -> dict[int, tuple[Any, ...]]:
        """Shape, strides and offset of slots that have others in some steps, by place in the step."""
        return {
            at: together_of(
                [(tuple(g[1]), g[2] if g[2] is None else tuple(g[2]), g[3]) for g in values], together
            )
            for at, values in self._varied(self.slots_of(steps, self.table.slot["geometry"]))
        }

    def arguments_of(self, steps: Sequence[BlockKey], together: Together) -> dict[int, tuple[Any, ...]]:
        """The arguments of the records that have others in each of some steps, by place in the step."""
        begin, end = np.array([self.blocks[step] for step in steps]).T
        args = self.table.record["args"][np.arange(end[0] - begin[0])[:, None] + begin]
        return {
            at: tuple((name, value) for name, value in together_of(values, together))
            for at, values in self._varied(args)
        }

    def _varied(self, numbers: Numbers) -> Iterator[tuple[int, list[Any]]]:
        """Rows of [n, num steps] numbers that are not all one, with the values behind them."""
        values: dict[int, Any] = {}
        for at in np.flatnonzero((numbers != numbers[:, :1]).any(1)).tolist():
            row = numbers[at].tolist()
            for number in row:
                if number not in values:
                    values[number] = value_of(self._names, number)
            yield at, [values[number] for number in row]

    def first_seq(self, block: BlockKey) -> int:
        return int(self.seq[self.blocks[block][0]])


def mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Numbers of 64 bits, well mixed: their sums tell sets of them apart (the finaliser of splitmix64)."""
    x = numbers + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _numbered(*columns: Numbers) -> Numbers:
    """Rows of several columns, numbered: equal ones alike."""
    found = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        place = np.unique(column, return_inverse=True)[1]
        found = np.unique(found * (place.max(initial=0) + 1) + place, return_inverse=True)[1]
    return found


def _least(group: Numbers, values: Numbers) -> Numbers:
    """[num rows], the smallest of the values of each one's group."""
    least = np.full(group.max(initial=-1) + 1, np.iinfo(np.int64).max)
    np.minimum.at(least, group, values)
    return least[group]


__all__ = ["BlockKey", "StepTable", "mixed"]
