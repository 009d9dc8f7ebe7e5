"""Whether a difference is what rounding to a grid does: quantisation noise, to be propagated, not a defect.

Values that were rounded to a grid of step s differ from the originals by at most s/2, evenly: RMSE/step is
1/sqrt(12) = 0.289. With data the step is read off the values themselves, row by row; from statistics it is
inferred, and only what is typical is granted.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from dispatch_trace.align.canon import dtype_class
from dispatch_trace.align.content import Difference
from dispatch_trace.align.pairs import Link, Pairing
from dispatch_trace.metrics import unit_roundoff
from dispatch_trace.sketch import cosine

Array = npt.NDArray[Any]

HEALTHY = 1 / math.sqrt(12)
# 3 dB below what the step promises is flagged (BLAME.md section 5).
WORST_RATIO = HEALTHY * 10 ** (3 / 20)
MAX_LEVELS = 1 << 10
_GROUPS = (0, 256, 128, 64, 32)


def quantisation_noise(pairing: Pairing, link: Link, difference: Difference) -> str | None:
    """What the grid is, in words, where a target tensor is the reference's rounded to one; else None."""
    if not difference.known or difference.nonfinite or not 0 < difference.rho < 0.5:
        return None
    ref_slot, target_slot = pairing.ref.slot(link.ref), pairing.target.slot(link.target)
    if dtype_class(ref_slot.dtype) != "f" or dtype_class(target_slot.dtype) != "f":
        return None
    comparer = pairing.comparer
    if link.ref_content < 0 or link.target_content < 0:
        return None
    if difference.method == "data":
        ref, target = comparer.array(True, link.ref_content), comparer.array(False, link.target_content)
        if ref is None or target is None or ref.size != target.size or target.ndim < 2:
            return None
        return grid_of(ref.reshape(target.shape), target, unit_roundoff(target_slot.dtype))
    return _from_statistics(pairing, link, difference)


def grid_of(ref: Array, target: Array, roundoff: float) -> str | None:
    """The grid that explains target - ref, in words.

    Args:
      ref, target: [*shape] with at least two dims, same shape.
      roundoff: of the target's dtype: how exactly grid points are met.
    """
    matrix = target.reshape(target.shape[0], -1).astype(np.float64)
    original = ref.reshape(matrix.shape).astype(np.float64)
    for name, view in (("row", lambda x: x), ("column", lambda x: x.T)):
        values, wanted = view(matrix), view(original)
        for group in _GROUPS:
            if group and (values.shape[1] % group or values.shape[1] == group):
                continue
            width = group or values.shape[1]
            found = _rows_on_grid(values.reshape(-1, width), wanted.reshape(-1, width), roundoff)
            if found is not None:
                what = f"group of {group}" if group else name
                return f"on a grid per {what}, RMSE/step {found:.3f}"
    return None


def _rows_on_grid(values: Array, wanted: Array, roundoff: float) -> float | None:
    """RMSE/step where every row lies on a grid of its own and is the wanted row rounded to it."""
    if values.shape[1] < 8:
        return None
    total, count = 0.0, 0
    for row, original in zip(values, wanted, strict=True):
        levels = np.unique(row)
        if levels.size < 2:
            if np.abs(row - original).max(initial=0.0) > 0 and levels.size == 1 and row[0] != 0:
                return None
            continue
        top = float(np.abs(levels).max())
        gaps = np.diff(levels)
        gaps = gaps[gaps > 8 * roundoff * top]
        if not gaps.size or levels.size > MAX_LEVELS:
            return None
        step = float(gaps.min())
        codes = (row - levels[0]) / step
        nearest = np.rint(codes)
        span = float(nearest.max())
        if span > MAX_LEVELS or span < 1:
            return None
        step = float(np.dot(row - levels[0], nearest) / np.dot(nearest, nearest))  # best fit
        off = np.abs((row - levels[0]) - nearest * step)
        if float(off.max()) > 0.02 * step + 8 * roundoff * top:
            return None
        error = row - original
        if float(np.abs(error).max()) > 1.5 * step:
            return None
        total += float(np.dot(error, error)) / step**2
        count += row.size
    if not count:
        return None
    ratio = math.sqrt(total / count)
    return ratio if ratio <= WORST_RATIO else None


def _from_statistics(pairing: Pairing, link: Link, difference: Difference) -> str | None:
    """From norms, sketches and the count of zeros: a grid shows as exact zeros where the original has none."""
    ref = pairing.ref.reader.content(link.ref_content)
    target = pairing.target.reader.content(link.target_content)
    n = int(target.stats.get("n") or 0)
    square = ref.stats.get("sq_sum")
    if n < 256 or not square:
        return None
    rms = math.sqrt(float(square) / n)
    step = difference.rho * rms / HEALTHY  # if the difference is quantisation noise
    extra = int(target.stats.get("zeros") or 0) - int(ref.stats.get("zeros") or 0)
    expected = n * min(0.4 * step / rms, 0.9)  # density of a normal distribution at 0, times the step
    if not 0.3 * expected <= extra <= 4.0 * expected:
        return None
    a, b = pairing.ref.reader.sketch(link.ref_content), pairing.target.reader.sketch(link.target_content)
    if a is None or b is None:
        return None
    # Rounding is no bias: what is added stands at right angles to the original.
    bias = math.sqrt(float(np.dot(b, b)) / max(float(np.dot(a, a)), 1e-300)) * cosine(a, b) - 1.0
    if abs(bias) > 0.5 * difference.rho:
        return None
    return f"as if on a grid, step {step:.3g} (inferred from statistics)"
