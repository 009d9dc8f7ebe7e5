"""Statistics and sketches of tensors by the compiled functions (`kernel_build`).

Guarantees: counts, min, max and sketches have the bits of the plain path (`moments`, `chunks`, `sketch`),
sums agree to 1e-6 of `abs_sum`. The plain path does the same in about five times the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dispatch_trace import kernel_build
from dispatch_trace import sketch as sketches
from dispatch_trace.kernel_build import KINDS, TOTALS, Library, why_not
from dispatch_trace.moments import ByteMoments, Totals, Value
from dispatch_trace.sketch import K

# One byte has few values, which are counted by code instead.
_KINDS = {getattr(torch, name): kind for name, kind in KINDS.items() if getattr(torch, name).itemsize > 1}
_FIRST_INTEGER, _UINT64 = _KINDS[torch.int16], _KINDS[torch.uint64]
_PART = np.dtype([("data", "<u8"), ("n", "<i8"), ("kind", "<i8")])


class Kernel:
    """The compiled functions."""

    def __init__(self, library: Library) -> None:
        self._add, self._add_codes = library.add, library.add_codes
        self._finish, self._add_many = library.finish, library.add_many

    def many(
        self, tensors: Sequence[Tensor], *, sketch: bool
    ) -> list[tuple[dict[str, Value], sketches.Sketch | None] | None]:
        """Statistics and sketches of tensors that `takes_whole`, in one call.

        Returns: for each (statistics, sketch or None), or None where the plain path has to do it.
        """
        count = len(tensors)
        parts = np.array([(address(t), t.numel(), _KINDS[t.dtype]) for t in tensors], dtype=_PART)
        totals = np.empty(count, dtype=TOTALS)
        table = np.empty((count, K), dtype=np.float32) if sketch else None
        done = np.empty(count, dtype=np.uint8)
        self._add_many(
            parts.ctypes.data,
            count,
            totals.ctypes.data,
            None if table is None else table.ctypes.data,
            done.ctypes.data,
        )
        rows: Any = zip(totals.tolist(), done.tolist(), parts["kind"].tolist(), strict=True)
        return [
            (_result(row, kind), None if table is None else table[i]) if fine else None
            for i, (row, fine, kind) in enumerate(rows)
        ]


class Running:
    """Statistics and sketch of one tensor that comes in parts.

    Attributes:
      chunk_dtype: of the parts, where they have to be copied.
      failed: the plain path has to do it; nothing here is of use then.
    """

    def __init__(self, kernel: Kernel, dtype: torch.dtype, *, sketch: bool) -> None:
        """Takes a dtype that `takes`."""
        self._kernel = kernel
        self._codes = ByteMoments(dtype) if dtype not in _KINDS else None
        self.chunk_dtype = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
        if self._codes is not None:
            self.chunk_dtype = torch.uint8
        self._totals = np.zeros(1, dtype=TOTALS)
        self._totals["low"], self._totals["high"] = np.inf, -np.inf
        self._kind = _KINDS.get(dtype, 0)
        self._sketch = np.zeros(K) if sketch else None
        self.failed = False

    def add(self, data: int, n: int, chunk: int, dtype: torch.dtype | None = None) -> None:
        """Takes in the next values, which begin with a chunk of the sketch.

        Args:
          data: address of n contiguous values.
          dtype: theirs, `chunk_dtype` by default.
        """
        sketch = None if self._sketch is None else self._sketch.ctypes.data
        if self._codes is not None:
            finite, counts = self._codes.finite.ctypes.data, self._codes.counts.ctypes.data
            done = self._kernel._add_codes(data, n, chunk, finite, counts, sketch)
        else:
            kind = _KINDS[dtype or self.chunk_dtype]
            done = self._kernel._add(data, n, kind, chunk, self._totals.ctypes.data, sketch)
        self.failed = self.failed or not done

    def stats(self, repeats: int = 1) -> dict[str, Value]:
        """Every element counted `repeats` times."""
        if self._codes is not None:
            return self._codes.result(repeats)
        return _totals(self._totals[0].item(), self._kind).result(repeats)

    def sketch(self) -> sketches.Sketch | None:
        """[K], or None where it was not asked for."""
        if self._sketch is None:
            return None
        found = np.empty(K, dtype=np.float32)
        self._kernel._finish(found.ctypes.data, self._sketch.ctypes.data)
        return found


def _totals(row: tuple[int | float, ...], kind: int) -> Totals:
    n, nan, posinf, neginf, zeros, low, high, total, absolute, square, quad = row[:11]
    if kind >= _FIRST_INTEGER:
        low, high, *halves = (int(value) for value in row[11:])
        if kind == _UINT64:
            low, high = low % 2**64, high % 2**64
        total, absolute = (halves[0] << 32) + halves[1], (halves[2] << 32) + halves[3]
        if not n:
            low, high = 0, -1
    return Totals(
        int(n), int(nan), int(posinf), int(neginf), int(zeros), low, high, total, absolute, square, quad
    )


def _result(row: tuple[int | float, ...], kind: int) -> dict[str, Value]:
    """`Totals.result` of a row, without the detour for floats."""
    if kind >= _FIRST_INTEGER:
        return _totals(row, kind).result()
    n, nan, posinf, neginf, zeros, low, high, total, absolute, square, quad = row[:11]
    undefined = low > high
    return {
        "n": n,
        "nan": nan,
        "posinf": posinf,
        "neginf": neginf,
        "zeros": zeros,
        "min": None if undefined else low + 0.0,  # + 0.0: no negative zero
        "max": None if undefined else high + 0.0,
        "sum": total,
        "abs_sum": absolute,
        "sq_sum": square,
        "quad_sum": quad,
    }


def takes_whole(tensor: Tensor) -> bool:
    """Whether `Kernel.many` takes a tensor (strided, without lazy conjugation or negation)."""
    return tensor.dtype in _KINDS and tensor.is_cpu and tensor.is_contiguous() and type(tensor) is Tensor


def address(tensor: Tensor) -> int:
    """Where the first element of a CPU tensor lies, for reading.

    Not `data_ptr()` or `numpy()`: both copy the memory of a lazy clone.
    """
    start: int = torch._C._data_address(tensor)  # type: ignore[attr-defined]
    return start + int(tensor.storage_offset()) * tensor.element_size()


def find(*, wait: bool = False) -> Kernel | None:
    """The kernel; None where there is none, or none yet.

    Args:
      wait: until it is built, a few seconds once a machine.
    """
    library = kernel_build.find(wait=wait)
    return None if library is None else _kernel_of(library)


@cache
def _kernel_of(library: Library) -> Kernel:
    return Kernel(library)


__all__ = ["Kernel", "Running", "address", "find", "takes_whole", "why_not"]
