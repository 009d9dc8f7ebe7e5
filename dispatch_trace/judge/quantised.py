"""Whether a difference is what rounding to a grid does: quantisation noise, to be propagated, not a defect.

Values that were rounded to a grid of step s differ from the originals by at most s/2, evenly: RMSE/step is
1/sqrt(12) = 0.289. With data the step is read off the values themselves, row by row; from statistics it is
inferred, and only what is typical is granted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dispatch_trace.align.canon import dtype_class
from dispatch_trace.align.content import Comparer, Difference
from dispatch_trace.align.graph import Value, slot_numel
from dispatch_trace.align.pairs import Link, Pairing
from dispatch_trace.metrics import unit_roundoff
from dispatch_trace.per_step import Together, of_step, texts
from dispatch_trace.schema import StoredContent, StoredRecord
from dispatch_trace.sketch import alike, cosine

Array = npt.NDArray[Any]

HEALTHY = 1 / math.sqrt(12)
# 3 dB below what the step promises is flagged (BLAME.md section 5).
WORST_RATIO = HEALTHY * 10 ** (3 / 20)
MAX_LEVELS = 1 << 10
_GROUPS = (0, 256, 128, 64, 32)
# Share of a difference that may point along the original; scaling a weight by 1.01 is all along it.
_MAX_BIAS = 0.5
# An even distribution has 0.72 of the zeros that a normal one has; a row that is zero throughout adds fewer.
_FEWEST_ZEROS = 0.6
# Log of the chance that any numbers lie as near to the points of a grid: above this it says nothing.
_LOG_CHANCE = math.log(1e-6)
_SYMMETRIC_CODES = (7, 8, 15, 16, 31, 63, 127, 128, 255)


def quantisation_noise(pairing: Pairing, link: Link, difference: Difference) -> str | None:
    """What the grid is, in words, where a target tensor is the reference's rounded to one; else None."""
    if link.ref_content < 0 or link.target_content < 0:
        return None
    if pairing.comparer.layout(link.ref_content) is not None:
        return None
    return grid_between(pairing.comparer, link.ref_content, link.target_content, difference)


def grid_between(
    comparer: Comparer, ref_content: int, target_content: int, difference: Difference
) -> str | None:
    """The same of two contents, and how they differ."""
    if not difference.known or difference.nonfinite or not 0 < difference.rho < 0.5:
        return None
    steps = comparer.ref.together(ref_content) or comparer.target.together(target_content)
    if steps is not None:
        return _grids(comparer, ref_content, target_content, difference, steps)
    a, b = comparer.ref.content(ref_content), comparer.target.content(target_content)
    if dtype_class(a.dtype) != "f" or dtype_class(b.dtype) != "f":
        return None
    if difference.method == "data":
        ref, target = comparer.array(True, ref_content), comparer.array(False, target_content)
        if ref is None or target is None or ref.size != target.size or target.ndim < 2:
            return None
        return grid_of(ref.reshape(target.shape), target, unit_roundoff(b.dtype))
    sketches = comparer.ref.sketch(ref_content), comparer.target.sketch(target_content)
    return _from_statistics(a, b, sketches, difference)


def _grids(
    comparer: Comparer, ref_content: int, target_content: int, difference: Difference, steps: Together
) -> str | None:
    """`grid_between` of contents of several steps, which have no data."""
    ours, theirs = comparer.ref.per_step(ref_content, steps), comparer.target.per_step(target_content, steps)
    if dtype_class(ours.first.dtype) != "f" or dtype_class(theirs.first.dtype) != "f":
        return None
    found = [
        _from_statistics(*contents, sketches, replace(difference, rho=of_step(difference.rho, at)))
        for at, (contents, sketches) in enumerate(
            zip(
                zip(ours.contents(), theirs.contents(), strict=True),
                zip(ours.sketches(), theirs.sketches(), strict=True),
                strict=True,
            )
        )
    ]
    return texts(found) if steps.decide(np.array([text is not None for text in found])) else None


