"""Walks over a tensor in logical order a chunk at a time, and folds a chunk into its sketch.

Guarantees: no copy of more than a chunk is made, whatever the strides; a contiguous CPU tensor of the
wanted dtype is not copied at all. Chunks begin at multiples of `sketch.CHUNK` of the *whole* sequence
(`start` is where this tensor begins in it), which is what lets partial sketches add up. Folding
uses elementwise operations only, in a fixed order.

Nothing here uses a second thread. torch splits operations of 32768 elements over its threads, and when
the program keeps all cores busy, each of them then waits for a thread to get its turn: measured, 1M
elements took 200 ms instead of 2. So torch gets at most `SERIAL` elements at a time, and chunks are NumPy
arrays, a call on which also costs a third of what a call on a tensor does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dispatch_trace import sketch as sketches
from dispatch_trace.sketch import BLOCK, BLOCKS_PER_CHUNK, CHUNK, LENGTHS, K

Numbers = npt.NDArray[Any]

SERIAL = 32767  # elements up to which torch stays on the calling thread (at::internal::GRAIN_SIZE - 1)


class Workspace(threading.local):
    """Buffers of one thread, each about a chunk, reused from tensor to tensor.

    Fresh megabytes would cost more in page faults than the arithmetic that is done in them.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, Any], Numbers] = {}
        self._folded: dict[torch.dtype, Tensor] = {}
        self._foldings: dict[tuple[int, torch.dtype], _Folding] = {}

    def buffer(self, purpose: str, dtype: Any, size: int) -> Numbers:
        """[size] numbers of a NumPy dtype, overwritten by the next request for the same purpose."""
        found = self._buffers.get((purpose, dtype))
        if found is None:
            found = self._buffers[purpose, dtype] = np.empty(CHUNK, dtype=dtype)
        return found[:size]

    def folding(self, num_blocks: int, dtype: torch.dtype) -> _Folding:
        """The folding of a number of whole blocks."""
        found = self._foldings.get((num_blocks, dtype))
        if found is None:
            with torch.inference_mode(False):  # an inference tensor could not be written to later
                if dtype not in self._folded:
                    shape = (BLOCKS_PER_CHUNK, LENGTHS[0])
                    self._folded[dtype] = torch.empty(shape, dtype=dtype, device="cpu")
                found = _Folding(self._folded[dtype][:num_blocks])
                self._foldings[num_blocks, dtype] = found
        return found


WORKSPACE = Workspace()  # one set of buffers a thread; holds no values between calls


def logical_chunks(tensor: Tensor, dtype: torch.dtype, start: int = 0) -> Iterator[tuple[int, Numbers]]:
    """Yields the elements of a strided tensor in logical order.

    Args:
      tensor: strided, any shape and strides, on any device.
      dtype: of what is yielded, one that NumPy has.
      start: global position of the tensor's first element.
    Yields: (global position of its first element, [m] numbers with m <= CHUNK), never across a multiple
      of CHUNK. The numbers are only valid until the next ones are asked for, and must not be written to.
    """
    total = tensor.numel()
    contiguous = tensor.is_contiguous()
    flat = tensor if tensor.dim() == 1 or not contiguous else tensor.view(-1)
    in_place = contiguous and tensor.dtype == dtype and tensor.device.type == "cpu"
    numbers = flat.numpy() if in_place else None
    done = 0
    while done < total:
        count = min(CHUNK - (start + done) % CHUNK, total - done)
        if numbers is not None:
            yield start + done, numbers[done : done + count]
        else:
            buffer = WORKSPACE.buffer("chunk", _NUMPY_DTYPES[dtype], count)
            _copy(flat, done, torch.from_numpy(buffer))
            yield start + done, buffer
        done += count


_NUMPY_DTYPES = {
    getattr(torch, name): np.dtype(name)
    for name in ("float32", "float64", "uint8", "int16", "int32", "int64", "uint16", "uint32", "uint64")
}


def _copy(tensor: Tensor, begin: int, out: Tensor) -> None:
    """Copies as many logical elements as `out` [m] holds, from `begin` on."""
    for part in out.split(SERIAL):
        if tensor.dim() == 1:
            part.copy_(tensor[begin : begin + part.shape[0]])
            begin += part.shape[0]
            continue
        for piece in _pieces(tensor, begin, begin + part.shape[0]):
            size = piece.numel()
            part[:size].view(piece.shape).copy_(piece)
            part = part[size:]
            begin += size


