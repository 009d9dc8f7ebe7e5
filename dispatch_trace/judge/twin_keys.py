"""Values of two recorded programs by how they are made: equal keys are equal values in float64.

Nothing runs here. A leaf is known by the hash of what the float64 run reads for it, a result by its op, the
arguments and the keys of what it reads, a view by the writes that lie under it. Casts between floats and
copies hand on the key of what they copy, since both runs hold float64. Two programs that are one get equal
keys throughout, whatever their dtypes. What is not known for certain has a key that is nobody else's: keys
may miss an equality and never invent one.

Masks that stand for -inf (beyond `EXTREME`) are one number here, as they are where values are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from dispatch_trace.align.canon import short
from dispatch_trace.align.graph import Program
from dispatch_trace.align.pairs import Pairing, module_slots, paired_slots
from dispatch_trace.align.summaries import EXTREME
from dispatch_trace.execute_memory import HELD_AS, dtype_family, has_geometry
from dispatch_trace.execute_ops import EMPTY_OPS, UNWRITTEN_OPS, NotRunnableError, resolve, why_taken
from dispatch_trace.geometry import extent_of
from dispatch_trace.judge.twin_leaves import Leaves
from dispatch_trace.schema import StoredRecord, StoredSlot
from dispatch_trace.store.reader import RankReader

Place = tuple[int, int]  # (seq, slot index)
# Writes of pieces that are remembered one by one, for each storage.
_MAX_PIECES = 64
_COPIES = frozenset(["_to_copy", "clone", "lift_fresh_copy", "contiguous", "to"])


@dataclass(slots=True)
class Interned:
    """Numbers for descriptions, shared by the programs that are to be compared."""

    _numbers: dict[Hashable, int] = field(default_factory=dict)

    def of(self, description: Hashable) -> int:
        return self._numbers.setdefault(description, len(self._numbers))

    def nobodys(self) -> int:
        """A number that equals no other."""
        return self.of(("alone", len(self._numbers)))


@dataclass(frozen=True, slots=True)
class _Write:
    low: int
    high: int  # elements [low, high) of the storage lie between its first and its last
    geometry: tuple[Any, ...]
    dense: bool
    key: int


def value_keys(
    records: Iterable[StoredRecord],
    reader: RankReader,
    interned: Interned,
    leaf: Callable[[StoredSlot], int | None],
    put: Callable[[Place], int | None] | None = None,
) -> dict[Place, int]:
    """The key of every tensor slot, by record and slot index.

    Args:
      records: of a whole recording, in order; reader: of the same.
      interned: shared with the other program.
      leaf: the key of what a leaf slot reads, None for what nothing else equals.
      put: the key of what is put in the place of a result, None where it stays.
    """
    return _Numbering(reader, interned, leaf, put).run(records)


class _Numbering:
    def __init__(
        self,
        reader: RankReader,
        interned: Interned,
        leaf: Callable[[StoredSlot], int | None],
        put: Callable[[Place], int | None] | None,
    ) -> None:
        self._reader = reader
        self._interned = interned
        self._leaf = leaf
        self._put = put
        self._writes: dict[int, list[_Write]] = {}
        self._families: dict[int, str] = {}
        self._mixed: set[int] = set()  # storages that are looked at in two dtypes, through the recorded bits
        self._items: dict[int, int] = {}
        self._taken: dict[str, bool] = {}
        self._keys: dict[Place, int] = {}

    def run(self, records: Iterable[StoredRecord]) -> dict[Place, int]:
        for record in records:
            if record.kind == "op":
                self._op(record)
            elif record.kind != "param":
                for slot in record.slots:
                    if slot.role == "out" and slot.is_tensor:
                        self._keys[record.seq, slot.index] = self._read(slot)
        return self._keys

    # Records ----------------------------------------------------------------------------------------

    def _op(self, record: StoredRecord) -> None:
        read: dict[int, int] = {}
        storages = set()
        for slot in record.slots:
            if slot.role == "in" and slot.is_tensor:
                read[slot.index] = self._keys[record.seq, slot.index] = self._read(slot)
                storages.add(slot.storage)
        made = self._made(record, read)
        for slot in sorted(record.slots, key=lambda s: s.role != "written"):
            if slot.role == "in":
                continue
            place = (record.seq, slot.index)
            if not slot.is_tensor:
                self._items[record.seq] = made(slot)
            elif slot.role == "out" and slot.storage >= 0 and slot.storage in storages:
                self._keys[place] = self._read(slot)  # a view, or an argument handed back
            else:
                key = self._put(place) if self._put is not None and not record.light else None
                self._keys[place] = self._write(slot, made(slot) if key is None else key)

    def _made(self, record: StoredRecord, read: dict[int, int]) -> Callable[[StoredSlot], int]:
        """What gives the key of a result."""
        interned = self._interned
        if record.op in EMPTY_OPS:
            return lambda slot: interned.of("unwritten")
        if record.op in UNWRITTEN_OPS:
            return lambda slot: interned.nobodys()
        if self._is_taken(record):
            return lambda slot: self._recorded(slot) if slot.is_tensor else interned.nobodys()
        if short(record.op) in _COPIES and len(read) == 1:
            (source,) = (s for s in record.slots if s.index in read)
            out = next((s for s in record.slots if s.role == "out" and s.is_tensor), None)
            if out is not None and _held(out) == _held(source) and out.shape == source.shape:
                return lambda slot: read[source.index]
        args = tuple(
            (name, self._argument(value, read))
            for name, value in record.args
            if name != "half_to_float"  # float64 knows no such thing
        )
        outs = tuple((s.name, _held(s), s.shape) for s in record.slots if s.role != "in" and s.is_tensor)
        op = interned.of((record.overload, args, outs))
        return lambda slot: interned.of((op, slot.name))

    def _is_taken(self, record: StoredRecord) -> bool:
        """Whether the runs take the recorded results."""
        known = self._taken.get(record.overload)
        if known is None:
            try:
                resolve(record.overload)
                known = False
            except NotRunnableError:
                known = True
            self._taken[record.overload] = known
        return known or bool(why_taken(record))

    def _recorded(self, slot: StoredSlot) -> int:
        content = self._reader.content(slot.content) if slot.content >= 0 else None
        if content is None or not content.hash or not content.has_data:
            return self._interned.nobodys()
        return self._interned.of(("recorded", content.hash))

    def _argument(self, value: Any, read: dict[int, int]) -> Hashable:
        if isinstance(value, (list, tuple)):
            return tuple(self._argument(v, read) for v in value)
        if isinstance(value, float):
            if EXTREME <= abs(value) < math.inf:
                return ("mask", value > 0)
            return ("float", repr(value))
        if not isinstance(value, dict):
            return (type(value).__name__, value)
        ((kind, content),) = value.items()
        if kind == "ref":
            return ("value", read.get(content, -1))
        if kind == "item":
            recorded, seq = content
            found = self._items.get(seq)
            return ("item", found) if found is not None else ("number", repr(recorded))
        if kind == "dtype":
            return ("dtype", HELD_AS.get(content, content))
        if kind in ("device", "generator", "memory_format"):
            return str(kind)  # strides are seen where a slot is read
        if kind in ("layout", "complex"):
            return (kind, repr(content))
        if kind == "dict":
            return ("dict", tuple((name, self._argument(v, read)) for name, v in sorted(content.items())))
        return ("unknown", self._interned.nobodys())

    # Memory -----------------------------------------------------------------------------------------

    def _read(self, slot: StoredSlot) -> int:
        """The key of what a slot shows."""
        if 0 in slot.shape:
            return self._interned.of(("empty", slot.shape, _held(slot)))
        if slot.leaf:
            key = self._leaf(slot)
            return self._write(slot, self._interned.nobodys() if key is None else key, leaf=True)
        if slot.uninitialised or slot.storage < 0 or self._is_mixed(slot):
            return self._interned.nobodys()
        low, high, geometry, _ = _place(slot)
        parts: list[tuple[Any, ...]] = []
        for write in reversed(self._writes.get(slot.storage, ())):
            if write.high <= low or high <= write.low:
                continue
            if not parts and write.geometry == geometry:
                return write.key
            parts.append((write.geometry[0] - geometry[0], *write.geometry[1:], write.key))
            if write.dense and write.low <= low and high <= write.high:
                return self._interned.of(("seen", geometry[1:], tuple(parts)))
        return self._interned.nobodys()  # some of it nobody wrote

    def _write(self, slot: StoredSlot, key: int, *, leaf: bool = False) -> int:
        """Puts a value where a slot says; its key."""
        if slot.storage < 0 or self._is_mixed(slot):
            return self._interned.nobodys()
        low, high, geometry, dense = _place(slot)
        writes = self._writes.setdefault(slot.storage, [])
        if leaf:
            for write in reversed(writes):
                if write.geometry == geometry and write.key == key:
                    return key  # it lies there already
                if write.low < high and low < write.high:
                    break
        if dense:
            writes[:] = [w for w in writes if w.low < low or w.high > high]
        if len(writes) >= _MAX_PIECES:
            parts = tuple((*w.geometry, w.key) for w in writes)
            ends = min(w.low for w in writes), max(w.high for w in writes)
            whole = (ends[0], (ends[1] - ends[0],), (1,), writes[0].geometry[3])
            writes[:] = [_Write(*ends, whole, True, self._interned.of(("pieces", parts)))]
        writes.append(_Write(low, high, geometry, dense, key))
        return key

    def _is_mixed(self, slot: StoredSlot) -> bool:
        family = dtype_family(slot.dtype)
        if self._families.setdefault(slot.storage, family) != family:
            self._mixed.add(slot.storage)
        return slot.storage in self._mixed


def _held(slot: StoredSlot) -> str:
    return HELD_AS.get(slot.dtype, slot.dtype)


def _place(slot: StoredSlot) -> tuple[int, int, tuple[Any, ...], bool]:
    """(first element, one past the last, geometry, whether it is all between them), in real numbers."""
    if not has_geometry(slot):
        return 0, 1, (0, slot.shape, None, slot.dtype), True
    assert slot.strides is not None and slot.offset is not None
    shape, strides, offset = slot.shape, slot.strides, slot.offset
    if slot.dtype.startswith("complex"):
        shape, strides, offset = (*shape, 2), (*(2 * n for n in strides), 1), 2 * offset
    # Dims of size 1 have any stride.
    strides = tuple(n if size != 1 else 0 for n, size in zip(strides, shape, strict=True))
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1:
            expected = expected * size if stride == expected else 0
    geometry = (offset, shape, strides, (_held(slot), slot.layout))
    return offset, offset + extent_of(shape, strides), geometry, expected > 0


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of both programs.

    Attributes:
      ref, target: by place.
      one_program: whether every op of the target computes what its counterpart in the reference does, so that
        both programs return the same.
    """

    ref: dict[Place, int]
    target: dict[Place, int]
    one_program: bool

    @classmethod
    def of(cls, pairing: Pairing, leaves: Leaves) -> Keys:
        """The keys of two recordings.

        Args:
          pairing: of the recordings.
          leaves: what the float64 runs read.
        """
        interned = Interned()
        known: dict[Place, int] = {}

        def leaf_key(side: int, program: Program) -> Callable[[StoredSlot], int | None]:
            def key(slot: StoredSlot) -> int | None:
                content = program.content(slot)
                if content is None or not content.has_data:
                    return None
                place = leaves.late(content.id) if side else None
                if place is not None:
                    return known.get(place) if pairing.ref.slot(place).shape == slot.shape else None
                hashed = leaves.hash(side, content.id, content.hash)
                # What was replaced by numbers of its own is still one value each time it is read.
                what = ("leaf", hashed) if hashed else ("own", side, content.id)
                return interned.of((*what, _held(slot), slot.shape))

            return key

        def put(place: Place) -> int | None:
            content = leaves.snapped_to(place)
            if content is None:
                return None
            recorded = pairing.ref.reader.content(content)
            hashed, slot = leaves.hash(0, content, recorded.hash), pairing.target.slot(place)
            if not hashed or recorded.shape != slot.shape:
                return interned.nobodys()
            return interned.of(("leaf", hashed, _held(slot), slot.shape))

        ref, target = pairing.ref, pairing.target
        known |= value_keys(recording(ref), ref.reader, interned, leaf_key(0, ref))
        found = value_keys(recording(target), target.reader, interned, leaf_key(1, target), put)
        return cls(known, found, _is_one_program(pairing, known, found))


def recording(program: Program) -> Iterable[StoredRecord]:
    """All records of a rank in order, without reading them once more where the program holds them all."""
    return program.reader.records() if program.deselected else program.records.values()


def _is_one_program(pairing: Pairing, ref: dict[Place, int], target: dict[Place, int]) -> bool:

    compared = 0
    for record in pairing.target.records.values():
        if record.kind != "op" or pairing.target.is_edge(record):
            continue
        pair = pairing.ops.get(record.seq)
        if pair is None:
            return False
        twin = pairing.ref.records[pair.ref]
        ours, theirs = pairing.target.outputs(record), pairing.ref.outputs(twin)
        slots = paired_slots(twin, theirs, record, ours)
        if len(slots) < len(ours):
            return False
        for a, b in slots:
            if ref.get((twin.seq, a.index), -1) != target.get((record.seq, b.index), -2):
                return False
    for twin, record in pairing.modules:
        for a, b in module_slots(twin, record, pairing):
            if b.role != "out":
                continue
            if ref.get((twin.seq, a.index), -1) != target.get((record.seq, b.index), -2):
                return False
            compared += 1
    return compared > 0


__all__ = ["Interned", "Keys", "recording", "value_keys"]