def grid_of(ref: Array, target: Array, roundoff: float) -> str | None:
    """The grid that explains target - ref, in words.

    Args:
      ref, target: [*shape] with at least two dims, same shape.
      roundoff: of the target's dtype: how exactly grid points are met.
    """
    matrix = target.reshape(target.shape[0], -1).astype(np.float64)
    original = ref.reshape(matrix.shape).astype(np.float64)
    if _is_biased(matrix - original, original):
        return None
    for name, values, wanted in (("row", matrix, original), ("column", matrix.T, original.T)):
        for group in _GROUPS:
            if group and (values.shape[1] % group or values.shape[1] == group):
                continue
            width = group or values.shape[1]
            found = _rows_on_grid(values.reshape(-1, width), wanted.reshape(-1, width), roundoff)
            if found is not None:
                what = f"group of {group}" if group else name
                return f"on a grid per {what}, RMSE/step {found:.3f}"
    return None


def _is_biased(error: Array, original: Array) -> bool:
    """Whether a difference goes along with what it is added to: rounding stands at right angles to it."""
    square, along = float((original**2).sum()), float((error * original).sum())
    return abs(along) > _MAX_BIAS * math.sqrt(float((error**2).sum()) * square)


def _rows_on_grid(values: Array, wanted: Array, roundoff: float) -> float | None:
    """RMSE/step where every row lies on a grid of its own and is the wanted row rounded to it."""
    if values.shape[1] < 8:
        return None
    total, count, chance = 0.0, 0, 0.0
    for row, original in zip(values, wanted, strict=True):
        if np.array_equal(row, original):
            continue
        found = _step_of(row, roundoff)
        error = row - original
        if found is None or float(np.abs(error).max()) > 1.5 * found[0]:
            return None
        step = found[0]
        chance += found[1]
        total += float(np.dot(error, error)) / step**2
        count += row.size
    if not count or chance > _LOG_CHANCE:
        return None
    ratio = math.sqrt(total / count)
    return ratio if ratio <= WORST_RATIO else None


def _step_of(row: Array, roundoff: float) -> tuple[float, float] | None:
    """The step of the grid that all values of a row lie on: the largest that fits, None where none does.

    With it comes the log of the chance that any numbers lie that near to its points.

    Tried are fractions of the smallest gap between values, and the steps that a symmetric quantiser of a few
    bits takes for this range.
    """
    levels = np.unique(row)
    top = float(np.abs(levels).max())
    gaps = np.diff(levels)
    gaps = gaps[gaps > 8 * roundoff * top]
    if not gaps.size:
        return None
    gap = float(gaps.min())
    steps = [gap / k for k in range(1, 9)] + [top / n for n in _SYMMETRIC_CODES]
    for start in (0.0, float(levels[0])):
        shifted = levels - start
        for step in sorted(steps, reverse=True):
            nearest = np.rint(shifted / step)
            square = float(np.dot(nearest, nearest))
            if not square or float(np.abs(nearest).max()) > MAX_LEVELS:
                continue
            fitted = float(np.dot(shifted, nearest)) / square
            # Each point was rounded, and so were the step and what the grid starts at.
            allowed = 0.02 * fitted + 2 * roundoff * (np.abs(levels) + abs(start))
            if bool((np.abs(shifted - nearest * fitted) <= allowed).all()):
                return fitted, float(np.log(np.minimum(2 * allowed / fitted, 1.0)).sum())
    return None


@dataclass(frozen=True, slots=True)
class Codes:
    """An integer tensor of the target that stands for a float weight of the reference.

    Attributes:
      weight: the reference's parameter record.
      noise: ||dequantised - weight|| / ||weight||, fitted or promised by the scales; None where unknown.
      note: how it was found.
    """

    weight: StoredRecord
    noise: float | None
    note: str


def codes_of(pairing: Pairing, leaf: Value, reader: StoredRecord) -> Codes | None:
    """The weight that an integer leaf of the target stands for, and how well it can.

    Args:
      leaf: a value of the target that no op made.
      reader: an op that reads it.
    """
    target = pairing.target
    owner, slot = target.records[leaf[0]], target.slot(leaf)
    path = owner.module if owner.kind == "param" else reader.module
    floats = [
        record
        for (_, module, _), versions in pairing.ref.params.items()
        for record in versions[:1]
        if pairing.renames.apply(module) == path and dtype_class(record.slots[0].dtype) == "f"
    ]
    sized = [r for r in floats if slot_numel(r.slots[0]) == slot_numel(slot) and len(r.slots[0].shape) > 1]
    named = [r for r in floats if r.name == owner.name and len(r.slots[0].shape) > 1]
    weight = next(iter([r for r in sized if r in named] or sized or named), None)
    if weight is None:
        return None
    if weight in sized and weight.slots[0].content >= 0 and slot.content >= 0:
        w, q = (
            pairing.comparer.array(True, weight.slots[0].content),
            pairing.comparer.array(False, slot.content),
        )
        if w is not None and q is not None and w.ndim == 2 and q.ndim == 2:
            fitted = fit_codes(w, q if q.shape == w.shape else q.T)
            if fitted is not None:
                return Codes(weight, fitted, "codes fitted to the weight")
    promised = _promised(pairing, weight, path, owner)
    return Codes(weight, promised, "promised by the scales" if promised is not None else "")


