"""Statistics and sketch of one tensor, in one chunked pass of plain torch operations.

Guarantees:

* Each element is read from memory about once: all sums of a chunk are taken while it lies in cache.
* `n`, `nan`, `posinf`, `neginf`, `zeros`, `min`, `max` and the sketch are the same for every thread count
  and process; the sums agree to 1e-6 of `abs_sum`. Sums of integers and booleans are exact Python ints.
* The random state, the default dtype and device and the grad mode play no part; nothing is written to.
* Views of repeated memory (expand) cost what the memory costs, except for their sketch.

Moments are over the finite values. Chunk sums of squares and fourth powers run in float32 on values scaled
by a power of two where they could overflow or vanish; everything above a chunk is float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dispatch_trace import sketch as sketches
from dispatch_trace.chunks import logical_chunks
from dispatch_trace.schema import STATISTICS

Value = int | float | None

MAX_SKETCHED_REPEATS = 1 << 28  # elements of a view of repeated memory that still gets a sketch
MAX_OVERLAPPED = 1 << 33  # elements of a view of overlapping memory that still gets statistics

_NARROW_FLOATS = frozenset(
    {torch.float32, torch.bfloat16, torch.float16}
    | {
        getattr(torch, name)
        for name in (
            "float8_e4m3fn",
            "float8_e4m3fnuz",
            "float8_e5m2",
            "float8_e5m2fnuz",
            "float8_e8m0fnu",
        )
        if hasattr(torch, name)
    }
)
_FLOATS = _NARROW_FLOATS | {torch.float64}
_COMPLEX = {torch.complex32, torch.complex64, torch.complex128}
_INTEGERS = {
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
}


@dataclass(frozen=True, slots=True)
class Summary:
    """What `accumulate` found.

    Attributes:
      stats: `schema.STATISTICS` by name (or those asked for). n, nan, posinf, neginf and zeros are ints;
        min, max, sum and abs_sum are ints for integers and booleans, else floats; sq_sum and quad_sum are
        floats. Undefined ones are None: min and max without finite values, all but n where the dtype
        has no arithmetic.
      sketch: [K] float32, or None when not asked for or not possible.
    """

    stats: dict[str, Value]
    sketch: sketches.Sketch | None


def accumulate(
    tensor: Tensor, *, sketch: bool = True, names: Iterable[str] | None = None, start: int = 0
) -> Summary:
    """Statistics and sketch of a tensor.

    Args:
      tensor: [*shape], any dtype, strides and device. Complex goes by its real view (n counts both parts).
      sketch: also fold the sketch.
      names: the statistics wanted; None for all.
      start: global position of the first element, for the sketch of a part of a longer sequence.
    """
    with torch.no_grad():
        stats, folded = _accumulate(tensor.detach(), sketch, start)
    if names is not None:
        wanted = set(names)
        stats = {name: value for name, value in stats.items() if name in wanted}
    return Summary(stats, folded)


def _accumulate(
    tensor: Tensor, wants_sketch: bool, start: int
) -> tuple[dict[str, Value], sketches.Sketch | None]:
    undefined: dict[str, Value] = dict.fromkeys(STATISTICS)
    undefined["n"] = tensor.numel()
    if tensor.layout != torch.strided or tensor.is_nested or tensor.device.type == "meta":
        return undefined, None
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.dtype in _COMPLEX:
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg()
    if tensor.dtype not in _FLOATS and tensor.dtype not in _INTEGERS:
        return undefined, None

    distinct, repeats = _without_repeats(tensor)
    overlapped = distinct.numel() * distinct.element_size() > distinct.untyped_storage().nbytes()
    if overlapped and distinct.numel() > MAX_OVERLAPPED:
        undefined["n"] = tensor.numel()
        return undefined, None
    folds = wants_sketch and not ((repeats > 1 or overlapped) and tensor.numel() > MAX_SKETCHED_REPEATS)
    moments = _Integers() if tensor.dtype in _INTEGERS else _Floats()
    dtype = _chunk_dtype(tensor.dtype)
    if not folds or repeats == 1:
        folder = _Folder() if folds else None
        for position, chunk in logical_chunks(distinct, sketches.CHUNK, dtype=dtype, start=start):
            clean = moments.add(chunk)
            if folder is not None:
                folder.add(position, clean)
    else:
        for _, chunk in logical_chunks(distinct, sketches.CHUNK, dtype=dtype):
            moments.add(chunk)
        folder, cleaner = _Folder(), type(moments)()
        for position, chunk in logical_chunks(tensor, sketches.CHUNK, dtype=dtype, start=start):
            folder.add(position, cleaner.add(chunk))
    return moments.result(repeats), folder.result() if folder is not None else None


def _chunk_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype in _INTEGERS:
        return torch.uint64 if dtype == torch.uint64 else torch.int64
    return torch.float32 if dtype in _NARROW_FLOATS else torch.float64


def _without_repeats(tensor: Tensor) -> tuple[Tensor, int]:
    """The tensor without its expanded dims, and how often each element of it occurs."""
    repeats = 1
    for dim in range(tensor.dim()):
        size = tensor.shape[dim]
        if size > 1 and tensor.stride(dim) == 0:
            tensor = tensor.narrow(dim, 0, 1)
            repeats *= size
    return tensor, repeats


class _Floats:
    """Running statistics of float32 or float64 chunks."""

    def __init__(self) -> None:
        self.n = self.nan = self.posinf = self.neginf = self.zeros = 0
        self.min, self.max = math.inf, -math.inf
        self.sum = self.abs_sum = self.sq_sum = self.quad_sum = 0.0

    def add(self, x: Tensor) -> Tensor:
        """Takes in a chunk [m]; returns it with zeros in place of what is not finite."""
        m = x.numel()
        low, high = (float(bound) for bound in torch.aminmax(x))
        missing = 0
        if not math.isfinite(low - high):
            finite = torch.isfinite(x)
            missing = m - int(finite.sum())
            if missing:
                self.nan += int(torch.isnan(x).sum())
                self.posinf += int((x == math.inf).sum())
                self.neginf += int((x == -math.inf).sum())
                low = float(torch.where(finite, x, math.inf).min())
                high = float(torch.where(finite, x, -math.inf).max())
                x = torch.where(finite, x, 0.0)
        self.n += m
        if missing == m:
            return x
        self.min, self.max = min(self.min, low), max(self.max, high)
        sign = torch.sign(x)
        self.zeros += m - missing - round(float(torch.dot(sign, sign)))
        exponent = math.frexp(max(-low, high))[1]
        if -16 < exponent < 24:
            exponent = 0
        y = torch.ldexp(x, torch.tensor(-exponent, device="cpu")) if exponent else x
        self.sum += math.ldexp(float(y.sum()), exponent)
        self.abs_sum += math.ldexp(float(torch.dot(y, sign)), exponent)
        square = y * y
        self.sq_sum += _ldexp(float(square.sum()), 2 * exponent)
        self.quad_sum += _ldexp(float(torch.dot(square, square)), 4 * exponent)
        return x

    def result(self, repeats: int) -> dict[str, Value]:
        empty = self.min > self.max
        return {
            "n": self.n * repeats,
            "nan": self.nan * repeats,
            "posinf": self.posinf * repeats,
            "neginf": self.neginf * repeats,
            "zeros": self.zeros * repeats,
            "min": None if empty else self.min + 0.0,
            "max": None if empty else self.max + 0.0,
            "sum": self.sum * repeats,
            "abs_sum": self.abs_sum * repeats,
            "sq_sum": self.sq_sum * repeats,
            "quad_sum": self.quad_sum * repeats,
        }


def _ldexp(value: float, exponent: int) -> float:
    """value * 2**exponent, inf when float64 cannot hold it."""
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        return math.inf


class _Integers:
    """Running statistics of int64 or uint64 chunks, exact."""

    def __init__(self) -> None:
        self.n = self.zeros = self.sum = self.negative_sum = 0
        self.min: int | None = None
        self.max: int | None = None
        self.sq_sum = self.quad_sum = 0.0

    def add(self, chunk: Tensor) -> Tensor:
        """Takes in a chunk [m]; returns it as float64."""
        x: npt.NDArray[np.int64] | npt.NDArray[np.uint64] = chunk.numpy()
        m = x.shape[0]
        low, high = int(x.min()), int(x.max())
        self.min = low if self.min is None else min(self.min, low)
        self.max = high if self.max is None else max(self.max, high)
        self.n += m
        self.zeros += m - int(np.count_nonzero(x))
        self.sum += _exact_sum(x, low, high)
        if low < 0:
            negative = np.minimum(x, 0)
            self.negative_sum += _exact_sum(negative, low, 0)
        y = x.astype(np.float64)
        square = y * y
        self.sq_sum += float(square.sum())
        self.quad_sum += float((square * square).sum())
        return torch.from_numpy(y)

    def result(self, repeats: int) -> dict[str, Value]:
        return {
            "n": self.n * repeats,
            "nan": 0,
            "posinf": 0,
            "neginf": 0,
            "zeros": self.zeros * repeats,
            "min": self.min,
            "max": self.max,
            "sum": self.sum * repeats,
            "abs_sum": (self.sum - 2 * self.negative_sum) * repeats,
            "sq_sum": self.sq_sum * repeats,
            "quad_sum": self.quad_sum * repeats,
        }


def _exact_sum(x: npt.NDArray[np.int64] | npt.NDArray[np.uint64], low: int, high: int) -> int:
    """Sum of at most 2^18 integers without overflow: in halves of 32 bits where needed."""
    if max(-low, high) < 1 << 44:
        return int(x.sum())
    return (int((x >> 32).sum()) << 32) + int((x & 0xFFFFFFFF).sum())


class _Folder:
    """Adds up the sketch of chunks."""

    def __init__(self) -> None:
        self.total = np.zeros(sketches.K)

    def add(self, position: int, x: Tensor) -> None:
        """Takes in finite values [m] that begin at a global position, all in one chunk."""
        chunk, offset = divmod(position, sketches.CHUNK)
        if offset:
            x = torch.nn.functional.pad(x, (offset, 0))
        values = x.numpy()
        part = _fold_chunk(values, chunk)
        if not math.isfinite(float(part @ part)) and values.dtype == np.float32:
            part = _fold_chunk(values.astype(np.float64), chunk)
        self.total += part

    def result(self) -> sketches.Sketch:
        return sketches.finish(self.total)


def _fold_chunk(values: npt.NDArray[np.floating], chunk: int) -> npt.NDArray[np.float64]:
    rows = [
        sketches.fold_block(values[begin : begin + sketches.BLOCK].copy(), block)
        for block, begin in enumerate(range(0, values.shape[0], sketches.BLOCK))
    ]
    return sketches.fold_buckets(np.concatenate(rows), chunk)
