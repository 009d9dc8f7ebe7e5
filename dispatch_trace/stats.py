"""Statistics and sketch of tensors: by the compiled kernel where there is one, else by torch and NumPy.

Guarantees:

* Each element is read from memory about once: all sums of a chunk are taken while it lies in cache.
* `n`, `nan`, `posinf`, `neginf`, `zeros`, `min`, `max` and the sketch are the same for every thread count
  and process; the sums agree to 1e-6 of `abs_sum`. Sums of integers and booleans are exact Python ints.
* The random state, the default dtype and device and the grad mode play no part; nothing is written to.
* Views of repeated memory (expand) cost what the memory costs, except for their sketch.

How the plain path does it, by dtype: floats up to 32 bits go through float32 chunks, whose sums torch
takes pairwise, or through float64 where fourth powers could overflow or vanish in float32; everything above
a chunk is float64. Dtypes of 8 bits are counted by value, which is exact. Wider integers are summed as
integers. Tensors of a few thousand elements go through float64 NumPy, where a call costs a third of torch's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dispatch_trace import sketch as sketches
from dispatch_trace.chunks import fold_chunk, logical_chunks
from dispatch_trace.kernel import Kernel, Running, address, takes_whole
from dispatch_trace.moments import (
    ByteMoments,
    FloatMoments,
    IntegerMoments,
    Totals,
    Value,
    add_integers,
    add_wide,
    bounds,
)
from dispatch_trace.schema import STATISTICS

SMALL = 4096  # elements up to which NumPy is faster
_ONES = np.ones(SMALL)
MAX_SKETCHED_REPEATS = 1 << 28  # elements of a view of repeated memory that still gets a sketch
MAX_OVERLAPPED = 1 << 33  # elements of a view of overlapping memory that still gets statistics


def _dtypes(*names: str) -> frozenset[torch.dtype]:
    return frozenset(getattr(torch, name) for name in names if hasattr(torch, name))


_FLOAT8 = _dtypes("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
_FLOATS = _FLOAT8 | _dtypes("float16", "bfloat16", "float32", "float64")
_COMPLEX = _dtypes("complex32", "complex64", "complex128")
_BYTES = _FLOAT8 | _dtypes("bool", "uint8", "int8")
_INTEGERS = _dtypes("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64")


@dataclass(frozen=True, slots=True)
class Summary:
    """What `accumulate` found.

    Attributes:
      stats: `schema.STATISTICS` by name (or those asked for). n, nan, posinf, neginf and zeros are ints;
        min, max, sum and abs_sum are ints for integers and booleans, else floats; sq_sum and quad_sum are
        floats. Undefined ones are None: min and max without finite values, all but n where the dtype
        or layout has no arithmetic.
      sketch: [K] float32, or None when not asked for or not possible.
    """

    stats: dict[str, Value]
    sketch: sketches.Sketch | None


def accumulate(
    tensor: Tensor,
    *,
    sketch: bool = True,
    names: Iterable[str] | None = None,
    start: int = 0,
    kernel: Kernel | None = None,
) -> Summary:
    """Statistics and sketch of a tensor.

    Args:
      tensor: [*shape], any dtype, strides and device. Complex goes by its real view (n counts both parts).
      sketch: also fold the sketch.
      names: the statistics wanted; None for all.
      start: global position of the first element, for the sketch of a part of a longer sequence.
      kernel: from `kernel.find`, None for the plain path.
    """
    values = _real(tensor)
    if values is None:
        return Summary(chosen(_only_n(tensor), names), None)
    found = None
    if kernel is not None and start % sketches.CHUNK == 0:
        found = _compiled(kernel, values.detach(), sketch, start // sketches.CHUNK)
    if found is None:
        with np.errstate(over="ignore", invalid="ignore"):  # huge values saturate
            if values.numel() <= SMALL and start == 0:
                found = _small(values, sketch)
            else:
                found = _chunked(values.detach(), sketch, start)
    return Summary(chosen(found[0], names), found[1])


def accumulate_many(
    tensors: Sequence[Tensor],
    *,
    sketch: bool = True,
    names: Iterable[str] | None = None,
    kernel: Kernel | None = None,
) -> list[Summary | Exception]:
    """`accumulate` of many tensors; those that lie ready in memory in one call of the kernel.

    Returns: in order; of a tensor that cannot be read the error.
    """
    summaries: list[Summary | Exception | None] = [None] * len(tensors)
    if kernel is not None:
        ready = [i for i, tensor in enumerate(tensors) if _lies_ready(tensor)]
        found = kernel.many([tensors[i] for i in ready], sketch=sketch) if ready else []
        for i, one in zip(ready, found, strict=True):
            if one is not None:
                summaries[i] = Summary(chosen(one[0], names), one[1])
    for i, tensor in enumerate(tensors):
        if summaries[i] is None:
            try:
                summaries[i] = accumulate(tensor, sketch=sketch, names=names, kernel=kernel)
            except Exception as error:  # operations on a foreign tensor fail in ways of their own
                summaries[i] = error
    return [summary for summary in summaries if summary is not None]


def _lies_ready(tensor: Tensor) -> bool:
    return takes_whole(tensor) and tensor.layout is torch.strided and not tensor.is_neg()


def chosen(stats: dict[str, Value], names: Iterable[str] | None) -> dict[str, Value]:
    if names is None:
        return stats
    wanted = frozenset(names)
    return {name: value for name, value in stats.items() if name in wanted}


def _real(tensor: Tensor) -> Tensor | None:
    """The real numbers of a tensor, None where it has none that can be computed with."""
    dtype = tensor.dtype
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        return None
    if dtype in _FLOATS or dtype in _INTEGERS:
        return tensor.resolve_neg() if tensor.is_neg() else tensor
    if dtype in _COMPLEX:
        return torch.view_as_real(tensor.resolve_conj()).resolve_neg()
    if not tensor.is_quantized:
        return None
    try:
        return tensor.dequantize()
    except RuntimeError:  # made by torch.empty, without a scale
        return None


def _small(tensor: Tensor, wants_sketch: bool) -> tuple[dict[str, Value], sketches.Sketch | None]:
    """Statistics and sketch of at most `SMALL` elements, by NumPy."""
    dtype = tensor.dtype
    is_integer = dtype in _INTEGERS
    if not is_integer and dtype is not torch.float32 and dtype is not torch.float64:
        tensor = tensor.float()
    values: npt.NDArray[Any] = tensor.numpy(force=True).reshape(-1)
    totals = Totals(sum=0, abs_sum=0) if is_integer else Totals()
    if values.shape[0]:
        values = add_integers(totals, values) if is_integer else _add_small(totals, values)
    return totals.result(), sketches.fold_small(values) if wants_sketch else None


def _add_small(totals: Totals, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Takes in at least one float; returns them with zeros in place of what is not finite."""
    m = totals.n = x.shape[0]
    x, missing, low, high = bounds(totals, x)
    if missing == m:
        return x
    totals.min, totals.max = low, high
    totals.zeros = m - missing - int(np.count_nonzero(x))
    wide = x.astype(np.float64)
    if not 1e-70 < max(-low, high) < 1e70:
        add_wide(totals, wide, max(-low, high))
        return x
    square = wide * wide
    ones = _ONES[:m]
    totals.sum = float(wide.dot(ones))  # a dot product costs half of what a reduction does
    totals.abs_sum = float(np.abs(wide).dot(ones))
    totals.sq_sum = float(square.dot(ones))
    totals.quad_sum = float(square.dot(square))
    return x


