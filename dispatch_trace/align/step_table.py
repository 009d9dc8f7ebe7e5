"""A rank in columns, cut into steps: which of them are alike, and in what they differ.

Two steps are alike when their records are the same but for numbers. Those that read what another step made
are not; but steps may also be alike beside their sizes (`growing`), and then read what the step before made,
whole and as it was made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from dispatch_trace.align.growing import (
    plain_arguments,
    plain_geometries,
    plain_kinds,
    together_of,
    value_of,
)
from dispatch_trace.per_step import Together
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


class StepTable:
    """One rank in columns, cut into steps.

    Attributes:
      reader: the rank.
      table, contents: its records and contents.
      seq: [num records], their numbers.
      is_param: [num records].
      blocks: by number of the step its rows; {} where steps are mixed, or not in order.
    """

    def __init__(self, reader: RankReader, names: Names) -> None:
        """
        Raises:
          TraceFormatError: a frame cannot be read.
        """
        self.reader = reader
        self._names = names
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

    def signatures(self) -> tuple[dict[int, bytes], dict[int, tuple[bytes, bytes]]]:
        """What tells which steps are alike.

        Returns: of each step that could repeat a digest of all but its numbers; and of each that could if its
          sizes and what it reads of the step before were left out, a digest of that and one with sizes.
        """
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
        # What the step before made is the same by its place there, if it is one whole value.
        number = np.cumsum(np.isin(np.arange(num_records), [begin for begin, _ in self.blocks.values()]))
        held = slot["content"]
        before = outside & recorded & ~was_read & (number[producer_row] == number[reader_row] - 1)
        before &= (slot["num_producers"][slot_of_producer] == 1) & (
            slot["role"][slot_of_producer] == self._read
        )
        before &= (held[slot_of_producer] >= 0) & (held[slot_of_producer] == held[place])
        odd_across = np.zeros(num_records, dtype=bool)
        odd_across[reader_row[outside & ~was_read & ~before]] = True
        odd_across[producer_row[outside & recorded & ~was_read & ~before]] = True
        odd_across |= self.is_param
        made_across = np.where(
            before, -_BEFORE - (table.producer["seq"].astype(np.int64) - base[producer_row]), made_by
        )

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
        own = self._leaves(row_of_slot, starts)
        alike = self._digests(columns, [*slots, kind, own], [made_by, index], ~odd)
        if len(alike) == len(self.blocks) and _FEW * len(set(alike.values())) <= len(alike):
            return alike, {}
        # Sizes by themselves, beside all that is not one.
        plain_args = plain_arguments(record["args"], self._names)
        plain_geometry = plain_geometries(slot["geometry"], self._names)
        columns[_RECORD_COLUMNS.index("args")] = plain_args
        slots[_SLOT_COLUMNS.index("geometry")] = plain_geometry
        own, fine = self._leaves(row_of_slot, starts, within=True), ~odd_across
        plain = self._digests(
            columns, [*slots, plain_kinds(kind, self._names), own], [made_across, index], fine
        )
        sizes = self._digests([record["args"]], [slot["geometry"], kind], [], fine)
        return alike, {step: (plain[step], plain[step] + sizes[step]) for step in plain}

    def _digests(
        self,
        columns: Sequence[Numbers],
        slots: Sequence[Numbers],
        producers: Sequence[Numbers],
        fine: npt.NDArray[np.bool_],
    ) -> dict[int, bytes]:
        """Of each step whose records are all fine a digest of columns of its records, slots and producers."""
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

    def slots_of(self, steps: Sequence[int], column: Numbers) -> Numbers:
        """[num slots of a step, num steps], a column of the slots of steps that are alike."""
        first_slot = self.table.first_slot
        parts = []
        for step in steps:
            begin, end = self.blocks[step]
            parts.append(column[first_slot[begin] : first_slot[end]])
        return np.stack(parts, axis=1)

    def geometries_of(self, steps: Sequence[int], together: Together) -> dict[int, tuple[Any, ...]]:
        """Shape, strides and offset of slots that have others in some steps, by place in the step."""
        return {
            at: together_of(
                [(tuple(g[1]), g[2] if g[2] is None else tuple(g[2]), g[3]) for g in values], together
            )
            for at, values in self._varied(self.slots_of(steps, self.table.slot["geometry"]))
        }

    def arguments_of(self, steps: Sequence[int], together: Together) -> dict[int, tuple[Any, ...]]:
        """The arguments of the records that have others in each of some steps, by place in the step."""
        blocks = [self.blocks[step] for step in steps]
        args = np.stack([self.table.record["args"][begin:end] for begin, end in blocks], axis=1)
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

    def sources_of(self, steps: Sequence[int]) -> dict[int, list[tuple[int, int, int]]]:
        """(step, number of the record in it, slot) of what slots read that another step made, by place."""
        first_slot, table = self.table.first_slot, self.table
        found: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for step in steps:
            begin, end = self.blocks[step]
            slots = first_slot[begin], first_slot[end]
            single = np.flatnonzero(table.slot["num_producers"][slots[0] : slots[1]] == 1)
            made = table.first_producer[slots[0] + single]
            seqs = table.producer["seq"][made]
            rows = np.searchsorted(self.seq, seqs).clip(max=len(self.seq) - 1)
            other = (self.seq[rows] == seqs) & (rows < begin) & ~self.is_param[rows]
            places = table.first_slot[rows] + table.producer["slot"][made]
            other &= table.slot["role"][places.clip(max=len(table.slot["role"]) - 1)] != self._read
            for at, row, index in zip(
                single[other].tolist(),
                rows[other].tolist(),
                table.producer["slot"][made][other].tolist(),
                strict=True,
            ):
                source = int(table.record["step"][row])
                found[at].append((source, int(self.seq[row]) - self.first_seq(source), index))
        return found

    def first_seq(self, step: int) -> int:
        return int(self.seq[self.blocks[step][0]])


__all__ = ["StepTable"]
