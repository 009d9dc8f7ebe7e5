"""Records that share bodies, encoded by NumPy: the cheap half of `records`.

A recording notes the same few hundred bodies over and over (`schema.NotedRow`). Each of them is encoded once
per frame, and the columns of the rows are gathered from it, with what the facts say of each slot put in its
place. A record that shares nothing is a body with one row. The frame is an ordinary one: a reader cannot
tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from dispatch_trace.schema import SLOT_LEAF, NotedRow, RawRecord, RawSlot
from dispatch_trace.store.columns import Column, Interner, decode_column, int_column
from dispatch_trace.store.records import (
    LEAF,
    ContentRow,
    encode_records,
    frame_of,
    record_table,
    slot_table,
)

_Numbers = npt.NDArray[np.int64]
_SITE_STRINGS = {"model": "model", "grad_phase": "phase", "module": "path"}
_SITE_NUMBERS = ("step", "call")


def encode_batch(
    records: Sequence[RawRecord | NotedRow],
    contents: Sequence[ContentRow],
    sketch: tuple[int, int, int] | None,
) -> bytes:
    """One `records` frame of whatever was put; arguments as for `encode_records`."""
    rows = [each for each in records if type(each) is tuple]
    if not rows:
        return encode_records(records, contents, sketch)  # type: ignore[arg-type]
    at = np.array([type(each) is tuple for each in records]).nonzero()[0]
    bodies: list[Any] = [each[0] if type(each) is tuple else each for each in records]
    seqs: list[int] = [each[1] if type(each) is tuple else each.seq for each in records]  # type: ignore[union-attr]
    strings, values = Interner(), Interner()
    distinct, body_of = _distinct(bodies)
    table = _Columns(record_table(distinct, strings, values), len(distinct), body_of)
    lengths = np.array([len(body.slots) for body in distinct])
    starts = np.concatenate(([0], np.cumsum(lengths)))
    slots = list(chain.from_iterable(body.slots for body in distinct))
    slot_of = _runs(starts[body_of], lengths[body_of])
    slot_columns = _Columns(slot_table(slots, strings, values), len(slots), slot_of)

    table.put("seq", None, seqs)
    _put_sites(table, at, rows, distinct, body_of, strings)
    producers: Iterable[tuple[int, int]] = chain.from_iterable(
        chain.from_iterable(slot.producers for slot in body.slots) for body in bodies
    )
    if any(row[6] for row in rows):
        producers = _put_facts(table, slot_columns, at, rows, bodies, lengths[body_of])
    return frame_of(
        seqs,
        len(slot_of),
        strings=strings,
        values=values,
        record=table.encoded(),
        slot=slot_columns.encoded(),
        producers=list(producers),
        contents=contents,
        sketch=sketch,
    )


class _Columns:
    """Columns of a table whose row i is row `of[i]` of another, until something else is put there."""

    def __init__(self, table: dict[str, Column], num_rows: int, of: _Numbers) -> None:
        self._table = table
        self._num_rows = num_rows
        self._of = of
        self._changed: dict[str, _Numbers] = {}

    def put(self, name: str, at: _Numbers | None, numbers: Sequence[int] | _Numbers) -> None:
        """Puts numbers into a column, at these rows or (None) at all."""
        if at is None or len(at) == len(self._of):
            self._changed[name] = np.asarray(numbers, dtype=np.int64)
            return
        column = self._changed.get(name)
        if column is None:
            column = self._changed[name] = self._gathered(name)
        column[at] = numbers

    def add(self, name: str, at: _Numbers, numbers: _Numbers) -> None:
        """Adds numbers to those of a column at these rows."""
        self.put(name, at, self._gathered(name)[at] + numbers)

    def _gathered(self, name: str) -> _Numbers:
        column: _Numbers = np.array(decode_column(self._table[name], self._num_rows), dtype=np.int64)[
            self._of
        ]
        return column

    def encoded(self) -> dict[str, Column]:
        return {
            name: int_column(self._changed[name])
            if name in self._changed
            else (column if column[0] == "const" else int_column(self._gathered(name)))
            for name, column in self._table.items()
        }


def _put_sites(
    table: _Columns,
    at: _Numbers,
    rows: Sequence[NotedRow],
    distinct: Sequence[RawRecord],
    body_of: _Numbers,
    strings: Interner,
) -> None:
    """Whose the rows are, their numbers and their lines."""
    seqs, sites, ns, threads, sources = (_place(rows, i) for i in range(1, 6))
    calls, call_of = _distinct(sites)
    for column, attribute in _SITE_STRINGS.items():
        numbers = [strings.number(text) for text in map(attrgetter(attribute), calls)]
        table.put(column, at, np.array(numbers)[call_of])
    for column in _SITE_NUMBERS:
        table.put(column, at, np.array([getattr(call, column) for call in calls])[call_of])
    is_module = np.array([body.kind == "module" for body in distinct])[body_of[at]]
    opened = np.array([call.opened for call in calls])[call_of]
    table.put("opened", at, np.where(is_module, opened, np.array(seqs)))
    table.put("n", at, ns)
    table.put("thread", at, threads)
    if any(sources):
        lines = Interner()
        line_of = np.array([lines.number(source or ("", -1)) for source in sources])
        files = np.array([strings.number(file) for file, _ in lines.entries])
        table.put("source_file", at, files[line_of])
        table.put("source_line", at, np.array([line for _, line in lines.entries])[line_of])


def _put_facts(
    table: _Columns,
    slot_columns: _Columns,
    at: _Numbers,
    rows: Sequence[NotedRow],
    bodies: Sequence[RawRecord],
    lengths: _Numbers,
) -> list[tuple[int, int]]:
    """What the rows say of their slots. Returns the producers of all slots."""
    starts = np.cumsum(lengths) - lengths
    slot_at = _runs(starts[at], lengths[at])
    facts = list(chain.from_iterable(row[6] or () for row in rows))
    storages, num_bytes, alignments, producers, contents, flags = (_place(facts, i) for i in range(6))
    slot_columns.put("storage", slot_at, storages)
    slot_columns.put("storage_bytes", slot_at, num_bytes)
    slot_columns.put("alignment", slot_at, alignments)
    slot_columns.put("content", slot_at, [-1 if each is None else each.id for each in contents])
    slot_columns.put("num_producers", slot_at, list(map(len, producers)))
    slot_columns.add("flags", slot_at, (np.array(flags) & SLOT_LEAF) * LEAF)
    first = [(i, _first_producer(row)) for i, row in zip(at, rows, strict=True) if row[0].kind == "module"]
    if first:
        table.put("producer", np.array([i for i, _ in first]), [producer for _, producer in first])
    if len(rows) == len(bodies):
        return list(chain.from_iterable(producers))
    found: list[tuple[int, int]] = []
    noted = dict(zip(at.tolist(), rows, strict=True))
    for position, body in enumerate(bodies):
        row = noted.get(position)
        each: Iterable[Any] = body.slots if row is None else row[6] or ()
        for slot in each:
            found += slot.producers if type(slot) is RawSlot else slot[3]
    return found


def _place(tuples: Sequence[tuple[Any, ...]], i: int) -> list[Any]:
    """What stands in one place of each tuple.

    Not `zip(*tuples)`: it makes an iterator of each, and once there are many new objects the garbage
    collector walks through all that the program holds, and holds it up.
    """
    return list(map(itemgetter(i), tuples))


def _first_producer(row: NotedRow) -> int:
    """The record that made what a module returned first, -1 where none is known."""
    for slot, facts in zip(row[0].slots, row[6] or (), strict=True):
        if slot.role == "out" and facts[3]:
            return facts[3][-1][0]
    return -1


def _distinct(objects: Sequence[Any]) -> tuple[list[Any], _Numbers]:
    """The distinct objects, by identity, and for each position which of them stands there."""
    by_id = {id(each): each for each in objects}
    numbers = {key: number for number, key in enumerate(by_id)}
    return list(by_id.values()), np.array(list(map(numbers.__getitem__, map(id, objects))))


def _runs(starts: _Numbers, lengths: _Numbers) -> _Numbers:
    """start, start + 1, … for each run, one run after the other."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(total)
