"""Repeats within one step: a module that is called again and again, or a program that goes round a loop.

The records of such a step are alike at a distance, the period. Where they are, the step is cut into repeats
of one period each, where as few module calls as can be are open: a call stands in one repeat, or around all.

Who lines two traces up by one repeat takes all others to be lined up the same way. That is so where the
whole step is the same on both sides, record for record (`same_form`): there nothing has to be searched for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dispatch_trace.align.canon import dtype_class
from dispatch_trace.align.growing import plain_arguments, plain_geometries, value_of
from dispatch_trace.align.step_table import BlockKey, StepTable, mixed
from dispatch_trace.store.table import Names, Numbers

# A period has to come so many times in a row,
MIN_REPEATS = 6
# and steps of fewer records are not worth a look.
MIN_RECORDS = 64
# Distances at which records come again, that are tried as the period.
_MAX_TRIED = 24
_MAX_APART = 4
# The shortest period counts that covers so much of what the best one does.
_COVERED = 0.9

_FORM = ("kind", "model", "grad_phase", "module", "op", "overload", "name", "note", "args", "call", "n")
_ALIKE = ("kind", "model", "grad_phase", "module", "op", "overload", "name", "note", "flags", "num_slots")


def same_form(ref: StepTable, target: StepTable, block: BlockKey, names: Names) -> bool:
    """Whether a step has the same records on both sides, by all that aligning asks of them."""
    forms = [_form(side, block, names) for side in (ref, target)]
    return all(map(np.array_equal, *forms))


def _form(side: StepTable, block: BlockKey, names: Names) -> list[Numbers]:
    (begin, end), table = side.blocks[block], side.table
    slots = slice(table.first_slot[begin], table.first_slot[end])
    made = slice(table.first_producer[slots.start], table.first_producer[slots.stop])
    base = side.seq[begin]
    return [
        side.seq[begin:end] - base,
        *(table.record[name][begin:end] for name in (*_FORM, "num_slots", "flags")),
        table.record["opened"][begin:end] - base,
        *(table.slot[name][slots] for name in ("name", "role", "flags", "num_producers")),
        _types(table.slot["geometry"][slots], names),
        table.producer["seq"][made] - base,
        table.producer["slot"][made],
    ]


def _types(geometries: Numbers, names: Names) -> Numbers:
    """Numbers of geometries of which the kind of dtype and the shape count."""
    distinct, place = np.unique(geometries, return_inverse=True)
    found = []
    for number in distinct.tolist():
        dtype, shape, *_ = value_of(names, number)
        found.append(names.number(repr((dtype_class(dtype), shape))))
    return np.array(found, dtype=np.int64)[place]


def repeats_of(side: StepTable, block: BlockKey, names: Names) -> list[tuple[int, int]]:
    """The repeats that a step consists of, as rows of their first records and of the first behind
    them, counted from the step's first."""
    begin, end = side.blocks[block]
    if end - begin < MIN_RECORDS:
        return []
    rows = _alike(side, begin, end, names)
    period = _period(rows)
    if not period:
        return []
    depth = _depth(side, begin, end)
    found: list[tuple[int, int]] = []
    for first, last in _runs(rows, period):  # alike to the record a period further on, up to the last
        least = first + int(np.argmin(depth[first : first + period]))
        starts = range(least, last + 1, period)
        found += [(at, at + period) for at in starts]
    return found


def _alike(side: StepTable, begin: int, end: int, names: Names) -> Numbers:
    """[num records], a number for each record of a step by what it does, beside its sizes."""
    table = side.table
    columns = [table.record[name][begin:end] for name in _ALIKE]
    columns.append(plain_arguments(table.record["args"][begin:end], names))
    slots = slice(table.first_slot[begin], table.first_slot[end])
    starts = table.first_slot[begin:end] - slots.start
    found = np.zeros(end - begin, dtype=np.uint64)
    for each in (table.slot["name"][slots], plain_geometries(table.slot["geometry"][slots], names)):
        parts = mixed(each.astype(np.uint64))
        sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(parts, dtype=np.uint64)))
        found = mixed(found + (sums[table.first_slot[begin + 1 : end + 1] - slots.start] - sums[starts]))
    for column in columns:
        found = mixed(found + column.astype(np.uint64))
    place: Any = np.unique(found, return_inverse=True)[1]
    return np.asarray(place, dtype=np.int64)


def _period(rows: Numbers) -> int:
    """After how many rows most of them come again; 0 where they do not."""
    order = np.argsort(rows, kind="stable")
    tried: dict[int, int] = {}
    for apart in range(1, _MAX_APART + 1):
        same = rows[order[apart:]] == rows[order[:-apart]]
        distances, counts = np.unique((order[apart:] - order[:-apart])[same], return_counts=True)
        for distance, count in zip(distances.tolist(), counts.tolist(), strict=True):
            tried[distance] = max(tried.get(distance, 0), count * distance)
    likely = sorted(sorted(tried, key=tried.__getitem__)[-_MAX_TRIED:])
    covered = {period: sum(last + period - first for first, last in _runs(rows, period)) for period in likely}
    most = max(covered.values(), default=0)
    return next((p for p in likely if covered[p] >= _COVERED * most > 0), 0)


def _runs(rows: Numbers, period: int) -> list[tuple[int, int]]:
    """Where each row is that a period further on, for enough periods: the first row, and the first that is
    not."""
    same = np.concatenate(([False], rows[period:] == rows[:-period], [False]))
    edges = np.flatnonzero(np.diff(same.astype(np.int8)))
    runs = edges.reshape(-1, 2)
    return [(first, last) for first, last in runs.tolist() if last - first >= (MIN_REPEATS - 1) * period]


def _depth(side: StepTable, begin: int, end: int) -> Numbers:
    """[num records + 1], how many module calls go on where each record begins."""
    rows = begin + np.flatnonzero(side.is_module[begin:end])
    opened = np.searchsorted(side.seq, side.table.record["opened"][rows]).clip(min=begin)
    changes = np.zeros(end - begin + 2, dtype=np.int64)
    np.add.at(changes, opened - begin + 1, 1)
    np.add.at(changes, rows - begin + 1, -1)
    return np.cumsum(changes)[:-1]


__all__ = ["repeats_of", "same_form"]
