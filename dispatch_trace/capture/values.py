"""Ops and module calls with their values, as rows wherever what they say is what was said before.

Guarantees: the records are those of `ops` and `modules`; what an op of a new description says is found out
there, once, and everything unusual (writes, random results, `empty*`, tensors that nobody has seen, other
layouts and devices, other modes on the stack) goes there each time. A row holds a copy-on-write snapshot of
what the op returned, and of what it read the facts that the storages keep (`snapshot.StorageEntry.facts`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dispatch_trace.capture.frames import Frame
from dispatch_trace.capture.keys import KEYWORDS, NoKey, exact
from dispatch_trace.capture.ops import OpInfo, after_op, before_op, site
from dispatch_trace.capture.plain import PLAIN_TENSORS, encode
from dispatch_trace.capture.rows import MANY_ROWS, RowRecorder
from dispatch_trace.capture.storage import Geometry, StorageEntry, is_shared
from dispatch_trace.capture.tracer import Tracer
from dispatch_trace.nested import flatten, flatten_arguments
from dispatch_trace.schema import SLOT_IS_NEW, SLOT_LEAF, Content, RawRecord, RawSlot, SlotFacts
from dispatch_trace.store.layouts import dtype_name

_current_node = torch._C._current_autograd_node
_num_dispatch_modes = torch._C._len_torch_dispatch_stack
_num_function_modes = torch._C._len_torch_function_stack
_lazy_clone = torch._lazy_clone
_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter

_CREDIT_BYTES = 1 << 18  # of snapshots, announced to the writer together, at most
NO_TENSOR: SlotFacts = (-1, 0, 0, (), None, 0, None)
_Seen = tuple[StorageEntry, Geometry, SlotFacts]
# (tensor, storage, its entry if it has one, geometry and its number, bytes of a new storage)
_Made = tuple[torch.Tensor, Any, StorageEntry | None, Geometry, int, int]
_New = tuple[StorageEntry, Geometry, int]  # the last is the slot


class Leaves:
    """Leaves of what a module call took or returned, as a row says them.

    Attributes:
      key: (name, number of the geometry or what stands for a plain value) of each.
      facts: of each.
      values: the plain ones; of tensors the geometry.
    """

    __slots__ = ("facts", "key", "values")

    def __init__(self, key: tuple[Any, ...], facts: list[SlotFacts], values: list[Any]) -> None:
        self.key = key
        self.facts = facts
        self.values = values

    def slots(self, role: str, *, whole: bool) -> list[RawSlot]:
        """As slots: with all that is known of them, or only what stands in the key."""
        found = []
        for (name, _), facts, value in zip(self.key, self.facts, self.values, strict=True):
            if facts is NO_TENSOR:
                found.append(RawSlot(name, role, value=encode(value), is_tensor=False))
                continue
            dtype, offset, shape, strides, _ = value
            slot = RawSlot(
                name, role, dtype=dtype_name(dtype), offset=offset, shape=tuple(shape), strides=strides
            )
            if whole:
                (
                    slot.storage,
                    slot.storage_bytes,
                    slot.alignment,
                    slot.producers,
                    slot.content,
                    flags,
                    _,
                ) = facts
                slot.leaf = bool(flags & SLOT_LEAF) and role == "in"
            found.append(slot)
        return found


class ValueRecorder(RowRecorder):
    """The dispatch mode of a recording that keeps values of one kind everywhere, and inputs."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__(tracer)
        assert tracer.storages is not None
        self._storages = tracer.storages
        self._by_address = tracer.storages.by_address
        self._items = tracer.items
        self._keep = tracer.options.save == "tensors"
        self._copy: Callable[[torch.Tensor], torch.Tensor] = (
            _lazy_clone if tracer.storages.may_share() else torch.clone
        )
        self._credit = 0
        self._credit_bytes = min(_CREDIT_BYTES, tracer.writer.max_pending_bytes // 8)

    def stop(self) -> None:
        super().stop()
        self._tracer.writer.release(self._credit)
        self._credit = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        info = self._infos.get(id(func))
        here, tracer = self.here, self._tracer
        if types or info is None or not info.quick or here["busy"]:
            return self.dispatch(func, types, args, kwargs)
        frame = here["frame"]
        if frame is None or not tracer.active or _current_node() is not None:
            frame = site(tracer, self._state, info)
        elif not frame.records_ops:
            frame = None
        out = info.call(*args, **kwargs) if kwargs else info.call(*args)
        if frame is not None:
            try:
                key = self._note(frame, info, args, kwargs, out)
                if key is not None:
                    self._record(key, frame, info, args, kwargs or {}, out)
            except Exception as error:
                tracer.fault(error)
        return out

    def _note(
        self, frame: Frame, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any] | None, out: Any
    ) -> tuple[Any, ...] | None:
        """Notes an op that has run and written nothing.

        All of it is paid for by each op: hence the few calls.

        Returns: where it has to be recorded instead, the key to find the body by from then on, () for none.
        """
        if _num_dispatch_modes() or _num_function_modes() or (info.random and info.draws(args, kwargs or {})):
            return ()
        key: list[Any] = [info]
        add = key.append
        facts: list[SlotFacts] = []
        new: list[_New] = []  # leaves that this op introduces
        made: list[Any] = []  # `_Made`, or None for what is no tensor
        by_address, geometries = self._by_address, self._storages.geometries
        try:
            for value in args:
                kind = type(value)
                if kind in PLAIN_TENSORS:
                    # As `_read`, without the call.
                    entry = by_address.get(value.untyped_storage()._cdata)
                    if entry is None:
                        return ()
                    g = (value.dtype, value.storage_offset(), value.shape, value.stride(), 0)
                    fact = entry.facts.get(g)
                    if fact is None or (entry.versions and value._version > entry.version) or value.is_neg():
                        return ()
                    if fact[5] >= SLOT_IS_NEW:
                        new.append((entry, g, len(facts)))
                    elif kind is _Parameter and not fact[5] and len(fact[3]) < 2:
                        return ()  # given the memory of something else: no record of the parameter shows this
                    facts.append(fact)
                    add(fact[6])
                elif value is None:
                    add(None)
                else:
                    add(self._read(value, facts, new))
            if kwargs:
                add(KEYWORDS)
                for name, value in kwargs.items():
                    add(name)
                    add(self._read(value, facts, new))
            if type(out) is _Tensor:
                outs: Any = (out,)
            else:
                outs = () if out is None else out if type(out) in (tuple, list) else (out,)
            for value in outs:
                if type(value) is not _Tensor:
                    add(exact(value))
                    made.append(None)
                    continue
                storage = value.untyped_storage()
                entry = by_address.get(storage._cdata)
                g = (value.dtype, value.storage_offset(), value.shape, value.stride(), 0)
                if not value.is_cpu or (
                    entry is not None and entry.told is not None and not _may_alias(entry, g)
                ):
                    return ()
                geometry = geometries.get(g)
                if geometry is None:
                    geometry = self._storages.name_geometry(g)
                num_bytes = -1 if entry is not None else storage.nbytes()
                add(geometry)
                add(num_bytes)
                made.append((value, storage, entry, g, geometry, num_bytes))
        except (NoKey, RuntimeError, NotImplementedError):  # tensors without a storage, strides or one shape
            return ()
        if len(made) > 1 and _share_storage(made):
            return ()
        whole = tuple(key)
        row_body = self._bodies.get(whole)
        if row_body is None or not frame.shares_bodies:
            return whole

        self.last = seq = self._next()
        for entry, g, index in new:
            facts[index] = introduce(entry, g, seq, index)
        for each in made:
            facts.append(NO_TENSOR if each is None else self._define(each, seq, len(facts)))
        counts, base = frame.counts, info.base
        counts[base] = n = counts.get(base, -1) + 1
        self._append((row_body, seq, frame, n, self._number, self._tracer.find_source(3), facts))
        return None

    def _look(self, value: torch.Tensor) -> _Seen | None:
        """What is known of a tensor that is read, None where it has to be looked at."""
        entry = self._by_address.get(value.untyped_storage()._cdata)
        if entry is None:
            return None
        g = (value.dtype, value.storage_offset(), value.shape, value.stride(), 0)
        fact = entry.facts.get(g)
        if fact is None or (entry.versions and value._version > entry.version) or value.is_neg():
            return None
        return entry, g, fact

    def _read(self, value: Any, facts: list[SlotFacts], new: list[_New]) -> Any:
        """What stands for an argument in a key; the facts of the tensors in it are added to those of the op.

        Raises:
          NoKey: it has to be recorded.
        """
        kind = type(value)
        if kind in PLAIN_TENSORS:
            found = self._look(value)
            if found is None:
                raise NoKey
            entry, g, fact = found
            if fact[5] >= SLOT_IS_NEW:
                new.append((entry, g, len(facts)))
            facts.append(fact)
            return fact[6]
        if kind is int or kind is float:
            if self._items and value in self._items:
                raise NoKey
            return value if kind is int else value.hex()
        if (kind is list or kind is tuple) and value and (self._items or type(value[0]) is not int):
            return tuple([self._read(v, facts, new) for v in value])
        return exact(value)

    def _define(self, made: _Made, seq: int, index: int) -> SlotFacts:
        """What a tensor that was returned says; later readers will say that it came from here."""
        value, storage, entry, g, geometry, num_bytes = made
        content = None
        if entry is None:
            if num_bytes > self._credit:
                self._announce(num_bytes)
            self._credit -= num_bytes
            alignment = storage.data_ptr() % 64
            try:
                copy = self._copy(value)
            except RuntimeError:  # storage that torch does not own
                copy = value.clone()
            content = Content(copy, keep_data=self._keep, summarise=True, num_bytes=num_bytes)
            entry = self._storages.add(storage, num_bytes, alignment, "op")
            if value.is_inference():
                entry.versions = False
            else:
                entry.version = value._version
            known: Content | None = content
            flags = 0
        else:
            num_bytes, alignment, told = entry.nbytes, entry.alignment, entry.told
            flags = 0
            if told is None:
                fact = entry.facts.get(g)
                known = None if fact is None else fact[4]
            else:
                told.definitions[g] = (seq, index, 0)
                known = told.contents.get(g)
                if entry.origin == "leaf" and g in told.leaves:
                    flags = SLOT_LEAF
        number = entry.number
        entry.facts[g] = (number, num_bytes, alignment, ((seq, index),), known, flags, geometry)
        return number, num_bytes, alignment, (), content, 0, geometry

    def _announce(self, num_bytes: int) -> None:
        """Waits until a snapshot of this size, and a few after it, may be taken."""
        writer = self._tracer.writer
        writer.release(self._credit)
        self._credit = num_bytes + self._credit_bytes
        writer.reserve(self._credit)

    def _record(
        self,
        key: tuple[Any, ...],
        frame: Frame,
        info: OpInfo,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
    ) -> None:
        """Records an op that has run and written nothing, and remembers what others like it share."""
        tracer, state = self._tracer, self._state
        record = before_op(tracer, state, frame, info, args, kwargs)
        after_op(tracer, state, info, record, args, kwargs, out)
        if key and frame.shares_bodies:
            body = _body_of(record)
            if body is not None:
                self.keep_body(key, body)

    # -- module calls --------------------------------------------------------------------------------

    def inputs_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = flatten_arguments(args, kwargs)
        leaves = self._leaves(found)
        return self._slots(found, "in") if leaves is None else leaves

    def note_module(self, frame: Frame, out: Any, note: str = "") -> None:
        try:
            found = flatten(out, "out")
            inputs, outputs = frame.inputs, self._leaves(found)
            if outputs is None or type(inputs) is list or not frame.shares_bodies:
                slots: list[RawSlot] = inputs if type(inputs) is list else inputs.slots("in", whole=True)
                first = len(slots)
                slots += self._slots(found, "out") if outputs is None else outputs.slots("out", whole=True)
                self._tracer.put_module(frame, slots, first_output=first, note=note)
                return
            key = ("module", note, inputs.key, outputs.key)
            body = self._bodies.get(key)
            if body is None:
                slots = [*inputs.slots("in", whole=False), *outputs.slots("out", whole=False)]
                body = frame.record(-1, "module", slots=slots, note=note)
                self.keep_body(key, body)
            returned = outputs.facts
            if any(fact[5] for fact in returned):
                returned = [(*fact[:5], 0, fact[6]) for fact in returned]
            self.last = seq = self._next()
            self._append((body, seq, frame, 0, self._number, None, [*inputs.facts, *returned]))
            if len(self.rows) > MANY_ROWS:
                self._tracer.writer.put_rows_of(self)
        except Exception as error:
            self._tracer.fault(error)

    def _leaves(self, found: list[tuple[str, Any]]) -> Leaves | None:
        """Leaves as a row says them, each tensor with its content; None where that cannot be."""
        keys: list[Any] = []
        facts: list[SlotFacts] = []
        values: list[Any] = []
        try:
            for name, value in found:
                if type(value) in PLAIN_TENSORS:
                    seen = self._look(value)
                    if seen is None or seen[2][4] is None:
                        seen = self._snapshot(value, seen)
                        if seen is None:
                            return None
                    _, g, fact = seen
                    keys.append((name, fact[6]))
                    facts.append(fact)
                    values.append(g)
                elif isinstance(value, torch.Tensor):
                    return None
                else:
                    keys.append((name, _plain_key(value)))
                    facts.append(NO_TENSOR)
                    values.append(value)
        except (NoKey, RuntimeError, NotImplementedError):
            return None
        return Leaves(tuple(keys), facts, values)

    def _snapshot(self, value: torch.Tensor, seen: _Seen | None) -> _Seen | None:
        """As `_look`, with a snapshot of the value; None where no row can say so."""
        if seen is None or not is_shared(value, seen[1]):
            self._slots([("", value)], "in")
            seen = self._look(value)
            return None if seen is None or seen[2][4] is None else seen
        entry, g, fact = seen
        grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            with torch._C._DisableTorchDispatch():
                copy = self._copy(value)
        finally:
            torch._C._set_grad_enabled(grad)
        num_bytes = fact[1]
        if num_bytes > self._credit:
            self._announce(num_bytes)
        self._credit -= num_bytes
        content = Content(copy, keep_data=self._keep, summarise=True, num_bytes=num_bytes)
        if entry.told is not None:
            entry.told.contents[g] = content
        fact = entry.facts[g] = (*fact[:4], content, *fact[5:])
        return entry, g, fact

    def _slots(self, found: list[tuple[str, Any]], role: str) -> list[RawSlot]:
        """Leaves as slots."""
        tracer = self._tracer
        slots: list[RawSlot] = []
        with tracer.own_ops(self._state):
            tracer.set_save(tracer.options.save)
            for name, value in found:
                slots += tracer.value_slots(name, value, role)
        return slots


