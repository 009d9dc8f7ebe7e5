"""Errors and norms of the rows of two tensors: what the difference of their data is made of.

Two ways to one result. Tensors that lie in a file as they are go through the compiled functions straight from
the mapped file, both read once and their hashes checked on the way; all others are NumPy arrays. Sums agree
to 1e-12 of themselves, or 1e-5 where both sides have 16 bits an element, the rest exactly. Sums of a row have
the same bits whatever else is compared with it.

Elements that are not finite, or as large as a mask's, are compared by place and kept out of sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dispatch_trace.align.summaries import EXTREME
from dispatch_trace.kernel_build import KINDS, Library
from dispatch_trace.store.mapped import Mapped

Array: TypeAlias = npt.NDArray[Any]
Floats: TypeAlias = npt.NDArray[np.float64]

CHUNK = 1 << 16
# Bytes of each side that are hashed and compared while they are in the processor's cache.
_CACHED_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class RowSums:
    """What two tensors [*rows, n] differ by, row by row.

    Attributes:
      errors: [rows], squared L2 norm of target - ref.
      norms: [rows], squared L2 norm of ref.
      odd: elements that are finite (or smaller than a mask's) on one side only, or not in the same way.
      index: shape of the rows, () where elements are no rows but only cut into runs.
    """

    errors: Floats
    norms: Floats
    odd: int
    index: tuple[int, ...]


def row_sums(ref: Array, target: Array) -> RowSums:
    """Of two arrays of one shape; complex values by modulus."""
    index, runs = _runs(ref.shape)
    wide: Any = np.complex128 if np.iscomplexobj(ref) or np.iscomplexobj(target) else np.float64
    errors, norms, odd = [np.empty(0)], [np.empty(0)], 0
    a, b = ref.reshape(-1), target.reshape(-1)
    for begin, rows, width in runs:
        step = max(1, CHUNK // width)
        for start in range(0, rows, step):
            count = min(step, rows - start)
            part = slice(begin + start * width, begin + (start + count) * width)
            r: Array = a[part].astype(wide)
            t: Array = b[part].astype(wide)
            if not (_is_ordinary(r) and _is_ordinary(t)):
                odd += _set_apart(r, t)
            t -= r
            errors.append(_squares(t.reshape(count, width)))
            norms.append(_squares(r.reshape(count, width)))
    return RowSums(np.concatenate(errors), np.concatenate(norms), odd, index)


def mapped_row_sums(library: Library, ref: Mapped, target: Mapped) -> RowSums | None:
    """Of two tensors with as many elements, straight from their files; without shape in common no rows.

    Returns: None where these are not compared here.
    Raises:
      TraceFormatError: what lies in a file is not what its hash says.
    """
    kinds = KINDS.get(ref.dtype), KINDS.get(target.dtype)
    if kinds[0] is None or kinds[1] is None or not (ref.is_aligned and target.is_aligned):
        return None
    index, runs = _runs(ref.shape if ref.shape == target.shape else (math.prod(ref.shape),))
    total = sum(rows for _, rows, _ in runs)
    errors, norms, odd = np.empty(total), np.empty(total), 0
    checks = ref.check(), target.check()
    # Plain numbers from here on: there are thousands of parts, and each has to cost little.
    ours, theirs = ref.data.ctypes.data, target.data.ctypes.data
    error_at, norm_at = errors.ctypes.data, norms.ctypes.data
    for begin, rows, width in runs:
        step = max(1, _CACHED_BYTES // (width * max(ref.itemsize, target.itemsize)))
        sizes = width * ref.itemsize, width * target.itemsize
        at = begin * ref.itemsize, begin * target.itemsize
        for start in range(0, rows, step):
            count = min(step, rows - start)
            first, second = at[0] + start * sizes[0], at[1] + start * sizes[1]
            checks[0].add(first, first + count * sizes[0])
            checks[1].add(second, second + count * sizes[1])
            found = library.compare(
                ours + first, kinds[0], theirs + second, kinds[1], count, width, EXTREME, error_at, norm_at
            )
            if found < 0:
                return None
            odd += found
            error_at += 8 * count
            norm_at += 8 * count
    for check in checks:
        check.finish()
    return RowSums(errors, norms, odd, index)


def _runs(shape: tuple[int, ...]) -> tuple[tuple[int, ...], list[tuple[int, int, int]]]:
    """(shape of the rows, where they lie: first element, number, width of each); short rows are none."""
    size = math.prod(shape)
    if len(shape) >= 2 and shape[-1] >= 8 and size:
        return shape[:-1], [(0, size // shape[-1], shape[-1])]
    whole = size // CHUNK
    runs = [(0, whole, CHUNK), (whole * CHUNK, 1, size - whole * CHUNK)]
    return (), [run for run in runs if run[1] and run[2]]


def _is_ordinary(values: Array) -> bool:
    """Whether all elements are finite and smaller than a mask's."""
    if np.iscomplexobj(values):
        return bool((np.abs(values) < EXTREME).all())
    return bool(values.min() > -EXTREME and values.max() < EXTREME)


def _set_apart(r: Array, t: Array) -> int:
    """Puts 0 where one of both is out of bounds. Returns: how many of those differ in kind."""
    r_out, t_out = ~(np.abs(r) < EXTREME), ~(np.abs(t) < EXTREME)  # NaN is out as well
    out = r_out | t_out
    kinds = []
    for x, is_out in ((r, r_out), (t, t_out)):
        x = x[out].real
        x = np.where(np.isnan(x), 2.0, np.clip(x, -1.0, 1.0))
        kinds.append(np.where(is_out[out], x, 0.0))
    r[out] = t[out] = 0
    return int((kinds[0] != kinds[1]).sum())


def _squares(rows: Array) -> Floats:
    """Squared L2 norms of [m, n]; inf where squares overflow.

    Not by BLAS: its threads cost more processor time than the sum, and wait for cores that the program has.
    """
    with np.errstate(over="ignore"):
        return np.asarray(np.einsum("ij,ij->i", rows, rows.conj()).real)


__all__ = ["CHUNK", "Array", "RowSums", "mapped_row_sums", "row_sums"]
