"""Walks over a tensor in logical order a chunk at a time, and folds a chunk into its sketch.

Guarantees: no copy of more than a chunk is made, whatever the strides; a contiguous CPU tensor of the
wanted dtype is not copied at all. Chunks begin at multiples of `sketch.CHUNK` of the *whole* sequence
(`start` is where this tensor begins in it), which is what lets partial sketches add up. Folding
uses elementwise operations only, so its result does not depend on the thread count.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dispatch_trace import sketch as sketches
from dispatch_trace.sketch import BLOCK, BLOCKS_PER_CHUNK, CHUNK, LENGTHS, K


class Workspace(threading.local):
    """Buffers of one thread, each about a chunk, reused from tensor to tensor.

    Fresh megabytes would cost more in page faults than the arithmetic that is done in them.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self._folders: dict[torch.dtype, _Folding] = {}

    def buffer(self, purpose: str, dtype: torch.dtype, size: int) -> Tensor:
        """[size] elements of a buffer that is overwritten by the next request for the same purpose."""
        found = self._buffers.get((purpose, dtype))
        if found is None:
            with torch.inference_mode(False):  # an inference tensor could not be written to later
                found = torch.empty(CHUNK, dtype=dtype, device="cpu")
            self._buffers[purpose, dtype] = found
        return found if size == CHUNK else found[:size]

    def folding(self, dtype: torch.dtype) -> _Folding:
        """The folding of whole chunks of a dtype."""
        found = self._folders.get(dtype)
        if found is None:
            with torch.inference_mode(False):
                found = _Folding(dtype)
            self._folders[dtype] = found
        return found


WORKSPACE = Workspace()  # one set of buffers a thread; holds no values between calls


def logical_chunks(tensor: Tensor, dtype: torch.dtype, start: int = 0) -> Iterator[tuple[int, Tensor]]:
    """Yields the elements of a strided tensor in logical order.

    Args:
      tensor: strided, any shape and strides, on any device.
      dtype: of what is yielded.
      start: global position of the tensor's first element.
    Yields: (global position of its first element, [m] values on the CPU with m <= CHUNK), never across a
      multiple of CHUNK. The values are only valid until the next ones are asked for, and must not be
      written to.
    """
    total = tensor.numel()
    contiguous = tensor.is_contiguous()
    flat = tensor.view(-1) if contiguous else tensor
    in_place = contiguous and tensor.dtype == dtype and tensor.device.type == "cpu"
    done = 0
    while done < total:
        count = min(CHUNK - (start + done) % CHUNK, total - done)
        if in_place:
            yield start + done, flat[done : done + count]
        else:
            buffer = WORKSPACE.buffer("chunk", dtype, count)
            if contiguous:
                buffer.copy_(flat[done : done + count])
            else:
                filled = 0
                for piece in _pieces(tensor, done, done + count):
                    end = filled + piece.numel()
                    buffer[filled:end].view(piece.shape).copy_(piece)
                    filled = end
            yield start + done, buffer
        done += count


def _pieces(tensor: Tensor, begin: int, end: int) -> Iterator[Tensor]:
    """Yields sub-tensors that together hold the logical elements [begin, end), in order."""
    if begin == 0 and end == tensor.numel():
        yield tensor
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


class _Folding:
    """Folds whole blocks of one dtype: sign tables, a buffer of half a chunk and views of both."""

    def __init__(self, dtype: torch.dtype) -> None:
        half = LENGTHS[0]
        signs = torch.from_numpy(sketches.position_signs()).to(dtype)
        self.first = signs[:, half:].contiguous()  # [blocks, half]
        self.folded = torch.empty(BLOCKS_PER_CHUNK, half, dtype=dtype, device="cpu")
        self.steps = [
            (self.folded[:, : n - to], signs[:, to:n].contiguous(), self.folded[:, to:n])
            for n, to in pairwise(LENGTHS)
        ]
        self.buckets = self.folded[:, :K].numpy()

    def fold(self, blocks: Tensor) -> npt.NDArray[np.floating]:
        """[b, BLOCK] -> [b, K]; valid until the next call."""
        half, num = LENGTHS[0], blocks.shape[0]
        whole = num == BLOCKS_PER_CHUNK
        first, folded = (self.first, self.folded) if whole else (self.first[:num], self.folded[:num])
        torch.addcmul(blocks[:, :half], first, blocks[:, half:], out=folded)
        for low, signs, high in self.steps:
            if not whole:
                low, signs, high = low[:num], signs[:num], high[:num]
            torch.addcmul(low, signs, high, out=low)
        return self.buckets if whole else self.buckets[:num]


def fold_chunk(values: Tensor, position: int) -> npt.NDArray[np.float64]:
    """The part of the sketch that comes from one chunk.

    Args:
      values: [m] float32 or float64, finite, all in one chunk.
      position: global position of the first.
    Returns: [K].
    """
    chunk, offset = divmod(position, CHUNK)
    if offset:
        values = torch.nn.functional.pad(values, (offset, 0))
    part = _fold(values, chunk)
    if values.dtype == torch.float32 and not np.isfinite(part @ part):  # sums beyond 3.4e38
        part = _fold(values.double(), chunk)
    return part


def _fold(values: Tensor, chunk: int) -> npt.NDArray[np.float64]:
    blocks, rest = divmod(values.shape[0], BLOCK)
    rows = []
    if blocks:
        whole = values if not rest else values[: blocks * BLOCK]
        folded = WORKSPACE.folding(values.dtype).fold(whole.view(blocks, BLOCK))
        rows.append(folded.reshape(-1))
    if rest:
        rows.append(sketches.fold_block(values[blocks * BLOCK :].numpy().copy(), blocks))
    return sketches.fold_buckets(rows[0] if len(rows) == 1 else np.concatenate(rows), chunk)