def _pieces(tensor: Tensor, begin: int, end: int) -> Iterator[Tensor]:
    """Yields sub-tensors that together hold the logical elements [begin, end), in order."""
    if begin == 0 and end == tensor.numel():
        yield tensor
        return
    if tensor.dim() == 1:
        yield tensor[begin:end]
        return
    inner = tensor[0].numel()
    first, head = divmod(begin, inner)
    last, tail = divmod(end, inner)
    if first == last:
        yield from _pieces(tensor[first], head, tail)
        return
    if head:
        yield from _pieces(tensor[first], head, inner)
        first += 1
    if first < last:
        yield tensor[first:last]
    if tail:
        yield from _pieces(tensor[last], 0, tail)


@lru_cache(maxsize=2)
def _sign_tables(dtype: torch.dtype) -> list[Tensor]:
    """The signs of each folding step, [blocks, elements that are folded over the others]."""
    signs = torch.from_numpy(sketches.position_signs()).to(dtype)
    return [signs[:, to:n].contiguous() for n, to in pairwise((BLOCK, *LENGTHS))]


class _Folding:
    """Folds a fixed number of whole blocks. Holds views only: making them costs as much as using them."""

    def __init__(self, folded: Tensor) -> None:
        """Takes a buffer of [num_blocks, LENGTHS[0]]."""
        self.num_blocks = len(folded)
        first, *tables = (signs[: self.num_blocks] for signs in _sign_tables(folded.dtype))
        self.group = SERIAL // LENGTHS[0]
        self.first = list(zip(first.split(self.group), folded.split(self.group), strict=True))
        self.steps = [
            step
            for signs, (n, to) in zip(tables, pairwise(LENGTHS), strict=True)
            for step in zip(
                folded[:, : n - to].split(SERIAL // (n - to)),
                signs.split(SERIAL // (n - to)),
                folded[:, to:n].split(SERIAL // (n - to)),
                strict=True,
            )
        ]
        self.buckets = folded[:, :K].numpy()

    def fold(self, values: Numbers) -> Numbers:
        """[num_blocks * BLOCK] -> [num_blocks, K]; valid until the next call."""
        low, high = torch.from_numpy(values).view(self.num_blocks, 2, -1).unbind(1)
        if len(self.first) == 1:
            signs, out = self.first[0]
            torch.addcmul(low, signs, high, out=out)
        else:
            lows, highs = low.split(self.group), high.split(self.group)
            for (signs, out), low, high in zip(self.first, lows, highs, strict=True):
                torch.addcmul(low, signs, high, out=out)
        for low, signs, high in self.steps:
            torch.addcmul(low, signs, high, out=low)
        return self.buckets


def fold_chunk(values: Numbers, position: int) -> npt.NDArray[np.float64]:
    """The part of the sketch that comes from one chunk.

    Args:
      values: [m] float32 or float64, finite, all in one chunk.
      position: global position of the first.
    Returns: [K].
    """
    chunk, offset = divmod(position, CHUNK)
    if offset:
        values = np.concatenate([np.zeros(offset, dtype=values.dtype), values])
    part = _fold(values, chunk)
    if values.dtype == np.float32 and not np.isfinite(part @ part):  # sums beyond 3.4e38
        part = _fold(values.astype(np.float64), chunk)
    return part


def _fold(values: Numbers, chunk: int) -> npt.NDArray[np.float64]:
    whole, rest = divmod(values.shape[0], BLOCK)
    rows = []
    if whole > 1:
        dtype = torch.float32 if values.dtype == np.float32 else torch.float64
        folded = WORKSPACE.folding(whole, dtype).fold(values[: whole * BLOCK])
        rows.append(folded.reshape(-1))
    elif whole:
        rows.append(sketches.fold_block(values[:BLOCK].copy()))
    if rest:
        rows.append(sketches.fold_block(values[whole * BLOCK :].copy(), whole))
    return sketches.fold_buckets(rows[0] if len(rows) == 1 else np.concatenate(rows), chunk)
