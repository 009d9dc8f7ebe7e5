"""What lies between a culprit and the nearest compared values: ops without a partner, on either side."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from dispatch_trace.align.canon import is_empty, is_factory, short
from dispatch_trace.align.graph import Call, Program, Value
from dispatch_trace.align.modules import host
from dispatch_trace.align.pairs import paired_slots
from dispatch_trace.judge.noise import NoisePass, State
from dispatch_trace.schema import NO_CALL, StoredRecord, StoredSlot


@dataclass(slots=True)
class Region:
    """A culprit and the unpaired ops before it.

    Attributes:
      target: the op that made the wrong value (or that returns it).
      ref: its counterpart, None where it has none.
      only_target, only_ref: ops without a partner between it and the nearest compared values, in order.
      unseen: ops there that have one, but whose results could not be compared, in order.
    """

    target: StoredRecord
    ref: StoredRecord | None
    only_target: list[StoredRecord] = field(default_factory=list)
    only_ref: list[StoredRecord] = field(default_factory=list)
    unseen: list[StoredRecord] = field(default_factory=list)

    @property
    def inside(self) -> list[StoredRecord]:
        """The target's ops of the region, in order."""
        found = {record.seq: record for record in (*self.only_target, *self.unseen, self.target)}
        return [found[seq] for seq in sorted(found)]


