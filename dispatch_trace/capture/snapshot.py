"""What a tensor is, where its content came from, and a copy of it that the program cannot change.

Guarantees: a storage is known by its C++ object, held by a weak reference, so that an address is never
mistaken for another storage; the program's tensors are not kept alive; the observed program never sees
a copy-on-write storage that somebody else may already hold a raw pointer into.

Identity is the storage plus (dtype, offset, shape, strides): two Python tensors with the same five are
one value. A write through any of them, seen by `written` or by the version counter, ends the value.
Writes that nobody sees (NumPy, `.data` outside the recorder) leave it standing: docs/limits.md.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

from dispatch_trace.capture.known_parameters import Key, KnownParameters
from dispatch_trace.capture.storage import (
    Geometry,
    ObjectEntry,
    StorageEntry,
    geometry,
    is_shared,
    is_whole,
    memory_of,
    producers_of,
    shape_of,
    size_of,
)
from dispatch_trace.schema import SLOT_IS_NEW, SLOT_LEAF, Content, RawSlot, Save
from dispatch_trace.store.layouts import dtype_name
from dispatch_trace.store.writer import TraceWriter

_LAYOUT_OF_FLAGS = ("strided", "strided+conj", "strided+neg", "strided+conj+neg")
_expired: Any = torch.UntypedStorage._expired
_free_weak: Any = torch.UntypedStorage._free_weak_ref
_lazy_clone = torch._lazy_clone
# Where an address means something and a copy costs the device nothing else. Of other devices only the bytes
# are asked for (docs/neuron.md): a clone would be one more program to compile under XLA.
_ADDRESSED = frozenset({"cpu", "cuda"})
_PURGE_EVERY = 1024
_MANY_GEOMETRIES = 1 << 16
# Above this, exact coverage of a buffer from `empty` is not tracked element by element.
_MASK_ELEMENTS = 1 << 20


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """The distinct elements of an expanded tensor: length 1 where the stride is 0."""
    sizes = [1 if s == 0 and n > 1 else n for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(sizes, tensor.stride(), tensor.storage_offset())


class Storages:
    """The storages that the recorder knows, and the snapshots taken of them.

    Args:
      writer: where snapshots are announced (back-pressure).
      caches: a snapshot serves every reader of the same value. Sound only where each write is seen,
        that is under the dispatch mode.

    Attributes:
      written_parameters: numbers of storages of recorded parameters that ops have written since.
      by_address: what is known of the storages that live, by the address of their C++ object.
      geometries: what stands for geometries, for keys that are quick to compare; see `number_geometry`.
    """

    def __init__(self, writer: TraceWriter, *, caches: bool = True) -> None:
        self._writer = writer
        self._caches = caches
        self._save: Save = "stats"
        self.written_parameters: set[int] = set()
        self.by_address: dict[int, StorageEntry] = {}
        self._by_object: dict[int, ObjectEntry] = {}
        self.known_parameters = KnownParameters()
        self.geometries: dict[Geometry, object] = {}
        self._next_number = itertools.count().__next__
        self._purge_at = _PURGE_EVERY

    def may_share(self) -> bool:
        """Whether snapshots of this thread's tensors may be copy-on-write.

        The recording gives them up in the thread that opened it; no other may have a part in them (`spent`).
        """
        return self._writer.is_opener()

    def set_save(self, save: Save) -> None:
        """What the snapshots that follow are for."""
        self._save = save

    # -- identity ------------------------------------------------------------------------------------

    def entry(self, tensor: torch.Tensor, g: Geometry | None, origin: str) -> tuple[StorageEntry, bool]:
        """The entry of a tensor's storage, and whether it is new (then with this origin)."""
        if g is None:
            return self._object_entry(tensor, origin)
        storage: Any = tensor.untyped_storage()
        entry = self.by_address.get(storage._cdata)
        if entry is not None:
            return entry, False
        pointer = storage.data_ptr() if storage.device.type in _ADDRESSED else 0
        entry = self.add(storage, storage.nbytes(), pointer % 64, origin)
        entry.versions = not tensor.is_inference()
        return entry, True

    def name_geometry(self, g: Geometry) -> object:
        """What stands for a geometry in keys. One that was forgotten gets another: no two ever share one.

        It equals nothing but itself: a number would equal a number that an op takes in a tensor's place.
        """
        name = self.geometries.get(g)
        if name is None:
            if len(self.geometries) >= _MANY_GEOMETRIES:
                self.geometries.clear()
            name = self.geometries[g] = object()
        return name

    def add(self, storage: Any, nbytes: int, alignment: int, origin: str) -> StorageEntry:
        """The entry of a storage that is seen for the first time."""
        entry = StorageEntry(self._next_number(), storage._weak_ref(), nbytes, alignment, origin)
        self.by_address[storage._cdata] = entry
        if len(self.by_address) > self._purge_at:
            self.purge()
        return entry

    def _object_entry(self, tensor: torch.Tensor, origin: str) -> tuple[StorageEntry, bool]:
        known = self._by_object.get(id(tensor))
        if known is not None and known.ref() is tensor:
            return known, False
        entry = ObjectEntry(self._next_number(), weakref.ref(tensor), origin)
        self._by_object[id(tensor)] = entry
        return entry, True

    def known(self, tensor: torch.Tensor) -> StorageEntry | None:
        """The entry of a tensor's storage if there is one; makes none."""
        try:
            return self.by_address.get(tensor.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):
            found = self._by_object.get(id(tensor))
            return found if found is not None and found.ref() is tensor else None

    def purge(self) -> None:
        """Lets go of storages that no longer exist."""
        # Copied first: another thread may add one meanwhile.
        for address in [a for a, e in list(self.by_address.items()) if _expired(e.weak)]:
            _free_weak(self.by_address.pop(address).weak)
        for key in [k for k, e in self._by_object.items() if e.ref() is None]:
            del self._by_object[key]
        self._purge_at = 2 * len(self.by_address) + _PURGE_EVERY

    def close(self) -> None:
        for entry in self.by_address.values():
            _free_weak(entry.weak)
        self.by_address.clear()
        self._by_object.clear()

    # -- values --------------------------------------------------------------------------------------

    def describe(self, tensor: torch.Tensor, name: str, role: str) -> tuple[RawSlot, Geometry | None]:
        """A slot with the geometry of `tensor` and nothing else."""
        g = geometry(tensor)
        slot = RawSlot(name, role, dtype=dtype_name(tensor.dtype), device=str(tensor.device))
        if g is None:
            slot.layout = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
            slot.shape = shape_of(tensor)
        else:
            _, slot.offset, slot.shape, slot.strides, flags = g
            if flags:
                slot.layout = _LAYOUT_OF_FLAGS[flags]
        return slot, g

    def read(
        self,
        tensor: torch.Tensor,
        name: str,
        seq: int,
        index: int,
        *,
        own: bool = False,
        blind: bool = False,
        fresh: bool = False,
    ) -> RawSlot:
        """The slot of a tensor that is about to be read.

        Args:
          seq, index: the reading record and the slot's place in it, which a leaf is known by from now on.
            A module record, numbered only when the call is over, passes -1 and introduces no leaf.
          own: give the slot a content even where the value is a view that others can rebuild.
          blind: the op overwrites the tensor without looking at it.
          fresh: nobody but the recorder has the tensor, so that no copy need be made.
        """
        slot, g = self.describe(tensor, name, "in")
        if tensor.is_meta:
            slot.note = "meta tensor"
            return slot
        entry, _ = self.entry(tensor, g, "leaf")
        slot.storage, slot.storage_bytes, slot.alignment = entry.number, entry.nbytes, entry.alignment
        if not blind:
            self._see_version(entry, tensor)
        defined = entry.history.definitions.get(g or ())
        if blind:
            slot.producers = producers_of(entry, defined, g)
            return slot
        if entry.origin == "empty" and self._reads_unwritten(entry, g, tensor):
            slot.uninitialised = slot.leaf = True
        elif entry.origin == "leaf":
            slot.leaf = self._is_leaf(entry, defined, g)
        slot.producers = producers_of(entry, defined, g)
        parameter = entry.history.parameters.get(g or ())
        if parameter is not None and (parameter, 0) not in slot.producers:
            slot.producers = ((parameter, 0), *slot.producers)
        content = entry.history.contents.get(g or ())
        if content is None and (slot.leaf or own):
            content = self._content(entry, tensor, g, leaf=slot.leaf, fresh=fresh)
        if slot.leaf and seq >= 0:
            # From here on the value is known: this leaf, plus whatever recorded ops write into it.
            entry.history.leaves.add(g or ())
            if defined is None:
                entry.history.definitions[g or ()] = (seq, index, len(entry.history.writes))
        slot.content = content
        self._remember(entry, tensor, g)
        return slot

    def produced(
        self,
        tensor: torch.Tensor,
        name: str,
        seq: int,
        index: int,
        *,
        origin: str = "op",
        aten: bool = True,
        keep: bool = False,
    ) -> tuple[RawSlot, bool]:
        """The slot of a tensor that an op just returned, and whether it aliases a storage known before.

        Args:
          origin: "op", or "empty" where nothing was written into the new storage.
          aten: one of torch's own ops, which allocate what they return unless their schema says otherwise.
          keep: the result cannot be computed again (random, an op of another library): kept like a leaf.
        """
        slot, g = self.describe(tensor, name, "out")
        if tensor.is_meta:
            slot.note = "meta tensor"
            return slot, False
        entry, new = self.entry(tensor, g, origin)
        slot.storage, slot.storage_bytes, slot.alignment = entry.number, entry.nbytes, entry.alignment
        if new and not tensor.is_inference():
            entry.version = max(entry.version, tensor._version)
        entry.history.definitions[g or ()] = (seq, index, len(entry.history.writes))
        if new and origin != "empty":
            fresh = aten and g is not None and is_whole(g, entry.nbytes)
            slot.content = self._content(entry, tensor, g, leaf=keep, fresh=fresh)
        self._remember(entry, tensor, g)
        return slot, not new

    def written(
        self, tensor: torch.Tensor, name: str, seq: int, index: int, *, keep: bool = False
    ) -> RawSlot:
        """The slot of an argument that an op just wrote, with the value after it."""
        slot, g = self.describe(tensor, name, "written")
        if tensor.is_meta:
            slot.note = "meta tensor"
            return slot
        slot.role = "written"
        entry, _ = self.entry(tensor, g, "op")
        if g is not None:
            nbytes = tensor.untyped_storage().nbytes()
            if nbytes != entry.nbytes:  # resize_
                entry.nbytes = nbytes
        slot.storage, slot.storage_bytes, slot.alignment = entry.number, entry.nbytes, entry.alignment
        entry.history.contents.clear()
        entry.facts.clear()
        self._end_parameters(entry)
        if g is None or is_whole(g, entry.nbytes):
            entry.history.definitions = {g or (): (seq, index, 0)}
            entry.history.writes.clear()
            entry.history.geometries.clear()
            entry.history.leaves.clear()
            entry.origin = "op"
        else:
            entry.history.writes.append((seq, index, *memory_of(g)))
            entry.history.definitions[g] = (seq, index, len(entry.history.writes))
            entry.history.geometries.add(g)
            if entry.origin == "empty":
                self._cover(entry, g)
        if not tensor.is_inference():
            # The version counter moves after the op that is just being dispatched has returned.
            entry.version = max(entry.version, tensor._version) + 1
        slot.content = self._content(entry, tensor, g, leaf=keep)
        return slot

    def overwritten_unseen(self, tensor: torch.Tensor) -> None:
        """An op that is not recorded wrote the tensor."""
        entry = self.known(tensor)
        if entry is not None:
            self._end_parameters(entry)
            entry.forget()
            if not tensor.is_inference():
                entry.version = max(entry.version, tensor._version) + 1

    def forget_unseen(self) -> None:
        """Ops ran while no mode was on: what they may have written is no longer known.

        Parameters and buffers are kept where their version counters tell.
        """
        self.purge()
        self.known_parameters.forget_uncounted()
        for entry in (*self.by_address.values(), *self._by_object.values()):
            if entry.told is None or not entry.told.parameters or not entry.versions:
                entry.forget()

    def parameter_is_current(self, tensor: torch.Tensor, known: Key) -> bool:
        """Whether the last record of the parameter (model, path, name) still shows its value."""
        entry = self.known(tensor)
        written = entry is not None and entry.number in self.written_parameters
        return not written and self.known_parameters.is_current(tensor, known)

    def ends_parameter(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor was written since its last record as a parameter, whatever its version says."""
        entry = self.known(tensor)
        return entry is None or (geometry(tensor) or ()) not in entry.history.parameters

    def parameter(self, tensor: torch.Tensor, known: Key, seq: int) -> RawSlot:
        """The slot of a parameter or buffer; leaves that read it will name this record."""
        self.known_parameters.remember(tensor, known)
        slot, g = self.describe(tensor, "out", "out")
        if tensor.is_meta:
            slot.note = "meta tensor"
            return slot
        entry, _ = self.entry(tensor, g, "leaf")
        slot.storage, slot.storage_bytes, slot.alignment = entry.number, entry.nbytes, entry.alignment
        self._see_version(entry, tensor)
        slot.producers = producers_of(entry, entry.history.definitions.get(g or ()), g)
        content = entry.history.contents.get(g or ())
        slot.content = content if content is not None else self._content(entry, tensor, g)
        entry.history.parameters[g or ()] = seq
        self._remember(entry, tensor, g)
        return slot

    def _remember(self, entry: StorageEntry, tensor: torch.Tensor, g: Geometry | None) -> None:
        """Works out the facts of a geometry, where they hold until the storage changes."""
        if g is None or not self._caches or g[0].is_complex:
            return
        if entry.history.writes or entry.origin == "empty" or g[4] or not tensor.is_cpu:
            entry.facts.pop(g, None)
            return
        defined, parameter = entry.history.definitions.get(g), entry.history.parameters.get(g)
        producers = () if parameter is None else ((parameter, 0),)
        flags = SLOT_LEAF if entry.origin == "leaf" and g in entry.history.leaves else 0
        if defined is not None:
            producers = (*producers, (defined[0], defined[1]))
        elif entry.history.definitions or entry.origin != "leaf" or g not in entry.history.contents:
            return  # perhaps a view made elsewhere: what it shows may change with another geometry
        else:
            flags = SLOT_LEAF | SLOT_IS_NEW
        entry.facts[g] = (
            entry.number,
            entry.nbytes,
            entry.alignment,
            producers,
            entry.history.contents.get(g),
            flags,
            self.name_geometry(g),
        )

    def _end_parameters(self, entry: StorageEntry) -> None:
        if entry.history.parameters:
            entry.history.parameters.clear()
            entry.facts.clear()
            self.written_parameters.add(entry.number)

    def _see_version(self, entry: StorageEntry, tensor: torch.Tensor) -> None:
        """A version counter beyond what records account for: somebody wrote unseen."""
        if tensor.is_inference():
            return
        version = tensor._version
        if version > entry.version:
            if entry.history.definitions or entry.history.contents or entry.history.writes:
                entry.forget()
            entry.version = version

    def _content(
        self,
        entry: StorageEntry,
        tensor: torch.Tensor,
        g: Geometry | None,
        *,
        leaf: bool = False,
        fresh: bool = False,
    ) -> Content | None:
        keep = self._save == "tensors" or (leaf and self._save == "leaves")
        content = self.snapshot(tensor, g, keep=keep, fresh=fresh)
        if content is not None and self._caches:
            entry.history.contents[g or ()] = content
        return content

    def snapshot(
        self, tensor: torch.Tensor, g: Geometry | None, *, keep: bool, fresh: bool = False
    ) -> Content | None:
        """A copy that the program cannot change, or None where neither data nor statistics are wanted."""
        if self._save == "meta":
            return None
        tensor = tensor.detach() if tensor.requires_grad else tensor
        if g is None:
            num_bytes = _bytes_of_exotic(tensor)
            self._writer.reserve(num_bytes)
            copy = _clone_exotic(tensor)
            return Content(copy, keep_data=keep, summarise=True, num_bytes=num_bytes)
        expanded = 0 in g[3] and any(s == 0 and n > 1 for n, s in zip(g[2], g[3], strict=True))
        source = _compact(tensor) if expanded else tensor
        num_bytes = source.numel() * source.element_size()
        self._writer.reserve(num_bytes)
        if source.device.type not in _ADDRESSED:
            copy = source.cpu()
        elif not expanded and self.may_share() and (fresh or is_shared(source, g)):
            # A storage that is copy-on-write already: nobody can have a pointer into it to write through.
            try:
                copy = _lazy_clone(source)
            except RuntimeError:  # storage that torch does not own
                copy = source.clone()
        else:
            copy = source.clone()
        if expanded:
            copy = copy.expand(g[2])
        content = Content(copy, keep_data=keep, summarise=True, num_bytes=num_bytes)
        if copy.is_cuda:
            # The writer works on a stream of its own, which must not overtake the program's.
            content.ready = torch.cuda.current_stream(copy.device).record_event()
        return content

    # -- leaves --------------------------------------------------------------------------------------

    def _is_leaf(self, entry: StorageEntry, defined: tuple[int, int, int] | None, g: Geometry | None) -> bool:
        if not entry.history.writes:
            return defined is None or (g or ()) in entry.history.leaves
        if defined is not None:
            return False  # an earlier value, plus writes that are on record
        first, last = memory_of(g) if g is not None else (0, 0)
        overlapping = [w for w in entry.history.writes if w[2] < last and w[3] > first]
        return not overlapping or g not in entry.history.geometries

    def _reads_unwritten(self, entry: StorageEntry, g: Geometry | None, tensor: torch.Tensor) -> bool:
        if g in entry.history.geometries or g is None:
            return False
        if entry.history.mask is not None and entry.history.mask.numel():
            dtype, offset, shape, strides, _ = g
            if entry.history.mask.numel() * dtype.itemsize == entry.nbytes:
                return not bool(entry.history.mask.as_strided(shape, strides, offset).all())
        if not entry.history.geometries:
            return tensor.numel() > 0
        first, last = memory_of(g)
        inside = sum(
            size_of(w) for w in entry.history.geometries if memory_of(w)[0] < last and memory_of(w)[1] > first
        )
        return bool(inside < size_of(g))

    def _cover(self, entry: StorageEntry, g: Geometry) -> None:
        dtype, offset, shape, strides, _ = g
        elements = entry.nbytes // dtype.itemsize
        if entry.history.mask is None:
            entry.history.mask = torch.zeros(
                elements if elements <= _MASK_ELEMENTS else 0, dtype=torch.bool, device="cpu"
            )
        if entry.history.mask.numel() == elements:
            entry.history.mask.as_strided(shape, strides, offset).fill_(True)
            if bool(entry.history.mask.all()):
                entry.origin = "op"
        elif sum(size_of(w) for w in entry.history.geometries) >= entry.nbytes:
            # Too large to track by element: distinct pieces that add up to the whole are taken as disjoint.
            entry.origin = "op"


def _bytes_of_exotic(tensor: torch.Tensor) -> int:
    try:
        if tensor.layout is torch.sparse_coo:
            return int(tensor._nnz()) * (tensor.element_size() + 8 * tensor.sparse_dim())
        return int(tensor.numel()) * tensor.element_size()
    except (RuntimeError, NotImplementedError, TypeError):
        return 0


def _clone_exotic(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is torch.jagged:
        # Its methods go through the subclass's dispatch, which is off here.
        values, offsets = tensor._values.detach().clone(), tensor._offsets.clone()  # type: ignore[attr-defined]
        return torch.nested.nested_tensor_from_jagged(values, offsets)
    return tensor.detach().clone()
