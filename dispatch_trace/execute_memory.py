"""The memory of a run from a recording: storages by number, tensors as strided views of them.

A recorded tensor is (storage number, offset, shape, strides, dtype). Here each number has a block of real
memory and a tensor is a view of it, so aliases alias, a write through a view is seen by every other
view, and kernels meet the strides and the alignment that they met when the trace was recorded.

Two kinds of memory. *Native* memory holds the recorded dtypes, byte for byte. *Wide* memory holds
float16, bfloat16 and float32 as float64 (and their complex kin as complex128) at the same element offsets, so
a storage grows by the ratio of the sizes; integers, bool and float8 stay as they are. A storage that
is looked at through two dtypes of different width (`view.dtype`) has one block for each width; what was
written through one reaches the other in the recorded precision.

What has no geometry of its own (sparse, nested, quantised, meta tensors) is kept whole, as an object. So is
what came out in another size than recorded, and every view of it: there the recorded geometry is but a name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dispatch_trace.geometry import extent_of
from dispatch_trace.schema import StoredSlot
from dispatch_trace.store.layouts import dtype_from_name

# What wide memory holds the recorded dtypes as, by name.
HELD_AS = {
    "float16": "float64",
    "bfloat16": "float64",
    "float32": "float64",
    "complex32": "complex128",
    "complex64": "complex128",
}
_WIDENED = {name: dtype_from_name(held) for name, held in HELD_AS.items()}
# Which of these may share a block: complex numbers are pairs of their own float type.
_FAMILY = {
    "float16": "float16",
    "complex32": "float16",
    "bfloat16": "bfloat16",
    "float32": "float32",
    "complex64": "float32",
}
_FAMILY_DTYPE = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ALIGNMENT = 64  # of torch's own CPU allocator

Geometry = tuple[int, int | None, tuple[int, ...], tuple[int, ...] | None, str, str]


def dtype_family(name: str) -> str:
    """The dtype whose memory holds tensors of a dtype: complex numbers are pairs of their own float."""
    return _FAMILY.get(name, "float64" if name == "complex128" else name)


def has_geometry(slot: StoredSlot) -> bool:
    """Whether the tensor of `slot` is a plain strided view of a numbered storage."""
    return (
        slot.storage >= 0
        and slot.strides is not None
        and slot.offset is not None
        and slot.layout.startswith("strided")
        and slot.device != "meta"
    )


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as integers of the same width (a view), so that copies keep NaN payloads and any dtype."""
    if tensor.is_conj() or tensor.is_neg():
        return tensor
    if tensor.dtype == torch.complex128:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view(_BITS[tensor.element_size()])


def assign(view: torch.Tensor, value: torch.Tensor) -> None:
    """Writes `value` into `view`, bit for bit when the dtypes agree, also where elements of `view` coincide.

    Args:
      view, value: [*shape]; `view` may repeat memory (`expand`, overlapping windows) provided that `value`
        says the same for coinciding elements.
    """
    for dim, stride in enumerate(view.stride()):
        if stride == 0 and view.shape[dim] > 1:
            view, value = view.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    if view.numel() == 0:
        return
    lazy = view.is_conj() or value.is_conj() or view.is_neg() or value.is_neg()
    if view.dtype == value.dtype and not lazy:
        view, value = bits_of(view), bits_of(value)
    if _coincides(view):
        flat = view.as_strided((extent_of(view.shape, view.stride()),), (1,), view.storage_offset())
        index = torch.arange(flat.numel()).as_strided(view.shape, view.stride(), 0)
        flat[index.reshape(-1)] = value.reshape(-1).to(flat.dtype)
    else:
        view.copy_(value)