def fit_codes(weight: Array, codes: Array) -> float | None:
    """Relative error of the best scale and offset for each row (or group of a row) of codes.

    Args:
      weight, codes: [rows, n].
    Returns: ||fit - weight|| / ||weight||, None where the codes do not stand for the weight.
    """
    w, q = weight.astype(np.float64), codes.astype(np.float64)
    for group in _GROUPS:
        if group and w.shape[1] % group:
            continue
        width = group or w.shape[1]
        a, b = w.reshape(-1, width), q.reshape(-1, width)
        if width < 8:
            continue
        centred, offset = b - b.mean(1, keepdims=True), a - a.mean(1, keepdims=True)
        square = (centred**2).sum(1)
        step = np.abs((centred * offset).sum(1) / np.where(square > 0, square, 1.0))
        signed = (centred * offset).sum(1) / np.where(square > 0, square, 1.0)
        rest = offset - signed[:, None] * centred
        squared = float((rest**2).sum())
        promise = float((step**2).sum() * width)
        if promise > 0 and math.sqrt(squared / promise) <= WORST_RATIO:
            return math.sqrt(squared / max(float((w**2).sum()), 1e-300))
    return None


def _promised(pairing: Pairing, weight: StoredRecord, path: str, owner: StoredRecord) -> float | None:
    """What rounding to the steps costs, 0.289 of their size over the weight's, where the module holds steps.

    Scales are told from biases by their sign: all of them are positive.
    """
    target = pairing.target
    content = pairing.ref.content(weight.slots[0])
    if content is None or not content.stats.get("sq_sum"):
        return None
    n, rows = slot_numel(weight.slots[0]), weight.slots[0].shape[0]
    beside = [r[0] for (_, module, _), r in target.params.items() if module == path and r[0] is not owner]
    for slot in [slot for record in (owner, *beside) for slot in record.slots]:
        size = slot_numel(slot)
        if not slot.is_tensor or slot.content < 0 or dtype_class(slot.dtype) != "f" or size >= n:
            continue
        stats = target.reader.content(slot.content).stats
        if (size == 1 or size % rows == 0 or size == weight.slots[0].shape[-1]) and float(
            stats.get("min") or 0.0
        ) > 0:
            scale = math.sqrt(float(stats.get("sq_sum") or 0.0) / size)
            return HEALTHY * scale / math.sqrt(float(content.stats["sq_sum"] or 1.0) / n)
    return None


def _from_statistics(
    ref: StoredContent,
    target: StoredContent,
    sketches: tuple[Array | None, Array | None],
    difference: Difference,
) -> str | None:
    """From norms, sketches and zeros: a grid shows as exact zeros where the original has none."""
    n = int(target.stats.get("n") or 0)
    square = ref.stats.get("sq_sum")
    if n < 256 or not square:
        return None
    rms = math.sqrt(float(square) / n)
    step = difference.rho * rms / HEALTHY  # if the difference is quantisation noise
    extra = int(target.stats.get("zeros") or 0) - int(ref.stats.get("zeros") or 0)
    expected = n * min(0.4 * step / rms, 0.9)  # density of a normal distribution at 0, times the step
    if not _FEWEST_ZEROS * expected <= extra <= 4.0 * expected:
        return None
    a, b = sketches
    if a is None or b is None:
        return None
    a, b = alike(a, b)
    # Rounding is no bias: what is added stands at right angles to the original.
    bias = math.sqrt(float(np.dot(b, b)) / max(float(np.dot(a, a)), 1e-300)) * cosine(a, b) - 1.0
    if abs(bias) > _MAX_BIAS * difference.rho:
        return None
    return f"as if on a grid, step {step:.3g} (inferred from statistics)"
