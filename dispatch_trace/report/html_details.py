"""What the HTML report shows of two tensors: histograms, where the error lies, the worst elements.

Only where both traces keep data, and only for the pairs that matter: findings, what they read and feed, and
those furthest beyond their noise band. A page stays small and is made in bounded time: at most
`MAX_PAIRS` pairs and `MAX_TOTAL` elements read.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dispatch_trace.align.content import Comparer
from dispatch_trace.align.lens import STRIDE
from dispatch_trace.report.html_rows import Readers, Rows

Array: TypeAlias = npt.NDArray[Any]

MAX_PAIRS = 160
MAX_ELEMENTS = 1 << 24
MAX_TOTAL = 1 << 27
BINS = 48
MAP_ROWS, MAP_COLUMNS = 40, 72
WORST = 8
# Levels of the error map: decades below the largest error, as letters.
MAP_LEVELS, MAP_DECADES = 20, 4.0


def details(rows: Rows, ref: Readers, target: Readers) -> dict[int, dict[str, Any]]:
    """By row what its tensors look like; rows without data on both sides are left out."""
    found: dict[int, dict[str, Any]] = {}
    comparers = {rank: Comparer(ref[rank], target[rank]) for rank in ref.keys() & target.keys()}
    total = 0
    for number in _wanted(rows):
        first, second = rows.sides(number)
        if first is None or second is None or first[1] is None or second[1] is None:
            continue
        contents = first[1].content, second[1].content
        size = math.prod(first[1].shape)
        comparer = comparers.get(second[0].rank)
        if comparer is None or min(contents) < 0 or not 0 < size <= MAX_ELEMENTS or total + size > MAX_TOTAL:
            continue
        a, b = (
            comparer.array(side, content % STRIDE)
            for side, content in zip((True, False), contents, strict=True)
        )
        if a is None or b is None or a.size == 0 or b.size == 0 or b.size > MAX_ELEMENTS:
            continue
        total += a.size
        found[number] = {"slot": second[1].name, "ref_seq": first[0].seq, **tensors(a, b)}
        if len(found) >= MAX_PAIRS:
            break
    return found


def tensors(ref: Array, target: Array) -> dict[str, Any]:
    """What two tensors look like side by side.

    Args:
      ref, target: [*shape]; of complex ones the modulus is shown.
    Returns: "histogram", and where the sizes agree "difference", "map", "worst" and "largest".
    """
    a, b = _real(ref), _real(target)
    found: dict[str, Any] = {"histogram": _histogram(a, b)}
    if a.size != b.size:
        return found
    b = b.reshape(a.shape)
    with np.errstate(invalid="ignore", over="ignore"):
        delta = b - a
    delta = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, delta)
    finite = np.isfinite(delta)
    found["largest"] = float(np.abs(delta[finite]).max()) if finite.any() else 0.0
    found["nonfinite"] = int((~finite).sum())
    found["equal"] = int((delta == 0).sum())
    found["numel"] = int(delta.size)
    found["difference"] = _histogram(delta)
    found["map"] = _error_map(delta)
    found["worst"] = _worst(a, b, delta)
    return found


def _wanted(rows: Rows) -> list[int]:
    """Rows by how much a reader wants to see them."""
    order: dict[int, None] = {}
    named = [row for row in rows.finding_rows if row is not None]
    order.update(dict.fromkeys(named[: MAX_PAIRS // 4]))
    for row in list(order):
        order.update(dict.fromkeys(at for _, at in rows.links(row)))
        order.update(dict.fromkeys(range(max(0, row - 6), min(len(rows.pairs), row + 12))))

    def excess(number: int) -> float:
        pair = rows.pairs[number]
        if not pair.error:
            return 0.0
        return pair.error / max(pair.band or 1.0, 1e-12)

    worst = sorted((n for n in range(len(rows.pairs)) if excess(n) > 0), key=excess, reverse=True)
    order.update(dict.fromkeys(worst[: MAX_PAIRS * 2]))
    return list(order)


def _real(values: Array) -> npt.NDArray[np.float64]:
    return (np.abs(values) if np.iscomplexobj(values) else values).astype(np.float64)


def _histogram(*arrays: Array) -> dict[str, Any] | None:
    """Counts over common bins; what is not finite is left out (statistics count it)."""
    finite = [array[np.isfinite(array)] for array in arrays]
    held = [array for array in finite if array.size]
    if not held:
        return None
    low, high = min(float(a.min()) for a in held), max(float(a.max()) for a in held)
    if not math.isfinite(high - low):
        return None
    if low == high:
        pad = abs(low) / 2 or 0.5
        low, high = low - pad, high + pad
    try:
        counts = [np.histogram(array, bins=BINS, range=(low, high))[0].tolist() for array in finite]
    except ValueError:  # a range so narrow that its bins would have no width
        return None
    return {"low": low, "high": high, "counts": counts}


def _error_map(delta: Array) -> dict[str, Any]:
    """The largest |difference| by block of rows and columns, columns being the last dim.

    Returns: "rows", "columns": of the tensor; "leading": its other dims; "cells": one text a row of blocks,
      a letter a block: "." no difference, "!" not finite on one side, "a" to "t" from 1e-4 of the largest to
      the largest, in even steps of the logarithm.
    """
    leading = delta.shape[:-1] if delta.ndim > 1 else ()
    table = np.abs(delta).reshape(-1, delta.shape[-1] if delta.ndim else 1)
    bad = ~np.isfinite(table)
    blocks = [_blocks(np.where(bad, 0.0, table)), _blocks(bad.astype(np.float64))]
    top = float(blocks[0].max())
    with np.errstate(divide="ignore"):
        level = np.log10(blocks[0] / top) if top else np.full(blocks[0].shape, -np.inf)
    scaled = np.clip(np.ceil((np.maximum(level, -MAP_DECADES) / MAP_DECADES + 1) * MAP_LEVELS), 1, MAP_LEVELS)
    letters = np.array([chr(ord("a") + i) for i in range(MAP_LEVELS)])[scaled.astype(int) - 1]
    letters = np.where(blocks[0] == 0, ".", letters)
    letters = np.where(blocks[1] > 0, "!", letters)
    return {
        "rows": table.shape[0],
        "columns": table.shape[1],
        "leading": list(leading),
        "cells": ["".join(line) for line in letters],
    }


def _blocks(table: Array) -> Array:
    """The maximum of every block of a table, [at most MAP_ROWS, at most MAP_COLUMNS]."""
    for axis, most in ((0, MAP_ROWS), (1, MAP_COLUMNS)):
        length = table.shape[axis]
        if length > most:
            table = np.maximum.reduceat(table, np.arange(most) * length // most, axis=axis)
    return table


def _worst(ref: Array, target: Array, delta: Array) -> list[list[Any]]:
    """[index, ref, target, difference] of the elements that differ most, non-finite ones first."""
    size = np.where(np.isfinite(delta), np.abs(delta), np.inf).reshape(-1)
    count = min(WORST, int((size > 0).sum()))
    if not count:
        return []
    at = np.argpartition(size, -count)[-count:]
    at = at[np.argsort(-size[at], kind="stable")]
    found = []
    for flat in at:
        index = np.unravel_index(int(flat), delta.shape)
        values = [float(x.reshape(-1)[flat]) for x in (ref, target, delta)]
        found.append([[int(i) for i in index], *values])
    return found
