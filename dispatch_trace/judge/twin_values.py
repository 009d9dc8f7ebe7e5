"""What is kept of a float64 value after it has been freed: enough to tell whether another one equals it.

A fingerprint is the value's sketch (`sketch`, with float64 sums), its moments, and where its elements are not
finite. Two values are compared by their sketches: ||a - b|| to within a few per cent whatever its size, so
that a difference of 1e-12 and one of 1e-5 are told apart without either value. Small values are kept whole.
Masks that are but large (-1e9, -65504) are told by the gap between them and the rest: beside a norm of 1e9 a
wrong score would be nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from dispatch_trace.align.summaries import EXTREME
from dispatch_trace.chunks import fold_chunk
from dispatch_trace.sketch import CHUNK, K

Floats = npt.NDArray[Any]

# Elements up to which a value is kept whole, unless somebody asks for it.
SMALL = 1024
# Views of repeated memory can have any number of elements; beyond this they get no fingerprint.
MAX_ELEMENTS = 1 << 27
_MAX_PERMUTED_DIMS = 4
# Elements below -_MASK are a mask's where all others are smaller by this factor.
_MASK = 3e4
_MASK_OVER_REST = 1e3
# A value of fewer elements, or of one value throughout, equals others by chance.
MIN_TELLING = 16


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What is known of a value.

    Attributes:
      shape: of the tensor.
      stats: n, nan, posinf, neginf, and min, max, sum, sq_sum over elements of ordinary size.
      sketch: [K] float64; elements that are not finite, or as large as a mask's, count as 0.
      pattern: a hash of the places of those, b"" where there are none.
      mask: elements at most this are a mask's; None where only the largest numbers are.
      data: the elements, [*shape] float64, complex128 or integers; None where they were not kept.
    """

    shape: tuple[int, ...]
    stats: dict[str, int | float | None]
    sketch: Floats
    pattern: bytes = b""
    mask: float | None = None
    data: Floats | None = None

    @property
    def compared(self) -> Floats | None:
        """The elements, those of a mask as the numbers that other masks are."""
        if self.data is None or self.mask is None:
            return self.data
        return np.where(self.data <= self.mask, -np.finfo(np.float32).max, self.data)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def square_sum(self) -> float:
        """Of elements of ordinary size."""
        return float(self.stats["sq_sum"] or 0.0)

    @property
    def is_telling(self) -> bool:
        """Whether being equal to this value is no coincidence."""
        low, high = self.stats["min"], self.stats["max"]
        return self.numel >= MIN_TELLING and low is not None and high is not None and low < high


def plain(value: torch.Tensor) -> torch.Tensor | None:
    """The value as contiguous numbers that NumPy has, None where it is no ordinary tensor."""
    if value.layout is not torch.strided or value.is_nested or value.is_meta or value.is_quantized:
        return None
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.numel() > MAX_ELEMENTS:
        return None
    value = value.detach().resolve_conj().resolve_neg()
    if value.is_complex():
        return value.to(torch.complex128).contiguous()
    if value.dtype.itemsize == 1 or value.is_floating_point() or value.dtype.itemsize < 8:
        try:
            return value.to(torch.float64).contiguous()
        except RuntimeError:  # a dtype without arithmetic
            return None
    return value.contiguous()


def fingerprint(value: torch.Tensor, *, keep: int = SMALL) -> Fingerprint | None:
    """The fingerprint of a tensor, None where it is no ordinary one.

    Args:
      value: any shape and dtype; it is not written to.
      keep: keep its elements where it has at most this many.
    """
    numbers = plain(value)
    if numbers is None:
        return None
    data = None
    if numbers.numel() <= keep:
        data = numbers.numpy().copy()
    flat = torch.view_as_real(numbers) if numbers.is_complex() else numbers
    elements = flat.reshape(-1).numpy()
    stats: dict[str, int | float | None] = dict.fromkeys(("nan", "posinf", "neginf"), 0)
    stats |= {"n": int(elements.shape[0]), "min": None, "max": None}
    sums = np.zeros(2)
    sketch = np.zeros(K)
    pattern = xxhash.xxh3_128()
    mask = _mask_of(elements)
    extreme = EXTREME if mask is None else -mask
    for start in range(0, elements.shape[0], CHUNK):
        part = elements[start : start + CHUNK]
        chunk = part if part.dtype == np.float64 else part.astype(np.float64)
        clean = _add(stats, sums, pattern, start, chunk, extreme)
        sketch += fold_chunk(clean, start)
    stats |= {"sum": float(sums[0]), "sq_sum": float(sums[1])}
    return Fingerprint(tuple(value.shape), stats, sketch, _digest(pattern, stats), mask, data)


