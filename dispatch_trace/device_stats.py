"""Statistics and sketches on an accelerator: launched, never waited for, fetched together.

Guarantees: `DeviceLane.add` only launches work, on a stream of its own that waits for the program's; what
comes of any number of tensors leaves the device in one transfer, kept data through pinned memory. The same
operations run on any device with float64, the CPU among them, where the tests run them.

Counts are exact, sums of integers too; everything else is taken in float64, the sketch as well (`sketch`
folds float32 within a block): it agrees with the host's to about 1e-6 of the norm, not to the bit.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dispatch_trace import sketch as sketches
from dispatch_trace.moments import Value
from dispatch_trace.sketch import BLOCK, BLOCKS_PER_CHUNK, CHUNK, LENGTHS, SEED_BLOCK, K
from dispatch_trace.stats import Summary

_GROUP = 64 * CHUNK  # elements worked on at once: 111 MB of float64
_COUNTS = ("nan", "posinf", "neginf", "zeros")
_NUM_INTEGERS = 10  # the counts, min, max, and the sums of positive and of negative integers in two halves
_NUM_FLOATS = 6  # min, max, sum, abs_sum, sq_sum, quad_sum
_WIDTH = _NUM_INTEGERS + _NUM_FLOATS + K
_LOW = 0xFFFFFFFF
_LARGEST = float(np.finfo(np.float64).max)
_FLOATS = frozenset(
    getattr(torch, name)
    for name in (
        *("float64", "float32", "bfloat16", "float16"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    )
)
_INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def can_summarise(tensor: Tensor) -> bool:
    """Whether this way is open to a tensor; the rest goes the host's way."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and (tensor.dtype in _FLOATS or tensor.dtype in _INTEGERS)
    )


def launch(tensor: Tensor, sketch: bool = True) -> Tensor:
    """Statistics and sketch of a tensor, on its device; nothing is waited for.

    Args:
      tensor: one that `can_summarise`.
    Returns: [267] int64, for `read`: integers, then float64 numbers by their bits.
    """
    flat = tensor.detach().reshape(-1)
    integer = tensor.dtype in _INTEGERS
    parts = [
        _launch_group(flat[start : start + _GROUP], start, integer, sketch)
        for start in range(0, max(flat.numel(), 1), _GROUP)
    ]
    integers = torch.stack([part[0] for part in parts])
    floats = torch.stack([part[1] for part in parts])
    sketched = torch.stack([part[2] for part in parts]).sum(0)
    total_integers, total_floats = integers.sum(0), floats.sum(0)
    total_integers[4], total_integers[5] = integers[:, 4].amin(), integers[:, 5].amax()
    total_floats[0], total_floats[1] = floats[:, 0].amin(), floats[:, 1].amax()
    return torch.cat([total_integers, total_floats.view(torch.int64), sketched.view(torch.int64)])


