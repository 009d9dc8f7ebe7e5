"""Operands of paired ops: whether each comes from where it should, and is looked at as it should be."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from dispatch_trace.align.canon import SAME_ORDER, family, short
from dispatch_trace.align.graph import Call, Origin, Program, Value, slot_numel
from dispatch_trace.align.ops import scalars
from dispatch_trace.align.pairs import paired_slots, same_path, slot_role
from dispatch_trace.align.summaries import EXTREME
from dispatch_trace.align.views import MAX_ELEMENTS, elements
from dispatch_trace.geometry import extent_of, touched
from dispatch_trace.judge.findings import Finding
from dispatch_trace.judge.handovers import Handovers
from dispatch_trace.judge.noise import NoisePass, State, within
from dispatch_trace.judge.regions import Region, Regions
from dispatch_trace.judge.sites import Sites
from dispatch_trace.schema import StoredRecord, StoredSlot

# Where numbers are kept, not what they are: never a finding.
METADATA_ARGUMENTS = frozenset(
    ["dtype", "device", "layout", "pin_memory", "memory_format", "non_blocking", "copy", "implicit"]
)


class Operands:
    """Compares the operands of an op of the target with those of its counterpart."""

    def __init__(self, noise: NoisePass, sites: Sites, regions: Regions) -> None:
        self._noise = noise
        self._sites = sites
        self._regions = regions
        self._pairing = noise.pairing
        self._ref = noise.pairing.ref
        self._target = noise.pairing.target
        self._handovers = Handovers(noise, self._stands_for)
        self.returned = self._handovers.returned
        self._memory: defaultdict[int, list[tuple[StoredRecord, StoredSlot]]] = defaultdict(list)

    def crossed(self, region: Region, state: State) -> Finding | None:
        """An operand that both sides know, and that is another one of them than in the reference."""
        record, ref = region.target, region.ref
        if (
            ref is None
            or self._regions.counterpart(record) is not ref
            or not (region.only_ref or region.only_target)
        ):
            return None
        for a, b in paired_slots(ref, self._ref.inputs(ref), record, self._target.inputs(record)):
            theirs, ours = self._ref.origins(ref, a), self._target.origins(record, b)
            if len(theirs) != 1 or len(ours) != 1 or not self.holds_other(a, b):
                continue
            known = self._noise.state(ours[0].value).explained and self._noise.stands_for(theirs[0].value)
            if known and not self._stands_for(theirs[0].value, ours[0].value):
                return self.misdirected(record, b, theirs[0], ours[0], state)
        return None

    def overwritten(
        self,
        ref: StoredRecord,
        ref_slots: Iterable[StoredSlot],
        record: StoredRecord,
        slots: Iterable[StoredSlot],
        state: State,
    ) -> Finding | None:
        """An operand whose memory held the right value, and was written to before it is read."""
        for a, b in paired_slots(ref, list(ref_slots), record, list(slots)):
            expected = self._ref.held_content(ref, a)
            if (
                expected < 0
                or b.storage < 0
                or not self._differs(expected, self._target.held_content(record, b))
            ):
                continue
            right = writer = None
            for before, slot in self._uses_of_memory(b.storage):
                if before.seq >= record.seq:
                    break
                if slot.shape == b.shape:
                    held = self._target.held_content(before, slot)
                    if held >= 0 and not self._differs(expected, held):
                        right, writer = before, None
                        continue
                if slot.role == "written" and right is not None and writer is None:
                    writer = before
            if writer is None or self._is_paired_writer(writer, ref, a):
                continue
            evidence = self._sites.evidence(state) | {
                "operand": b.name.removeprefix("in."),
                "expected": self._sites.describe(self._ref, self._ref.origins(ref, a)[0].value),
                "reader": record.op,
            }
            hint = "overwrites what is read again later"
            return self._sites.finding(writer, writer.op, "wiring", evidence, state, hint=hint)
        return None

    def _is_paired_writer(self, writer: StoredRecord, ref: StoredRecord, slot: StoredSlot) -> bool:
        """Whether the reference writes there too, before it reads what it reads."""
        pair = self._pairing.ops.get(writer.seq)
        if pair is None or slot.storage < 0:
            return False
        return any(
            s.role == "written" and s.storage == slot.storage for s in self._ref.records[pair.ref].slots
        )

    def written_elsewhere(self, ref: StoredRecord, record: StoredRecord, state: State) -> Finding | None:
        """An operand into whose memory something was written otherwise than in the reference.

        At another place, or by an op that reads there while it writes.
        """
        for a, b in paired_slots(ref, self._ref.inputs(ref), record, self._target.inputs(record)):
            if min(a.storage, b.storage) < 0 or (a.shape, a.strides) != (b.shape, b.strides):
                continue
            held = self._ref.held_content(ref, a), self._target.held_content(record, b)
            if min(held) >= 0 and not self._differs(*held):
                continue
            last: tuple[StoredRecord, str] | None = None
            for writer, slot in self._uses_of_memory(b.storage):
                if writer.seq >= record.seq:
                    break
                theirs = self._regions.counterpart(writer) if slot.role == "written" else None
                if theirs is None:
                    continue
                for twin in theirs.slots:
                    if twin.role != "written" or twin.storage != a.storage:
                        continue
                    overlap = _read_while_written(writer, slot)
                    if overlap and not _read_while_written(theirs, twin):
                        last = writer, overlap  # what earlier ones wrote was read and right
                    places = _place_within(twin, a), _place_within(slot, b)
                    if None in places or twin.shape != slot.shape or places[0] == places[1]:
                        continue
                    evidence = self._sites.evidence(state) | {"elements": places, "reader": record.op}
                    hint = "writes to another place of the memory"
                    return self._sites.finding(writer, writer.op, "wiring", evidence, state, hint=hint)
            if last is not None:
                evidence = self._sites.evidence(state) | {"operand": last[1], "reader": record.op}
                hint = "reads memory that it writes"
                return self._sites.finding(last[0], last[0].op, "wiring", evidence, state, hint=hint)
        return None

    def _uses_of_memory(self, storage: int) -> list[tuple[StoredRecord, StoredSlot]]:
        """Slots of the target that lie in a piece of memory that something writes to, in order."""
        if not self._memory:
            records = self._target.records.values()
            written = {s.storage for r in records for s in r.slots if s.role == "written" and s.storage >= 0}
            for record in records:
                for slot in record.slots:
                    if slot.is_tensor and slot.storage in written:
                        self._memory[slot.storage].append((record, slot))
        return self._memory.get(storage, [])

    def _differs(self, ref_content: int, target_content: int) -> bool:
        """Whether two contents differ by more than noise could make; unknown counts as no."""
        if target_content < 0:
            return False
        found = self._pairing.comparer.compare(ref_content, target_content)
        if not found.known:
            return False
        return not found.equal and (found.nonfinite > 0 or found.rho > self._noise.band(1e-2, found))

    def lost_operand(self, record: StoredRecord, ref: StoredRecord, state: State) -> Finding | None:
        """A tensor argument that only one side passes."""
        ours = {slot_role(record, slot) for slot in self._target.inputs(record)}
        theirs = {slot_role(ref, slot): slot for slot in self._ref.inputs(ref)}
        evidence = self._sites.evidence(state)
        if family(record.op) != family(ref.op):
            return None
        for role, slot in theirs.items():
            if role not in ours:
                source = self._ref.origins(ref, slot)[0].value
                evidence["arguments"] = {
                    role.removeprefix("in."): [self._sites.describe(self._ref, source), None]
                }
                seat = self.not_passed(record, {source})
                return self._sites.finding(seat, record.op, "argument", evidence, state, where=record)
        extra = [slot for slot in self._target.inputs(record) if slot_role(record, slot) not in theirs]
        if extra:
            source = self._target.origins(record, extra[0])[0].value
            name = slot_role(record, extra[0]).removeprefix("in.")
            evidence["arguments"] = {name: [None, self._sites.describe(self._target, source)]}
            return self._sites.finding(record, record.op, "argument", evidence, state)
        return None

    def not_passed(self, record: StoredRecord, sources: Collection[Value]) -> StoredRecord | Call:
        """The outermost call that should have handed one of these values of the reference on."""
        seat: StoredRecord | Call = record
        if self._pairing.renames.found:
            return seat  # another implementation hands over other things by other names
        backward = {target: ref for ref, target in self._pairing.calls.items()}
        for call in self._target.call_of(record).enclosing():
            twin = self._ref.calls.get(backward.get(call.key, call.key))
            if twin is None or twin.record is None or call.record is None or call.parent is None:
                break
            passed = [
                slot.name
                for slot in twin.record.slots
                if slot.role == "in"
                and slot.is_tensor
                and any(o.value in sources for o in self._ref.origins(twin.record, slot))
            ]
            if not passed or any(s.name in passed and s.is_tensor for s in call.record.slots):
                break
            if self._is_right_without(passed, sources, call):
                break  # a kernel that masks by itself is handed no mask in any layer
            seat = call.parent
        return seat

    def _is_right_without(self, names: Collection[str], sources: Collection[Value], call: Call) -> bool:
        """Whether another call of the target returns right values though it is not handed these either."""
        for key, other in self._pairing.calls.items():
            ref, target = self._ref.calls[key].record, self._target.calls[other].record
            if other == call.key or ref is None or target is None:
                continue
            handed = [s for s in ref.slots if s.role == "in" and s.is_tensor and s.name in names]
            if not any(o.value in sources for slot in handed for o in self._ref.origins(ref, slot)):
                continue
            if any(s.name in names and s.is_tensor for s in target.slots):
                continue
            made = [s for s in target.slots if s.role == "out" and s.is_tensor]
            values = {o.value for slot in made for o in self._target.origins(target, slot)}
            if values and all(self._noise.state(value).explained for value in values):
                return True
        return False

    def wiring(self, record: StoredRecord, ref: StoredRecord, state: State) -> Finding | None:
        """An operand that comes from elsewhere, or is looked at in another way."""
        for a, b in paired_slots(ref, self._ref.inputs(ref), record, self._target.inputs(record)):
            theirs, ours = self._ref.origins(ref, a), self._target.origins(record, b)
            if len(theirs) != 1 or len(ours) != 1:
                continue
            if not self.holds_other(a, b):
                continue
            evidence = self._sites.evidence(state) | {"operand": b.name.removeprefix("in.")}
            if self._stands_for(theirs[0].value, ours[0].value):
                same = self._shows_same(ref, a, theirs[0], record, b, ours[0])
                if same:
                    continue
                view = self.differing_view(theirs[0], ours[0])
                if view is None:
                    if same is False and same_path(self._ref, theirs[0], self._target, ours[0]):
                        evidence["part"] = "another result of the same view"
                        seat = self._handovers.other_part(record, ours[0].value, theirs[0].value)
                        return self._sites.finding(seat, record.op, "wiring", evidence, state, where=record)
                    if a.shape == b.shape and same_path(self._ref, theirs[0], self._target, ours[0]):
                        continue
                    lost = self._lost_view(theirs[0], ours[0])
                    if lost is not None:
                        call = self._ref.call_of(lost)
                        path = self._pairing.renames.nearest(lost.module)
                        evidence["missing_op"] = lost.op
                        return self._sites.place(path, call, lost.op, "wiring", evidence, state, at=record)
                    view = record
                else:
                    evidence["view"] = changed_arguments(self._view_twin(theirs[0], view), view)
                return self._sites.finding(view, view.op, "wiring", evidence, state)
            return self.misdirected(record, b, theirs[0], ours[0], state)
        return None

    def misdirected(
        self, record: StoredRecord, slot: StoredSlot, theirs: Origin, ours: Origin, state: State
    ) -> Finding:
        """An operand that comes from elsewhere."""
        evidence = self._sites.evidence(state) | {
            "operand": slot.name.removeprefix("in."),
            "expected": self._sites.describe(self._ref, theirs.value),
            "found": self._sites.describe(self._target, ours.value),
        }
        writer = self._wrote_over(theirs.value, ours.value)
        if writer is not None:
            evidence["reader"] = record.op
            hint = "overwrites what is read again later"
            return self._sites.finding(writer, writer.op, "wiring", evidence, state, hint=hint)
        returned = self._handovers.returned(theirs.value, ours.value, reader=record)
        if returned is not None:
            return self.short_return(returned, theirs.value, record, evidence, state)
        seat = self._handovers.meeting(record, theirs, ours)
        return self._sites.finding(seat, record.op, "wiring", evidence, state, where=record)

    def short_return(
        self, call: Call, ref: Value, reader: StoredRecord, evidence: dict[str, Any], state: State
    ) -> Finding:
        """A call that returns another right value than the reference's: what makes it is missing there."""
        maker = self._ref.records[ref[0]]
        theirs = self._ref.call_of(maker)
        inside = maker.kind == "op" and self._pairing.calls.get(theirs.key) == call.key
        if inside and maker.seq not in self._pairing.ops_by_ref:
            evidence = evidence | {"missing_op": maker.op, "reader": reader.op}
            return self._sites.finding(call, maker.op, "structure", evidence, state, where=reader)
        return self._sites.finding(call, None, "wiring", evidence, state, where=reader)

    def _wrote_over(self, ref: Value, target: Value) -> StoredRecord | None:
        """The op that wrote a value of the target over the one that the reference reads."""
        record = self._target.records[target[0]]
        if record.slots[target[1]].role != "written":
            return None
        pair = self._pairing.ops.get(record.seq)
        if pair is None or any(s.role == "written" for s in self._ref.records[pair.ref].slots):
            return None  # the reference writes as well: what is read is another question
        memory = record.slots[target[1]].storage
        before = [s for s in self._target.inputs(record) if s.storage == memory >= 0]
        read = [o.value for s in before for o in self._target.origins(record, s)]
        return record if any(self._stands_for(ref, value) for value in read) else None

    def _shows_same(
        self,
        ref: StoredRecord,
        a: StoredSlot,
        theirs: Origin,
        record: StoredRecord,
        b: StoredSlot,
        ours: Origin,
    ) -> bool | None:
        """Whether two slots show the same elements of one value, whatever the views are called.

        None where a view on the way is not known.
        """
        before, after = self._ref.slot(theirs.value), self._target.slot(ours.value)
        if math.prod(before.shape) != math.prod(after.shape):
            return None
        first = elements(self._ref, ref, a, theirs)
        second = elements(self._target, record, b, ours)
        if first is None or second is None:
            return None
        return np.array_equal(first.ravel(), second.ravel())

    def holds_other(self, a: StoredSlot, b: StoredSlot) -> bool:
        """Whether the slots' values differ, as far as that is known; unknown counts as possible."""
        if a.content >= 0 and b.content >= 0 and self._pairing.comparer.compare(a.content, b.content).known:
            return self._differs(a.content, b.content)
        return True

    def _stands_for(self, ref: Value, target: Value) -> bool:
        """Whether a value of the target is that of the reference: the same op's, or equal up to noise."""
        links = self._pairing.links.get(target, ())
        mine = [link for link in links if link.ref == ref]
        if any(link.method in ("op", "param") for link in mine):
            return True
        limit = self._noise.state(target).limit
        found = [difference for difference in map(self._pairing.compare, mine) if difference.known]
        if found:
            return any(within(difference, limit) for difference in found)
        return bool(mine) and not any(link.method in ("op", "param") for link in links)

    def differing_view(self, theirs: Origin, ours: Origin) -> StoredRecord | None:
        """The first view on the target's way that is not on the reference's."""
        return _first_besides(self._target, ours, self._ref, theirs)

    def _lost_view(self, theirs: Origin, ours: Origin) -> StoredRecord | None:
        """The first view on the reference's way that is not on the target's."""
        return _first_besides(self._ref, theirs, self._target, ours)

    def _view_twin(self, theirs: Origin, view: StoredRecord) -> StoredRecord | None:
        return next((r for r in map(self._ref.records.__getitem__, theirs.edges) if r.op == view.op), None)


