"""Which elements of a value a slot shows, and in which order: views replayed on numbered elements.

Two programs may look at one value through different views and yet see the same: one splits and transposes,
the other views and permutes. Names and arguments of views do not tell; the elements do.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dispatch_trace.align.canon import SAME_ORDER, short
from dispatch_trace.align.graph import Origin, Program
from dispatch_trace.schema import StoredRecord, StoredSlot

Numbers: TypeAlias = npt.NDArray[np.int64]

# Numbering the elements of larger values takes too long for what it tells.
MAX_ELEMENTS = 1 << 22


def elements(
    program: Program, record: StoredRecord, slot: StoredSlot, origin: Origin, numbers: Numbers | None = None
) -> Numbers | None:
    """The elements of an origin that a slot shows.

    Args:
      record, slot: what reads the origin.
      numbers: of the origin's elements, in its shape; None: 0, 1, 2 ...
    Returns: [*slot.shape] numbers, None where a view on the way is not known.
    """
    source = program.slot(origin.value)
    if np.prod([float(s) for s in source.shape]) > MAX_ELEMENTS:
        return None
    shown = np.arange(int(np.prod(source.shape)), dtype=np.int64) if numbers is None else numbers
    shown = shown.reshape(source.shape)
    readers = [*(program.records[seq] for seq in origin.edges), record]
    slots = [*(program.edge(program.records[seq]) for seq in origin.edges), slot]
    for (edge, reader), read in zip(pairwise(readers), slots[1:], strict=True):
        after: Numbers | None = None if read is None else _through(program, edge, reader, read, shown)
        if after is None:
            return None
        shown = after
    return shown


def _through(
    program: Program, edge: StoredRecord, reader: StoredRecord, read: StoredSlot, shown: Numbers
) -> Numbers | None:
    """What an edge op shows to the slot that reads it."""
    outputs = program.outputs(edge)
    index = next((i for seq, i in reversed(read.producers) if seq == edge.seq), None)
    number = next((n for n, out in enumerate(outputs) if out.index == index), None)
    if number is None:
        return None
    shape, name, args = outputs[number].shape, short(edge.op), dict(edge.args)
    try:
        found = _view(name, args, shown, shape, [out.shape for out in outputs], number)
    except (KeyError, TypeError, ValueError, IndexError):
        return None
    if found is None or found.shape != tuple(shape):
        return None
    shows: Numbers = found
    return shows


def _view(
    name: str,
    args: dict[str, Any],
    x: npt.NDArray[Any],
    shape: tuple[int, ...],
    shapes: list[tuple[int, ...]],
    number: int,
) -> Any:
    if name in SAME_ORDER:
        return x.reshape(shape)
    match name.removesuffix("_copy"):
        case "t" | "numpy_T":
            return x.T
        case "mT" | "adjoint":
            return x.swapaxes(-1, -2)
        case "transpose" | "swapaxes" | "swapdims":
            return x.swapaxes(args["dim0"], args["dim1"])
        case "permute":
            return x.transpose(args["dims"])
        case "select":
            return x.take(args["index"], axis=args["dim"])
        case "slice":
            dim, end = args.get("dim", 0), args.get("end")
            cut = slice(args.get("start"), end, args.get("step", 1))
            return x[(slice(None),) * (dim % x.ndim) + (cut,)]
        case "expand" | "expand_as":
            return np.broadcast_to(x, shape)
        case "unbind":
            return x.take(number, axis=args.get("dim", 0))
        case "split" | "split_with_sizes" | "chunk" | "unsafe_split" | "unsafe_chunk" | "tensor_split":
            dim = args.get("dim", 0) % x.ndim
            start = sum(s[dim] for s in shapes[:number])
            return x[(slice(None),) * dim + (slice(start, start + shape[dim]),)]
        case "squeeze_dims":
            return x.reshape(shape)
    return None