def _mask_of(elements: Floats) -> float | None:
    """The largest element of a mask that stands out from the rest, None where there is none."""
    if elements.size == 0 or not elements.min() <= -_MASK:  # NaN has no such gap either
        return None
    size = np.abs(elements)
    masked = elements <= -_MASK
    rest = size[~masked]
    if rest.size == 0 or not rest.max() * _MASK_OVER_REST <= size[masked].min():
        return None
    return -float(size[masked].min())


def _add(
    stats: dict[str, int | float | None],
    sums: Floats,
    pattern: Any,
    start: int,
    chunk: Floats,
    extreme: float,
) -> Floats:
    """Takes a chunk into the moments; returns it with 0 in place of what is not of ordinary size."""
    square = _square_sum(chunk)
    if not square < extreme**2:  # NaN makes this true as well
        odd = ~(np.abs(chunk) < extreme)
        kinds = np.where(np.isnan(chunk[odd]), 2.0, np.sign(chunk[odd]))
        pattern.update((np.flatnonzero(odd) + start).tobytes())
        pattern.update(kinds.tobytes())
        for name, found in (
            ("nan", np.isnan(chunk)),
            ("posinf", chunk == np.inf),
            ("neginf", chunk == -np.inf),
        ):
            stats[name] = int(stats[name] or 0) + int(found.sum())
        stats["odd"] = int(stats.get("odd") or 0) + int(odd.sum())
        ordinary = chunk[~odd]
        chunk = np.where(odd, 0.0, chunk)
        square = _square_sum(chunk)
    else:
        ordinary = chunk
    if ordinary.size:
        low, high = float(ordinary.min()), float(ordinary.max())
        stats["min"] = low if stats["min"] is None else min(stats["min"], low)
        stats["max"] = high if stats["max"] is None else max(stats["max"], high)
        sums += (chunk.sum(), square)
    return chunk


def _square_sum(chunk: Floats) -> float:
    return float(np.einsum("i,i", chunk, chunk))  # on this thread: `np.dot` waits for others, which are busy


def _digest(pattern: Any, stats: dict[str, int | float | None]) -> bytes:
    found: bytes = pattern.digest() if stats.pop("odd", 0) else b""
    return found


def distance(ref: Fingerprint, target: Fingerprint) -> float:
    """||target - ref|| / ||ref|| from sketches; inf where other elements are not finite, or only ref is 0.

    Both of as many elements; compared in logical order whatever their shapes.
    """
    if ref.pattern != target.pattern:
        return math.inf
    difference = target.sketch - ref.sketch
    squared = float(difference @ difference)
    if squared == 0.0:
        return 0.0
    scale = float(ref.sketch @ ref.sketch)
    return math.sqrt(squared / scale) if scale else math.inf


def similar(ref: Fingerprint, target: Fingerprint, limit: float) -> bool:
    """Whether two values may hold the same elements in some order."""
    if ref.numel != target.numel:
        return False
    for name in ("nan", "posinf", "neginf"):
        if ref.stats[name] != target.stats[name]:
            return False
    square = ref.square_sum
    size = math.sqrt(ref.numel * square)  # at least the sum of absolute values
    if abs(float(target.stats["sum"] or 0.0) - float(ref.stats["sum"] or 0.0)) > limit * size:
        return False
    return abs(target.square_sum - square) <= 2 * limit * square


def permutations(value: torch.Tensor) -> Iterator[tuple[str, Fingerprint]]:
    """The value with its dims in every other order, in words and as a fingerprint."""
    dims = [d for d in range(value.dim()) if value.shape[d] > 1]
    if not 2 <= len(dims) <= _MAX_PERMUTED_DIMS:
        return
    core = value.squeeze()
    for order in itertools.permutations(range(core.dim())):
        if order != tuple(range(core.dim())):
            found = fingerprint(core.permute(order))
            if found is not None:
                yield f"permuted {tuple(order)}", found
