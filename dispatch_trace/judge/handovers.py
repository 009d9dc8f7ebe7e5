"""Where a right value came to a wrong place: the call that took it, passed it on or returned it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dispatch_trace.align.graph import Call, Origin, Program, Value
from dispatch_trace.align.pairs import module_slots
from dispatch_trace.align.views import Numbers, elements
from dispatch_trace.judge.noise import NoisePass
from dispatch_trace.schema import StoredRecord, StoredSlot


class Handovers:
    """Finds the call to blame for an operand that comes from elsewhere."""

    def __init__(self, noise: NoisePass, stands_for: Callable[[Value, Value], bool]) -> None:
        self._pairing = noise.pairing
        self._ref = noise.pairing.ref
        self._target = noise.pairing.target
        self._stands_for = stands_for

    def returned(self, ref: Value, target: Value, *, reader: StoredRecord) -> Call | None:
        """The innermost call that returns a value of the target where the reference's returns another one.

        Args:
          reader: reads the value; calls around it have not returned yet.
        """

        def other(theirs: StoredRecord, a: StoredSlot, ours: StoredRecord, b: StoredSlot) -> bool:
            return self._only(self._ref, theirs, a) == ref and self._only(self._target, ours, b) == target

        return self._innermost(other, reader)

    def _innermost(
        self,
        differs: Callable[[StoredRecord, StoredSlot, StoredRecord, StoredSlot], bool],
        reader: StoredRecord,
    ) -> Call | None:
        """The innermost call that returns something else, and was handed nothing else, before it is read."""
        around = {call.key for call in self._target.call_of(reader).enclosing()}
        if reader.kind == "module":
            around.discard(self._target.call_of(reader).key)
        chosen: Call | None = None
        for key, other in self._pairing.calls.items():
            theirs, call = self._ref.calls[key].record, self._target.calls[other]
            if theirs is None or call.record is None or call.key in around or call.opened > reader.seq:
                continue
            pairs = module_slots(theirs, call.record, self._pairing)
            if {b.role for a, b in pairs if differs(theirs, a, call.record, b)} != {"out"}:
                continue  # what was handed the value only passes it on
            if chosen is None or chosen in call.enclosing() or call.closed < chosen.opened:
                chosen = call
        return chosen

    @staticmethod
    def _only(program: Program, record: StoredRecord, slot: StoredSlot) -> Value | None:
        """The value that all of a slot comes from; None where several do."""
        origins = program.origins(record, slot)
        return origins[0].value if len(origins) == 1 else None

    def other_part(self, record: StoredRecord, ours: Value, theirs: Value) -> StoredRecord | Call:
        """Where another part of a value was taken: the call that returned it, or the outermost to hand it on.

        The op itself where its call was handed what the reference's was.
        """

        def differs(ref: StoredRecord, a: StoredSlot, target: StoredRecord, b: StoredSlot) -> bool:
            first = self._part(self._ref, ref, a, theirs)
            second = self._part(self._target, target, b, ours)
            return first is not None and second is not None and not np.array_equal(first, second)

        seat: StoredRecord | Call = record
        backward = {target: ref for ref, target in self._pairing.calls.items()}
        for call in self._target.call_of(record).enclosing():
            twin = self._ref.calls.get(backward.get(call.key, call.key))
            if twin is None or twin.record is None or call.record is None or call.parent is None:
                break
            pairs = module_slots(twin.record, call.record, self._pairing)
            if not any(b.role == "in" and differs(twin.record, a, call.record, b) for a, b in pairs):
                break
            seat = call.parent
        return self._innermost(differs, record) or seat

    @staticmethod
    def _part(program: Program, record: StoredRecord, slot: StoredSlot, value: Value) -> Numbers | None:
        """Which elements of a value a slot of a module shows; None where that is not known, or none."""
        origins = program.origins(record, slot)
        if len(origins) != 1 or origins[0].value != value:
            return None
        shown = elements(program, record, slot, origins[0])
        return None if shown is None else shown.ravel()

    def meeting(self, record: StoredRecord, theirs: Origin, ours: Origin) -> StoredRecord | Call:
        """Where an operand was handed over: the innermost call that had both it and the one expected.

        A call has what was computed in it, or handed to it.
        """
        reader = list(self._target.call_of(record).enclosing())
        source = self._target.records[ours.value[0]]
        if source.kind == "param" or self._kept_both(reader[0], record, theirs.value, ours.value):
            return record
        around = {id(c) for c in self._target.call_of(source).enclosing()}
        common = next((c for c in reader if id(c) in around), reader[0])
        inside = reader[: reader.index(common)]
        chosen = next((c for c in inside if self._was_given_both(c, theirs.value, ours.value)), common)
        return record if chosen is reader[0] else chosen

    def _kept_both(self, call: Call, record: StoredRecord, ref: Value, target: Value) -> bool:
        """Whether a module took one of two values of its own: parameters, or what earlier calls made."""
        theirs, ours = self._ref.records[ref[0]], self._target.records[target[0]]
        homes = {self._pairing.renames.nearest(theirs.module), ours.module}
        if homes != {record.module} or call.record is None or self._target.call_of(ours).key == call.key:
            return False
        return target not in self._given(call)

    def _given(self, call: Call) -> set[Value]:
        """Values that a call of the target was handed, as far as that was recorded."""
        if call.record is None:
            return set()
        return {
            origin.value
            for slot in call.record.slots
            if slot.role == "in" and slot.is_tensor
            for origin in self._target.origins(call.record, slot)
        }

    def _was_given_both(self, call: Call, ref: Value, target: Value) -> bool:
        """Whether a call of the target was handed a value and has one that stands for a reference value."""
        given = self._given(call)
        if target not in given:
            return False
        return self._makes(call, ref) or any(self._stands_for(ref, value) for value in given - {target})

    def _makes(self, call: Call, ref: Value) -> bool:
        """Whether a value of the reference is computed within its call that is paired with this one."""
        made_in = self._ref.call_of(self._ref.records[ref[0]]).enclosing()
        return any(self._pairing.calls.get(around.key) == call.key for around in made_in)