def _first_besides(program: Program, way: Origin, other: Program, other_way: Origin) -> StoredRecord | None:
    """The first view on one way to a value that is not on the other; copies count as nothing."""
    expected = [_view_key(other.records[seq]) for seq in other_way.edges]
    besides = []
    for seq in way.edges:
        record = program.records[seq]
        key = _view_key(record)
        if key in expected:
            expected.remove(key)
        elif short(record.op) not in ("clone", "detach", "alias", "_to_copy", "lift_fresh"):
            besides.append(record)
    # Where elements keep their order, a view only makes room for what is done next.
    moving = [record for record in besides if short(record.op) not in SAME_ORDER]
    return next(iter(moving or besides), None)


def changed_arguments(
    ref: StoredRecord | None, target: StoredRecord, *, masks: bool = False
) -> dict[str, list[Any]]:
    """{argument: [the reference's, the target's]} of arguments that are no tensors; a missing one is None.

    Args:
      masks: whether it matters by how much something is masked.
    """
    if ref is None:
        return {}
    before, after = (_scalar_arguments(r) for r in (ref, target))
    return {
        name: [before.get(name), after.get(name)]
        for name in {**before, **after}
        if before.get(name) != after.get(name)
        and name not in METADATA_ARGUMENTS
        and (masks or not _both_mask(before.get(name), after.get(name)))
    }