def introduce(entry: StorageEntry, g: Geometry, seq: int, index: int) -> SlotFacts:
    """What the first reader of a leaf says of it; later ones will name this reader too."""
    fact = entry.facts[g]
    if fact[5] & SLOT_IS_NEW:  # else the same op reads it twice
        entry.history.leaves.add(g)
        entry.history.definitions[g] = (seq, index, 0)
        entry.facts[g] = (*fact[:3], (*fact[3], (seq, index)), fact[4], SLOT_LEAF, fact[6])
    return fact


def _may_alias(entry: StorageEntry, g: Geometry) -> bool:
    """Whether a new view of a storage says no more than where it comes from."""
    told = entry.history
    return not (told.writes or entry.origin == "empty" or g in told.parameters)


def _share_storage(made: list[Any]) -> bool:
    """Whether two new tensors lie in one storage."""
    new = [each[1]._cdata for each in made if each is not None and each[2] is None]
    return len(set(new)) < len(new)


def _plain_key(value: Any) -> Any:
    """What stands for a leaf that is no tensor.

    Raises:
      NoKey: it has to be recorded.
    """
    try:
        return exact(value)
    except NoKey:
        encoded = encode(value)
        if type(encoded) is dict and type(encoded.get("opaque")) is str:
            return type(value), encoded["opaque"]
        raise


def _body_of(record: RawRecord) -> RawRecord | None:
    """What ops like a recorded one share; None where its slots say more than rows can."""
    slots: list[RawSlot] = []
    for slot in record.slots:
        ordinary = slot.layout == "strided" and slot.device == "cpu" and not slot.dtype.startswith("complex")
        if slot.note or slot.uninitialised or (slot.is_tensor and (slot.strides is None or not ordinary)):
            return None
        content = slot.content if slot.role == "out" else None
        if content is not None and (content.num_bytes != slot.storage_bytes or 0 in (slot.strides or ())):
            return None  # part of a larger storage: copied
        slots.append(
            RawSlot(
                slot.name,
                slot.role,
                value=slot.value,
                is_tensor=slot.is_tensor,
                dtype=slot.dtype,
                shape=slot.shape,
                strides=slot.strides,
                offset=slot.offset,
                device=slot.device,
                layout=slot.layout,
            )
        )
    return RawRecord(
        -1,
        record.kind,
        step=record.step,
        op=record.op,
        overload=record.overload,
        args=record.args,
        slots=slots,
        light=record.light,
        random=record.random,
        note=record.note,
    )