def _compiled(
    kernel: Kernel, tensor: Tensor, wants_sketch: bool, chunk: int
) -> tuple[dict[str, Value], sketches.Sketch | None] | None:
    """Statistics and sketch of any tensor of real numbers; None where the plain path has to do it."""
    plan = _plan(tensor, wants_sketch)
    if plan is None:
        return _only_n(tensor), None
    distinct, repeats, folds = plan
    running = Running(kernel, tensor.dtype, sketch=folds and repeats == 1)
    _feed(running, distinct, chunk)
    stats = running.stats(repeats)
    if folds and repeats > 1:
        failed, running = running.failed, Running(kernel, tensor.dtype, sketch=True)
        _feed(running, tensor, chunk)
        running.failed = running.failed or failed
    return None if running.failed else (stats, running.sketch())


def _feed(running: Running, tensor: Tensor, chunk: int) -> None:
    if tensor.is_cpu and tensor.is_contiguous():
        dtype = tensor.dtype if running.chunk_dtype != torch.uint8 else None
        running.add(address(tensor), tensor.numel(), chunk, dtype)
        return
    if running.chunk_dtype == torch.uint8:
        tensor = tensor.view(torch.uint8)
    for position, part in logical_chunks(tensor, running.chunk_dtype, chunk * sketches.CHUNK):
        running.add(part.ctypes.data, part.shape[0], position // sketches.CHUNK)


def _plan(tensor: Tensor, wants_sketch: bool) -> tuple[Tensor, int, bool] | None:
    """(distinct elements, how often each occurs, whether to fold); None where they are too many."""
    if tensor.is_contiguous():
        return tensor, 1, wants_sketch
    distinct, repeats = _without_repeats(tensor)
    overlaps = distinct.numel() * distinct.element_size() > distinct.untyped_storage().nbytes()
    if overlaps and distinct.numel() > MAX_OVERLAPPED:
        return None
    too_long = tensor.numel() > MAX_SKETCHED_REPEATS
    return distinct, repeats, wants_sketch and not (too_long and (overlaps or repeats > 1))


def _chunked(
    tensor: Tensor, wants_sketch: bool, start: int
) -> tuple[dict[str, Value], sketches.Sketch | None]:
    """Statistics and sketch of any tensor of real numbers, a chunk at a time."""
    plan = _plan(tensor, wants_sketch)
    if plan is None:
        return _only_n(tensor), None
    distinct, repeats, folds = plan
    moments = _moments(tensor.dtype)
    if isinstance(moments, ByteMoments):
        tensor, distinct = tensor.view(torch.uint8), distinct.view(torch.uint8)
    total = np.zeros(sketches.K)
    for position, chunk in logical_chunks(distinct, moments.chunk_dtype, start):
        clean = moments.add(chunk)
        if folds and repeats == 1:
            total += fold_chunk(clean, position)
    if folds and repeats > 1:
        for position, chunk in logical_chunks(tensor, moments.chunk_dtype, start):
            total += fold_chunk(moments.clean(chunk), position)
    return moments.result(repeats), sketches.finish(total) if folds else None


def _moments(dtype: torch.dtype) -> FloatMoments | ByteMoments | IntegerMoments:
    if dtype in _BYTES:
        return ByteMoments(dtype)
    return IntegerMoments(dtype) if dtype in _INTEGERS else FloatMoments(dtype)


def _without_repeats(tensor: Tensor) -> tuple[Tensor, int]:
    """The tensor without its expanded dims, and how often each element of it occurs."""
    repeats = 1
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
            repeats *= size
    return tensor, repeats


def _only_n(tensor: Tensor) -> dict[str, Value]:
    stats: dict[str, Value] = dict.fromkeys(STATISTICS)
    stats["n"] = tensor.numel()
    return stats