def _both_mask(before: Any, after: Any) -> bool:
    """Whether both are as large as masks are, each the largest of its dtype, say."""
    if not (isinstance(before, float) and isinstance(after, float)):
        return False
    return all(EXTREME <= abs(x) < math.inf for x in (before, after)) and (before > 0) == (after > 0)


def _scalar_arguments(record: StoredRecord) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(scalars(record))
    return found


def _view_key(record: StoredRecord) -> tuple[str, str]:
    return short(record.op), scalars(record)


def _read_while_written(record: StoredRecord, written: StoredSlot) -> str:
    """The argument of an op that lies in what the op writes, in other elements of it; "" if there is none."""
    for slot in record.slots:
        if slot.role == "in" and slot.is_tensor and slot.storage == written.storage >= 0:
            read, into = _elements_of(slot), _elements_of(written)
            if read is None or into is None or np.array_equal(read, into):
                continue
            if np.intersect1d(read, into).size:
                return slot.name.removeprefix("in.")
    return ""


def _elements_of(slot: StoredSlot) -> npt.NDArray[np.int64] | None:
    if slot.offset is None or slot.strides is None or slot_numel(slot) > MAX_ELEMENTS:
        return None
    return touched(slot.offset, slot.shape, slot.strides)


def _place_within(part: StoredSlot, whole: StoredSlot) -> tuple[int, tuple[int, ...]] | None:
    """Where a piece of memory begins among the elements of another, and its strides; None outside of it."""
    if part.offset is None or whole.offset is None or part.strides is None or whole.strides is None:
        return None
    start = part.offset - whole.offset
    return (start, part.strides) if 0 <= start < extent_of(whole.shape, whole.strides) else None
