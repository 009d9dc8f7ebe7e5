"""Records that share bodies, encoded by NumPy: the cheap half of `records`.

A recording of shapes notes the same few hundred bodies over and over (`schema.NotedRow`). Each of them is
encoded once per frame, and the columns of the rows are gathered from it. The frame is an ordinary one: a
reader cannot tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from dispatch_trace.schema import NotedRow, RawRecord
from dispatch_trace.store.columns import Column, Interner, decode_column, int_column
from dispatch_trace.store.records import ContentRow, encode_records, frame_of, record_table, slot_table

_Numbers = npt.NDArray[np.int64]
_SITE_STRINGS = {"model": "model", "grad_phase": "phase", "module": "path"}
_SITE_NUMBERS = ("step", "call")


def encode_batch(
    records: Sequence[RawRecord | NotedRow],
    contents: Sequence[ContentRow],
    sketch: tuple[int, int, int] | None,
) -> bytes:
    """One `records` frame of whatever was put; arguments as for `encode_records`."""
    rows = [each for each in records if isinstance(each, tuple)]
    if len(rows) == len(records) and not contents:
        return encode_noted(rows)
    return encode_records([whole_record(r) if isinstance(r, tuple) else r for r in records], contents, sketch)


def whole_record(row: NotedRow) -> RawRecord:
    """The record that a row stands for; arguments and slots stay shared."""
    body, seq, site, n, thread = row
    return RawRecord(
        seq,
        body.kind,
        step=site.step,
        model=site.model,
        grad_phase=site.phase,
        module=site.path,
        call=site.call,
        op=body.op,
        n=n,
        overload=body.overload,
        args=body.args,
        slots=body.slots,
        light=body.light,
        random=body.random,
        source=body.source,
        opened=site.opened if body.kind == "module" else -1,
        thread=thread,
        note=body.note,
    )


def encode_noted(rows: Sequence[NotedRow]) -> bytes:
    """One `records` frame of rows, in the order in which they shall be read."""
    strings, values = Interner(), Interner()
    bodies, seqs, sites, ns, threads = zip(*rows, strict=True)
    distinct, body_of = _distinct(bodies)
    table = {
        name: _spread(column, len(distinct), body_of)
        for name, column in record_table(distinct, strings, values).items()
    }
    calls, call_of = _distinct(sites)
    for column, attribute in _SITE_STRINGS.items():
        numbers = [strings.number(text) for text in map(attrgetter(attribute), calls)]
        table[column] = int_column(np.array(numbers)[call_of])
    for column in _SITE_NUMBERS:
        table[column] = int_column(np.array([getattr(call, column) for call in calls])[call_of])
    is_module = np.array([body.kind == "module" for body in distinct])[body_of]
    opened = np.array([call.opened for call in calls])[call_of]
    table["opened"] = int_column(np.where(is_module, opened, np.array(seqs)))
    table |= {"seq": int_column(seqs), "n": int_column(ns), "thread": int_column(threads)}

    lengths = np.array([len(body.slots) for body in distinct])
    slot_of = _runs(np.concatenate(([0], np.cumsum(lengths)))[body_of], lengths[body_of])
    slots = list(chain.from_iterable(body.slots for body in distinct))
    slot_columns = {
        name: _spread(column, len(slots), slot_of)
        for name, column in slot_table(slots, strings, values).items()
    }
    return frame_of(seqs, len(slot_of), strings=strings, values=values, record=table, slot=slot_columns)


def _distinct(objects: Sequence[Any]) -> tuple[list[Any], _Numbers]:
    """The distinct objects, by identity, and for each position which of them stands there."""
    by_id = {id(each): each for each in objects}
    numbers = {key: number for number, key in enumerate(by_id)}
    return list(by_id.values()), np.array(list(map(numbers.__getitem__, map(id, objects))))


def _spread(column: Column, num_rows: int, at: _Numbers) -> Column:
    """A column of numbers whose row i is row `at[i]` of another."""
    if column[0] == "const":
        return column
    return int_column(np.array(decode_column(column, num_rows))[at])


def _runs(starts: _Numbers, lengths: _Numbers) -> _Numbers:
    """start, start + 1, … for each run, one run after the other."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(total)
