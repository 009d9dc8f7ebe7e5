"""Walks over a tensor of any strides in logical order, one chunk of numbers at a time.

Guarantees: no copy of more than a chunk is made, whatever the strides; a contiguous tensor of the
wanted dtype is not copied at all. Chunks start at multiples of the chunk size of the *whole* sequence
(`start` is where this tensor begins in it), which is what lets partial sketches add up.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def logical_chunks(
    tensor: Tensor, size: int, *, dtype: torch.dtype, start: int = 0
) -> Iterator[tuple[int, Tensor]]:
    """Yields the elements of a strided tensor in logical order.

    Args:
      tensor: strided, any shape and strides, on any device.
      size: elements in a chunk.
      dtype: of what is yielded.
      start: global position of the tensor's first element.
    Yields: (global position of its first element, [m] values on the CPU with m <= size); never across a
      multiple of `size`. The values are only valid until the next one is asked for, and must not be
      written to.
    """
    total = tensor.numel()
    direct = tensor.is_contiguous() and tensor.device.type == "cpu"
    flat = tensor.view(-1) if direct else tensor
    buffer = None
    done = 0
    while done < total:
        count = min(size - (start + done) % size, total - done)
        if direct and tensor.dtype == dtype:
            yield start + done, flat[done : done + count]
        else:
            if buffer is None:
                buffer = torch.empty(min(size, total), dtype=dtype, device="cpu")
            if direct:
                buffer[:count].copy_(flat[done : done + count])
            else:
                filled = 0
                for piece in _pieces(tensor, done, done + count):
                    end = filled + piece.numel()
                    buffer[filled:end].view(piece.shape).copy_(piece)
                    filled = end
            yield start + done, buffer[:count]
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