def _launch_group(flat: Tensor, start: int, integer: bool, sketch: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(integers [10], floats [6], sketch [K] float64) of a run of elements, `start` whole chunks in."""
    device = flat.device
    integers = torch.zeros(_NUM_INTEGERS, dtype=torch.int64, device=device)
    floats = torch.zeros(_NUM_FLOATS, dtype=torch.float64, device=device)
    floats[0], floats[1] = torch.inf, -torch.inf
    folded = torch.zeros(K, dtype=torch.float64, device=device)
    if not flat.numel():
        return integers, floats, folded
    values = flat.to(torch.float64)
    if integer:
        whole = flat.to(torch.int64)
        positive, negative = whole.clamp(min=0), whole.clamp(max=0)
        halves = [positive >> 32, positive & _LOW, negative >> 32, negative & _LOW]
        integers[4], integers[5] = whole.amin(), whole.amax()
        integers[6:] = torch.stack([half.sum() for half in halves])
        integers[3] = (whole == 0).sum()
    else:
        finite = torch.isfinite(values)
        counts = (torch.isnan(values), values == torch.inf, values == -torch.inf, values == 0)
        integers[:4] = torch.stack([count.sum() for count in counts])
        floats[0] = torch.where(finite, values, torch.inf).amin()
        floats[1] = torch.where(finite, values, -torch.inf).amax()
        values = torch.where(finite, values, 0.0)
    square = values * values
    floats[2:] = torch.stack([values.sum(), values.abs().sum(), square.sum(), (square * square).sum()])
    return integers, floats, _fold(values, start // CHUNK) if sketch else folded


def _fold(values: Tensor, first_chunk: int) -> Tensor:
    """The sketch [K] of finite float64 [n], which begin at a chunk; see `sketch` for the rule."""
    blocks = -(-values.numel() // BLOCK)
    chunks = -(-blocks // BLOCKS_PER_CHUNK)
    width = min(blocks, BLOCKS_PER_CHUNK)  # one chunk need not be whole
    padded = torch.zeros(chunks * width * BLOCK, dtype=torch.float64, device=values.device)
    padded[: values.numel()] = values
    folded = padded.view(chunks, width, BLOCK)
    signs = _position_signs(values.device)[:width]
    n = BLOCK
    for length in LENGTHS:
        folded[..., : n - length] += folded[..., length:n] * signs[:, length:n]
        n = length
    buckets = folded[..., :K] * _block_signs(values.device, first_chunk, chunks)[:, :width]
    rows = buckets.reshape(chunks, width * K)
    n = width * K
    for length in LENGTHS:
        if n > length:
            rows[:, : n - length] += rows[:, length:n]
            n = length
    return rows[:, :K].sum(0)


@lru_cache(maxsize=8)
def _position_signs(device: torch.device) -> Tensor:
    return torch.from_numpy(sketches.position_signs()).to(device=device, dtype=torch.float64)


def _block_signs(device: torch.device, first: int, count: int) -> Tensor:
    """`sketch.block_signs` of several chunks, [count, blocks, K], made on the device."""
    blocks = torch.arange(first * BLOCKS_PER_CHUNK, (first + count) * BLOCKS_PER_CHUNK, device=device)
    mixed = _mix((blocks + SEED_BLOCK) & _LOW)
    hashes = _mix((mixed[:, None] + torch.arange(K, device=device)) & _LOW)
    signs = (1 - 2 * (hashes >> 31)).to(torch.float64).view(count, BLOCKS_PER_CHUNK, K)
    if first == 0:
        signs[0, 0] = 1.0
    return signs


def _mix(x: Tensor) -> Tensor:
    """`sketch.mix` on int64 that hold 32-bit numbers; products wrap, their low half is right."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & _LOW
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & _LOW
    return x ^ (x >> 16)


def read(row: np.ndarray[Any, np.dtype[np.int64]], tensor: Tensor, sketch: bool) -> Summary:
    """What `launch` gave, on the host: [267]; of the tensor only dtype and size are looked at."""
    nan, posinf, neginf, zeros, low, high, *sums = row[:_NUM_INTEGERS].tolist()
    floats = row[_NUM_INTEGERS : _NUM_INTEGERS + _NUM_FLOATS].view(np.float64)
    least, largest, total, abs_total, square, quad = np.nan_to_num(floats, posinf=_LARGEST).tolist()
    n = tensor.numel()
    stats: dict[str, Value] = {"n": n} | dict(zip(_COUNTS, (nan, posinf, neginf, zeros), strict=True))
    if tensor.dtype in _INTEGERS:
        positive, negative = (sums[0] << 32) + sums[1], (sums[2] << 32) + sums[3]
        stats |= {"min": low if n else None, "max": high if n else None}
        stats |= {"sum": positive + negative, "abs_sum": positive - negative}
    else:
        some = n > nan + posinf + neginf
        stats |= {"min": least + 0.0 if some else None, "max": largest + 0.0 if some else None}
        stats |= {"sum": total, "abs_sum": abs_total}
    stats |= {"sq_sum": square, "quad_sum": quad}
    folded = sketches.finish(row[_NUM_INTEGERS + _NUM_FLOATS :].view(np.float64)) if sketch else None
    return Summary(stats, folded)


@dataclass(slots=True)
class Arrival:
    """One value that was sent through a lane, on the host.

    Attributes:
      key: what the sender knows it by.
      host: its data, None where it was not kept.
      summary: None where none was asked for.
    """

    key: Any
    host: Tensor | None
    summary: Summary | None


@dataclass(slots=True, eq=False)
class DeviceLane:
    """The way of one device's values to the host. For one thread.

    Attributes:
      num_transfers: of results, so far; one for each `collect` that had any.
    """

    device: torch.device
    sketch: bool = True
    num_transfers: int = 0
    _stream: Any = None
    _sent: list[tuple[Any, Tensor | None, Tensor | None, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)

    def __bool__(self) -> bool:
        return bool(self._sent)

    def add(self, key: Any, tensor: Tensor, *, ready: Any, keep: bool, summarise: bool) -> None:
        """Launches what is wanted of a snapshot; waits for nothing.

        Args:
          ready: event after which the snapshot holds its value, None where it does already.
          keep: its data is wanted on the host.
        """
        with self._on_stream():
            if ready is not None and self._stream is not None:
                self._stream.wait_event(ready)
            result = launch(tensor, self.sketch) if summarise else None
            host = None
            if keep:
                pinned = self._stream is not None
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
                host.copy_(tensor, non_blocking=True)
            if self._stream is not None:
                tensor.record_stream(self._stream)  # freed memory must not be handed out before we are done
        self._sent.append((key, host, result, tensor.to(device="meta")))

    def collect(self) -> list[Arrival]:
        """Waits for what was sent, on this thread only, and fetches all results in one transfer."""
        sent, self._sent = self._sent, []
        results = [result for _, _, result, _ in sent if result is not None]
        with self._on_stream():
            table = None
            if results:
                table = torch.empty(
                    (len(results), _WIDTH), dtype=torch.int64, pin_memory=self._stream is not None
                )
                table.copy_(torch.stack(results), non_blocking=True)
                self.num_transfers += 1
            if self._stream is not None:
                self._stream.synchronize()
        rows = iter(table.numpy() if table is not None else ())
        return [
            Arrival(key, host, read(next(rows), like, self.sketch) if result is not None else None)
            for key, host, result, like in sent
        ]

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()
