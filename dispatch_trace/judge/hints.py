"""What a difference looks like: a cause in a few words, where the data show one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from dispatch_trace.align.content import Difference
from dispatch_trace.align.pairs import Link, Pairing
from dispatch_trace.align.summaries import EXTREME
from dispatch_trace.per_step import of_step, texts
from dispatch_trace.sketch import alike, cosine, norm

Array = npt.NDArray[Any]

# Beyond this many elements a hint costs more than it tells.
MAX_ELEMENTS = 1 << 24


def hint_of(pairing: Pairing, link: Link, difference: Difference) -> str | None:
    """A cause that fits the difference of a link, or None."""
    if not difference.known or difference.equal or difference.nonfinite:
        return None
    if difference.method == "figures":
        return None
    if difference.method == "data":
        ref = pairing.comparer.array(True, link.ref_content)
        target = pairing.comparer.array(False, link.target_content)
        if ref is None or target is None or ref.size != target.size or ref.size > MAX_ELEMENTS:
            return None
        if np.iscomplexobj(ref) or np.iscomplexobj(target):
            return None
        return _from_data(
            ref.astype(np.float64), target.reshape(ref.shape).astype(np.float64), difference.rho
        )
    if pairing.comparer.layout(link.ref_content) is not None:
        return None
    sides = (pairing.ref.reader, link.ref_content), (pairing.target.reader, link.target_content)
    steps = next(filter(None, (reader.together(id) for reader, id in sides)), None)
    if steps is None:
        a, b = (reader.sketch(id) for reader, id in sides)
        return _from_sketches(a, b, difference.rho)
    ours, theirs = (reader.per_step(id, steps).sketches() for reader, id in sides)
    pairs = enumerate(zip(ours, theirs, strict=True))
    return texts([_from_sketches(a, b, of_step(difference.rho, at)) for at, (a, b) in pairs])


def _from_sketches(ref: Array | None, target: Array | None, rho: float) -> str | None:
    if ref is None or target is None or norm(ref) == 0.0:
        return None
    ratio = multiple_of(ref, target, rho)
    if ratio is not None and ratio > 0:
        return f"scaled by about {ratio:.4g}"
    flipped = cosine(ref, target) < -0.999 and abs(norm(target) / norm(ref) - 1.0) < 0.05
    return "sign flipped" if flipped else None


def multiple_of(ref: Array, target: Array, rho: float) -> float | None:
    """The number that the reference's sketch, times it, is the target's; None where there is none.

    Args:
      ref, target: [k] sketches.
      rho: relative L2 of the difference: what is left of it must be next to nothing.
    """
    ref, target = alike(ref, target)
    size = norm(ref)
    if size == 0.0:
        return None
    angle = cosine(ref, target)
    if 1.0 - abs(angle) >= 1e-4 * min(1.0, rho):
        return None
    return math.copysign(norm(target) / size, angle)


def _from_data(ref: Array, target: Array, rho: float) -> str | None:
    keep = (np.abs(ref) < EXTREME) & (np.abs(target) < EXTREME)
    r, t = ref[keep], target[keep]
    square = float(np.dot(r, r))
    if not r.size or square == 0.0:
        return None
    if not np.any(t):
        return "all zero"
    scale = float(np.dot(t, r)) / square
    rest = float(np.linalg.norm(t - scale * r)) / math.sqrt(square)
    if rest < 0.02 * rho:
        return "sign flipped" if abs(scale + 1.0) < 0.01 else f"scaled by {scale:.6g}"
    if ref.ndim >= 2 and np.array_equal(np.sort(r), np.sort(t)):
        return _moved(ref, target)
    share = _concentrated(ref, target)
    if share is not None:
        return share
    error = t - r
    if rho < 0.05 and abs(float(error.mean())) > 0.9 * float(np.abs(error).mean()):
        return "all errors have one sign"
    return None


def _moved(ref: Array, target: Array) -> str:
    """The same elements in other places."""
    if ref.ndim == 2 and ref.shape[0] == ref.shape[1] and np.array_equal(target, ref.T):
        return "transposed"
    for dim in range(ref.ndim):
        for shift in (1, -1, ref.shape[dim] // 2):
            if shift and np.array_equal(np.roll(ref, shift, axis=dim), target):
                return f"shifted by {shift} along dim {dim}"
        if np.array_equal(np.flip(ref, axis=dim), target):
            return f"reversed along dim {dim}"
    for dim in range(ref.ndim):
        a, b = np.moveaxis(ref, dim, 0), np.moveaxis(target, dim, 0)
        if a.shape[0] <= 4096 and sorted(map(bytes, np.ascontiguousarray(a))) == sorted(
            map(bytes, np.ascontiguousarray(b))
        ):
            return f"permuted along dim {dim}"
    return "the same elements in other places"


def _concentrated(ref: Array, target: Array) -> str | None:
    """One index of some dim that holds nearly all of the error."""
    with np.errstate(invalid="ignore"):
        squares = np.where(np.abs(ref) < EXTREME, target - ref, 0.0) ** 2
    total = float(squares.sum())
    if not math.isfinite(total) or total == 0.0:
        return None
    for dim in range(ref.ndim):
        if ref.shape[dim] < 4:
            continue
        along = squares.sum(axis=tuple(d for d in range(ref.ndim) if d != dim))
        wrong = int((along > 1e-3 * along.max()).sum())
        if wrong == 1:
            return f"only index {int(along.argmax())} of dim {dim}"
    return None