class Regions:
    """Finds regions, and answers what lies in them."""

    def __init__(self, noise: NoisePass) -> None:
        self._noise = noise
        self._pairing = noise.pairing
        self._ref = noise.pairing.ref
        self._target = noise.pairing.target

    def of(self, value: Value, state: State) -> Region:
        record = self._target.records[value[0]]
        pair = self._pairing.ops.get(record.seq)
        ref: StoredRecord | None = None
        if pair is not None:
            ref = self._ref.records[pair.ref]
        elif state.link is not None:
            owner = self._ref.records[state.link.ref[0]]
            ref = owner if owner.kind == "op" else None
        region = Region(record, ref)
        self.fill(region)
        if pair is None and not is_factory(record):
            region.only_target.append(record)
        if ref is not None:
            region.only_ref = self.unmeasured_before(ref)
            if ref.seq not in self._pairing.ops_by_ref and not is_factory(ref):
                region.only_ref.append(ref)
        return region

    def fill(self, region: Region, slots: Iterable[StoredSlot] | None = None) -> None:
        """Ops of the target between the region's (or these slots of it) and the nearest compared values."""
        record = region.target

        def opaque(value: Value) -> bool:
            if self._pairing.plan is not None and self._target.records[value[0]].step != record.step:
                return False  # an earlier step answers for itself: it was compared with a step of its own
            state = self._noise.state(value)
            return state.explained is None and not state.alike and not self._target.is_leaf(value)

        between = _walk(self._target, record, opaque, slots)
        region.only_target = [r for r in between if r.seq not in self._pairing.ops]
        region.unseen = [r for r in between if r.seq in self._pairing.ops]

    def unmeasured_before(
        self, record: StoredRecord, slots: Iterable[StoredSlot] | None = None
    ) -> list[StoredRecord]:
        def opaque(value: Value) -> bool:
            opposite = self._noise.unordered.opposite(value)
            if opposite and all(self._noise.state(other).alike for other in opposite):
                return False
            return not self._ref.is_leaf(value) and not self._noise.stands_for(value)

        return _walk(self._ref, record, opaque, slots)

    def counterpart(self, record: StoredRecord) -> StoredRecord | None:
        pair = self._pairing.ops.get(record.seq)
        return self._ref.records[pair.ref] if pair is not None else None

    def unpaired_calls(
        self, program: Program, records: Iterable[StoredRecord], paired: dict[Any, Any]
    ) -> list[Call]:
        """Outermost calls without a partner that all of the records lie in; empty if one lies in none."""
        found: list[Call] = []
        for record in records:
            outer: Call | None = None
            for call in program.call_of(record).enclosing():
                if call.key in paired:
                    break
                outer = call
            if outer is None or outer.number == NO_CALL:
                return []
            if outer not in found:
                found.append(outer)
        return found

    def expected_by(self, region: Region) -> set[Value]:
        """The target's values that its op should read, or hand on where the reference does nothing more."""
        ref = region.ref
        if ref is None:
            return set()
        if ref.seq in self._pairing.ops_by_ref and self.counterpart(region.target) is not ref:
            values = {(ref.seq, slot.index) for slot in self._ref.outputs(ref)}
        else:
            slots = self._ref.inputs(ref)
            values = {origin.value for slot in slots for origin in self._ref.origins(ref, slot)}
        return {link.target for value in values for link in self._pairing.ref_links.get(value, ())}

    def read_by(self, record: StoredRecord) -> set[Value]:
        """The values of the target that one of its ops reads."""
        slots = self._target.inputs(record)
        return {origin.value for slot in slots for origin in self._target.origins(record, slot)}

    def fed_by_constant(self, region: Region) -> bool:
        """Whether the reader takes a constant of the program where the reference computes something.

        A constant that the reference computes with counts for nothing: what was to be done to it is missing.
        """
        assert region.ref is not None
        read = {
            o.value for r in region.only_ref for s in self._ref.inputs(r) for o in self._ref.origins(r, s)
        }
        used = {link.target for value in read for link in self._pairing.ref_links.get(value, ())}
        for a, b in paired_slots(
            region.ref, self._ref.inputs(region.ref), region.target, self._target.inputs(region.target)
        ):
            ours = self._target.origins(region.target, b)
            theirs = self._ref.origins(region.ref, a)
            computed = any(o.value[0] in {r.seq for r in region.only_ref} for o in theirs)
            if computed and all(
                self._target.is_leaf(o.value) or is_factory(self._target.records[o.value[0]]) for o in ours
            ):
                return not any(o.value in used for o in ours)
        return False

    def has_twin(self, record: StoredRecord, region: Region) -> bool:
        """Whether the reference holds the result of an unpaired op, somewhere in the region or around it."""
        mine = [s for s in self._target.outputs(record) if s.content >= 0]
        if not mine:
            return False
        nearby = [*region.only_ref, *([region.ref] if region.ref is not None else [])]
        for other in nearby:
            for slot in self._ref.outputs(other):
                if slot.content < 0:
                    continue
                found = self._pairing.comparer.compare(slot.content, mine[0].content)
                if (
                    found.known
                    and not found.nonfinite
                    and found.rho
                    <= self._noise.band(self._noise.state((record.seq, mine[0].index)).predicted, found)
                ):
                    return True
        return False

    def leads_elsewhere(self, record: StoredRecord) -> bool:
        """Whether what an op made also went into a value that was found right."""
        todo = [(record.seq, slot.index) for slot in self._target.outputs(record)]
        seen = set(todo)
        while todo:
            for seq, _ in self._target.consumers.get(todo.pop(), ()):
                for slot in self._target.outputs(self._target.records[seq]):
                    value = (seq, slot.index)
                    found = self._noise.states.get(value)
                    if found is not None and found.difference is not None:
                        if found.explained:
                            return True
                    elif value not in seen:
                        seen.add(value)
                        todo.append(value)
        return False

    def same_body(self, ref: StoredRecord, target: StoredRecord) -> bool:
        """Whether two ops stand in paired calls, or in calls hosted by paired ones."""
        theirs = host(self._ref.call_of(ref), self._pairing.calls)
        return self._pairing.calls.get(theirs.key) == self.hosted(target).key

    def hosted(self, record: StoredRecord) -> Call:
        backward = {target: ref for ref, target in self._pairing.calls.items()}
        return host(self._target.call_of(record), backward)


def _walk(
    program: Program,
    record: StoredRecord,
    opaque: Callable[[Value], bool],
    slots: Iterable[StoredSlot] | None = None,
) -> list[StoredRecord]:
    """Compute ops behind a record's inputs, through opaque values only, without constants."""
    found: dict[int, StoredRecord] = {}
    todo: list[tuple[StoredRecord, Iterable[StoredSlot]]] = [
        (record, program.inputs(record) if slots is None else slots)
    ]
    while todo:
        reader, read = todo.pop()
        for slot in read:
            if _blind(reader, slot):
                continue
            for origin in program.origins(reader, slot):
                source = program.records[origin.value[0]]
                if source.kind != "op" or source.seq in found or not opaque(origin.value) or is_empty(source):
                    continue
                found[source.seq] = source
                todo.append((source, program.inputs(source)))
    return [found[seq] for seq in sorted(found) if not is_factory(found[seq]) or found[seq].random]


def _blind(record: StoredRecord, slot: StoredSlot) -> bool:
    return slot.name == "in.out" or (short(record.op) in ("copy", "fill", "zero") and slot.name == "in.self")
