"""What tensors are: the memory that they lie in, their geometry in it, and how its content came about.

Identity is the storage plus (dtype, offset, shape, strides): two Python tensors with the same five are
one value.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from dispatch_trace.geometry import extent_of
from dispatch_trace.schema import Content, SlotFacts

Geometry = tuple[Any, ...]  # (dtype, offset, shape, strides, flags)

_is_cow: Any = torch._C._is_cow_tensor  # type: ignore[attr-defined]


class History:
    """How the content of a storage came about, as far as records show it.

    Attributes:
      definitions: geometry -> (seq, slot, number of writes seen before).
      writes: (seq, slot, first byte, byte after the last), in order.
      contents: geometry -> snapshot that still holds.
      geometries: geometries written by recorded ops, piece by piece.
      leaves: geometries first read while no record had produced their content.
      parameters: geometry -> seq of the record of the parameter that it is.
      mask: of a buffer from `empty`, which elements have been written.
    """

    __slots__ = ("contents", "definitions", "geometries", "leaves", "mask", "parameters", "writes")

    def __init__(self) -> None:
        self.definitions: dict[Geometry, tuple[int, int, int]] = {}
        self.writes: list[tuple[int, int, int, int]] = []
        self.contents: dict[Geometry, Content] = {}
        self.geometries: set[Geometry] = set()
        self.leaves: set[Geometry] = set()
        self.parameters: dict[Geometry, int] = {}
        self.mask: torch.Tensor | None = None


class StorageEntry:
    """What is known of one storage.

    Attributes:
      number: the storage's number in the trace.
      weak: weak reference to the C++ storage (its address stays taken while it is held).
      origin: "op" (a recorded op allocated it), "empty" (an `empty*` did), "leaf" (first seen as input).
      version: largest version counter that recorded writes account for.
      versions: whether its tensors count versions; those made in inference mode do not.
      facts: geometry -> what a slot says that reads it as it is now. Only of what one record defined whole,
        on the CPU; whatever changes the answer takes it out again.
      told: the history, None while the facts say all: most storages live for an op or two.
    """

    __slots__ = ("alignment", "facts", "nbytes", "number", "origin", "told", "version", "versions", "weak")

    def __init__(self, number: int, weak: int, nbytes: int, alignment: int, origin: str) -> None:
        self.number = number
        self.weak = weak
        self.nbytes = nbytes
        self.alignment = alignment
        self.origin = origin
        self.facts: dict[Geometry, SlotFacts] = {}
        self.told: History | None = None
        self.version = 0
        self.versions = True

    @property
    def history(self) -> History:
        """How the content came about."""
        told = self.told
        if told is None:
            told = self.told = History()
            for g, fact in self.facts.items():
                told.definitions[g] = (*fact[3][-1], 0)
                if fact[4] is not None:
                    told.contents[g] = fact[4]
        return told

    def forget(self) -> None:
        """The content changed in a way that no record shows."""
        self.facts.clear()
        self.told = None
        self.origin = "leaf"


class ObjectEntry(StorageEntry):
    """A tensor without a storage of its own (sparse, nested, quantised), known by its Python object."""

    __slots__ = ("ref",)

    def __init__(self, number: int, ref: weakref.ref[torch.Tensor], origin: str) -> None:
        super().__init__(number, 0, 0, 0, origin)
        self.ref = ref


def producers_of(
    entry: StorageEntry, defined: tuple[int, int, int] | None, g: Geometry | None
) -> tuple[tuple[int, int], ...]:
    """The record that defined a value, then every later write that may overlap it."""
    if defined is None:
        if not entry.history.definitions and not entry.history.writes:
            return ()
        first, last = memory_of(g) if g is not None else (0, 0)
        base = [
            (seq, index)
            for h, (seq, index, _) in entry.history.definitions.items()
            if _covers(h, first, last)
        ]
        writes = [(w[0], w[1]) for w in entry.history.writes if w[2] < last and w[3] > first]
        return tuple(base[:1] + [w for w in writes if w not in base[:1]])
    seq, index, before = defined
    if before == len(entry.history.writes):
        return ((seq, index),)
    first, last = memory_of(g) if g is not None else (0, 0)
    later = [(w[0], w[1]) for w in entry.history.writes[before:] if w[2] < last and w[3] > first]
    return ((seq, index), *later)


def _covers(g: Geometry, first: int, last: int) -> bool:
    if g == ():
        return True
    start, end = memory_of(g)
    return start <= first and end >= last


def geometry(tensor: torch.Tensor) -> Geometry | None:
    """Geometry of a plain strided tensor, None for every other layout."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return None
    strides = tensor.stride()
    flags = (1 if tensor.is_conj() else 0) | (2 if tensor.is_neg() else 0)
    return (tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), strides, flags)


def memory_of(g: Geometry) -> tuple[int, int]:
    """First byte and the byte after the last that a geometry can touch."""
    dtype, offset, shape, strides, _ = g
    size: int = dtype.itemsize
    return offset * size, (offset + extent_of(shape, strides)) * size


def is_shared(tensor: torch.Tensor, g: Geometry) -> bool:
    """Whether a tensor fills a storage that is copy-on-write already, so that one more copy costs nothing.

    Nobody can have a pointer into such a storage to write through.
    """
    return bool(_is_cow(tensor)) and is_whole(g, tensor.untyped_storage().nbytes())


def size_of(g: Geometry) -> int:
    """Bytes of all elements."""
    dtype, _, shape, _, _ = g
    n: int = dtype.itemsize
    for dim in shape:
        n *= dim
    return n


def is_whole(g: Geometry, nbytes: int) -> bool:
    """Whether a geometry fills a storage of this size, each element once."""
    return g[1] == 0 and size_of(g) == nbytes and 0 not in g[3]


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Shape of any tensor; -1 where a dimension is ragged or symbolic."""
    try:
        shape = tuple(tensor.shape)
    except RuntimeError:  # strided nested: only the number of components is one number
        return (int(tensor.size(0)), *(-1 for _ in range(tensor.dim() - 1)))
    return tuple(s if type(s) is int else -1 for s in shape)