def _coincides(view: torch.Tensor) -> bool:
    reach = 0
    for stride, size in sorted(zip(view.stride(), view.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


@dataclass(slots=True)
class _Block:
    """Real memory of one storage at one width. `time` orders writes among the widths of a storage."""

    storage: torch.UntypedStorage
    time: int
    owner: Any = None  # keeps foreign memory alive


class Memory:
    """Storages and objects of one run.

    Args:
      wide: hold floating point as float64 (see the module's docstring).
    """

    def __init__(self, *, wide: bool) -> None:
        self.wide = wide
        self._blocks: dict[int, dict[str, _Block]] = {}
        self._objects: dict[int, torch.Tensor] = {}
        # Of other sizes than recorded; None where two tensors have one recorded geometry.
        self._resized: dict[int, dict[Geometry, torch.Tensor | None]] = {}
        self._contents: dict[int, dict[Geometry, int]] = {}  # what was loaded and not written since
        self._missing: set[int] = set()
        # Of storages of which unwritten memory was loaded: its dtype, and which elements were written since.
        self._written: dict[int, tuple[str, torch.Tensor]] = {}
        self._time = 0

    def dtype(self, name: str) -> torch.dtype:
        """What the recorded dtype `name` is held as."""
        return (_WIDENED.get(name) if self.wide else None) or dtype_from_name(name)

    def widened(self, name: str) -> bool:
        """Whether the recorded dtype `name` is held as another one."""
        return self.wide and name in _WIDENED

    # -- reading -------------------------------------------------------------------------------------

    def holds(self, slot: StoredSlot) -> bool:
        """Whether there is a value to read at `slot`."""
        if slot.storage in self._missing and not self.is_loaded(slot):
            return False
        if slot.storage in self._resized:
            return self._resized[slot.storage].get(geometry(slot)) is not None
        return slot.storage in (self._blocks if has_geometry(slot) else self._objects)

    def is_resized(self, slot: StoredSlot) -> bool:
        """Whether what lies in the storage of `slot` came out in another size than recorded."""
        return slot.storage in self._resized

    def read(self, slot: StoredSlot) -> torch.Tensor:
        """The tensor of `slot` as the program held it: a view of live memory, or the object kept for it.

        Raises:
          KeyError: nothing was put there.
        """
        resized = self._resized.get(slot.storage, {}).get(geometry(slot))
        if resized is not None:
            return resized
        if has_geometry(slot):
            return self._view(slot)
        if slot.device == "meta" and slot.strides is not None:
            dtype = self.dtype(slot.dtype)
            return torch.empty_strided(slot.shape, slot.strides, dtype=dtype, device="meta")
        return self._objects[slot.storage]

    def _view(self, slot: StoredSlot) -> torch.Tensor:
        assert slot.strides is not None and slot.offset is not None
        dtype = self.dtype(slot.dtype)
        need = (slot.offset + extent_of(slot.shape, slot.strides)) * dtype.itemsize
        block = self._block(slot, need)
        tensor = torch.empty(0, dtype=dtype)
        tensor.set_(block.storage, slot.offset, slot.shape, slot.strides)
        if "+conj" in slot.layout:
            tensor = torch.conj(tensor)
        if "+neg" in slot.layout:
            tensor = torch._neg_view(tensor)
        return tensor

    # -- writing -------------------------------------------------------------------------------------

    def is_loaded(self, slot: StoredSlot) -> bool:
        """Whether the content of `slot` was loaded at its place and no op wrote to the storage since."""
        return self._contents.get(slot.storage, {}).get(geometry(slot)) == slot.content

    def load(self, slot: StoredSlot, value: torch.Tensor) -> None:
        """Puts the recorded value of `slot` (its content) where the slot says.

        Args:
          slot: the storage is made if it does not exist yet.
          value: [*slot.shape], in the recorded dtype.
        """
        value = self._widen(value)
        self._resized.pop(slot.storage, None)
        if has_geometry(slot):
            if slot.uninitialised:
                value = self._beside_written(slot, value)
            if slot.storage in self._blocks or not self._adopt(slot, value):
                assign(self._view(slot), value)
            self._stamp(slot)
        else:
            self._objects[slot.storage] = value
        if _is_whole(slot):
            self._missing.discard(slot.storage)
        self._contents.setdefault(slot.storage, {})[geometry(slot)] = slot.content

    def _beside_written(self, slot: StoredSlot, value: torch.Tensor) -> torch.Tensor:
        """What nobody wrote of `slot`, beside what ops of this run wrote: the recording may be coarser."""
        written = self._written_of(slot)
        if written is None:
            size = slot.storage_bytes // dtype_from_name(slot.dtype).itemsize
            self._written[slot.storage] = (slot.dtype, torch.zeros(size, dtype=torch.bool))
            return value
        return torch.where(written, self._view(slot), value)

    def _written_of(self, slot: StoredSlot) -> torch.Tensor | None:
        """[*shape] which elements of a strided slot were written since; None where that is not followed."""
        dtype, written = self._written.get(slot.storage, ("", None))
        if written is None or dtype != slot.dtype:
            return None
        assert slot.strides is not None and slot.offset is not None
        return written.as_strided(slot.shape, slot.strides, slot.offset)

    def _adopt(self, slot: StoredSlot, value: torch.Tensor) -> bool:
        """Takes over the memory of `value` where it is what the storage should be, instead of copying it."""
        dtype, storage = self.dtype(slot.dtype), storage_id(value)
        if not storage or value.dtype != dtype or slot.offset or value.storage_offset():
            return False
        num_bytes = slot.storage_bytes * self._scale(self._family(slot.dtype))
        if value.untyped_storage().nbytes() != num_bytes or not _same_strides(value, slot):
            return False
        if (value.data_ptr() - slot.alignment) % _ALIGNMENT or value.is_conj() or value.is_neg():
            return False
        self._blocks[slot.storage] = {self._family(slot.dtype): _Block(value.untyped_storage(), 0)}
        return True

    def touch(self, slot: StoredSlot) -> None:
        """Notes that an op wrote to the storage of `slot`."""
        self._contents.pop(slot.storage, None)
        if has_geometry(slot):
            self._stamp(slot)
            written = self._written_of(slot)
            if written is not None:
                assign(written, torch.ones(slot.shape, dtype=torch.bool))

    def _stamp(self, slot: StoredSlot) -> None:
        self._time += 1
        block = self._blocks.get(slot.storage, {}).get(self._family(slot.dtype))
        if block is not None:
            block.time = self._time

    def lose(self, slot: StoredSlot) -> None:
        """Notes that the value at `slot` is not known: what reads its storage cannot run."""
        if slot.storage >= 0:
            self._missing.add(slot.storage)
            self._contents.pop(slot.storage, None)

    def bind(
        self, slot: StoredSlot, result: torch.Tensor, *, inputs: frozenset[int] = frozenset()
    ) -> tuple[torch.Tensor, str]:
        """Ties what an op returned to the storage that the recording gives it.

        Args:
          slot: an output slot.
          result: [*slot.shape] what the op returned here.
          inputs: `storage_id`s of the op's arguments.
        Returns: the tensor now standing for the slot, and "" or how its memory differs from the recorded one.
        """
        result = self._widen(result)
        if not has_geometry(slot) or result.is_nested or result.layout != torch.strided:
            self._objects[slot.storage] = result
            return result, ""
        dtype = self.dtype(slot.dtype)
        if result.dtype != dtype:
            result = result.to(dtype)
        same = result.storage_offset() == slot.offset and _same_strides(result, slot)
        aligned = self.wide or (result.untyped_storage().data_ptr() - slot.alignment) % _ALIGNMENT == 0
        number, family = slot.storage, self._family(slot.dtype)
        if number not in self._blocks and same and aligned and storage_id(result) not in inputs:
            self._time += 1
            self._blocks[number] = {family: _Block(result.untyped_storage(), self._time)}
            self._missing.discard(number)
            return result, ""
        block = self._blocks.get(number, {}).get(family)
        if block is not None and same and block.storage._cdata == storage_id(result):
            return result, ""
        note = "" if same else "strides differ from the recorded ones"
        if number in self._blocks and not self.wide:
            note = "does not share memory as recorded"
        view = self._view(slot)
        assign(view, result)
        self.touch(slot)
        return view, note

    def keep_resized(self, slot: StoredSlot, result: torch.Tensor) -> None:
        """Keeps what an op returned for a slot that the recording gives another size, or a view of such.

        Args:
          slot: an output slot of a plain strided tensor; result: of any shape.
        """
        held = self._resized.setdefault(slot.storage, {})
        result, place = self._widen(result), geometry(slot)
        known = held.setdefault(place, result)
        if known is not None and known is not result and not _is_same(known, result):
            held[place] = None
        self._missing.discard(slot.storage)

    def _widen(self, value: torch.Tensor) -> torch.Tensor:
        if not self.wide or value.is_quantized:
            return value
        dtype = _WIDENED.get(str(value.dtype).removeprefix("torch."))
        return value if dtype is None else copy_of(value, dtype)

    # -- blocks --------------------------------------------------------------------------------------

    def _family(self, dtype: str) -> str:
        return _FAMILY.get(dtype, "") if self.wide else ""

    def _block(self, slot: StoredSlot, need: int) -> _Block:
        """The block behind `slot`, of at least `need` bytes, up to date with the storage's other widths."""
        family = self._family(slot.dtype)
        blocks = self._blocks.setdefault(slot.storage, {})
        size = max(need, slot.storage_bytes * self._scale(family))
        block = blocks.get(family)
        newest = max(blocks.values(), key=lambda b: b.time, default=None)
        if block is None:
            block = blocks[family] = _allocate(size, 0 if family else slot.alignment)
            if newest is not None:
                self._convert(blocks, newest, block, family)
        elif newest is not None and newest.time > block.time:
            self._convert(blocks, newest, block, family)
        if block.storage.nbytes() < need:
            grown = _allocate(size, slot.alignment)
            _bytes(grown)[: block.storage.nbytes()] = _bytes(block)
            grown.time = block.time
            block = blocks[family] = grown
        return block

    def _scale(self, family: str) -> int:
        return 8 // _FAMILY_DTYPE[family].itemsize if family else 1

    def _convert(self, blocks: dict[str, _Block], source: _Block, target: _Block, family: str) -> None:
        """Brings `target` up to date with `source` through the bytes that the program would have held."""
        origin = next(name for name, block in blocks.items() if block is source)
        raw = _bytes(source)
        if origin:
            raw = raw.view(torch.float64).to(_FAMILY_DTYPE[origin]).view(torch.uint8)
        if not family:
            size = min(raw.numel(), target.storage.nbytes())
            _bytes(target)[:size] = raw[:size]
        else:
            narrow = _FAMILY_DTYPE[family]
            held = _bytes(target).view(torch.float64)
            size = min(raw.numel() // narrow.itemsize, held.numel())
            values = raw[: size * narrow.itemsize].view(narrow)
            # What did not change keeps its float64 value.
            changed = bits_of(held[:size].to(narrow)) != bits_of(values)
            held[:size] = torch.where(changed, values.to(torch.float64), held[:size])
        target.time = source.time

    # -- freeing -------------------------------------------------------------------------------------

    def free(self, numbers: Iterable[int]) -> None:
        """Forgets storages that nothing reads any more."""
        for number in numbers:
            self._blocks.pop(number, None)
            self._objects.pop(number, None)
            self._resized.pop(number, None)
            self._contents.pop(number, None)
            self._missing.discard(number)
            self._written.pop(number, None)


def storage_id(tensor: torch.Tensor) -> int:
    """Identity of the storage behind a strided tensor, 0 where it has none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return 0


def _is_whole(slot: StoredSlot) -> bool:
    if not has_geometry(slot):
        return True
    return math.prod(slot.shape) * dtype_from_name(slot.dtype).itemsize >= slot.storage_bytes


def geometry(slot: StoredSlot) -> Geometry:
    """What two slots that stand for one tensor have in common."""
    return (slot.storage, slot.offset, slot.shape, slot.strides, slot.dtype, slot.layout)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors show the same elements of one memory."""
    places = [(x.data_ptr(), x.shape, x.stride(), x.dtype) for x in (one, other)]
    return one.numel() > 0 and places[0] == places[1]


def _same_strides(tensor: torch.Tensor, slot: StoredSlot) -> bool:
    assert slot.strides is not None
    if tensor.shape != slot.shape:
        return False
    pairs = zip(tensor.stride(), slot.strides, tensor.shape, strict=True)
    return tensor.numel() == 0 or all(a == b for a, b, size in pairs if size != 1)


def copy_of(value: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A copy, in another dtype where one is given, that repeats in memory what `value` repeats (`expand`)."""
    plain = value.layout == torch.strided and not value.is_nested and not value.is_quantized
    core = value
    if plain and 0 in value.stride():
        for dim, stride in enumerate(value.stride()):
            if stride == 0 and value.shape[dim] > 1:
                core = core.narrow(dim, 0, 1)
    core = core.clone() if dtype is None else core.to(dtype)
    return core.expand(value.shape) if core.shape != value.shape else core


def _bytes(block: _Block) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(block.storage)


def _allocate(num_bytes: int, alignment: int) -> _Block:
    """Zeroed memory whose address is `alignment` modulo 64; only ordinary memory can be resized later."""
    if alignment == 0:
        memory = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
        if memory.data_ptr() % _ALIGNMENT == 0:
            return _Block(memory.untyped_storage(), 0)
    owner = np.zeros(num_bytes + 2 * _ALIGNMENT, dtype=np.uint8)
    start = (alignment - owner.ctypes.data) % _ALIGNMENT
    part = owner[start : start + max(num_bytes, 1)]
    return _Block(torch.from_numpy(part).untyped_storage(), 0, owner)
