"""From a value that is wrong to the op, argument, weight or module to blame for it.

A culprit is a wrong value all of whose inputs are right. Between it and the nearest compared values lie ops
without a partner, on either side: its *region*. What the region holds decides what is said (BLAME.md section 1.5).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from dispatch_trace.align.canon import family, is_empty, is_factory, short
from dispatch_trace.align.content import Difference
from dispatch_trace.align.graph import Call, Origin, Program, Value
from dispatch_trace.align.modules import host
from dispatch_trace.align.ops import scalars
from dispatch_trace.align.pairs import Pairing, paired_slots, same_path, slot_role
from dispatch_trace.judge.findings import Finding
from dispatch_trace.judge.noise import NoisePass, State, within
from dispatch_trace.schema import NO_CALL, StoredRecord, StoredSlot

# Where numbers are kept, not what they are: never a finding.
METADATA_ARGUMENTS = frozenset(
    ["dtype", "device", "layout", "pin_memory", "memory_format", "non_blocking", "copy", "implicit"]
)
# Written out by hand these become so many ops that none of them answers for the whole.
_FUSED = frozenset({"attention", "layer_norm", "rms_norm", "group_norm", "batch_norm"})


@dataclass(slots=True)
class Region:
    """A culprit and the unpaired ops before it.

    Attributes:
      target: the op that made the wrong value (or that returns it).
      ref: its counterpart, None where it has none.
      only_target, only_ref: ops without a partner between it and the nearest compared values, in order.
    """

    target: StoredRecord
    ref: StoredRecord | None
    only_target: list[StoredRecord] = field(default_factory=list)
    only_ref: list[StoredRecord] = field(default_factory=list)


class Blame:
    """Names what is to blame for wrong values."""

    def __init__(self, noise: NoisePass) -> None:
        self._noise = noise
        self._pairing: Pairing = noise.pairing
        self._ref: Program = noise.pairing.ref
        self._target: Program = noise.pairing.target

    # Entry points -----------------------------------------------------------------------------------

    def value(self, value: Value) -> Finding:
        """For a wrong value that an op of the target made."""
        state = self._noise.state(value)
        region = self._region(value, state)
        if state.link is not None and self._ref.records[state.link.ref[0]].kind == "param":
            return self._made_parameter(region, state, self._ref.records[state.link.ref[0]])
        for rule in (
            self._uninitialised,
            self._random,
            self._nonfinite,
            self._quantised,
            self._crossed,
            self._modules,
            self._same_ops,
            self._missing_ops,
            self._extra_ops,
        ):
            found = rule(region, state)
            if found is not None:
                return found
        return self._replaced(region, state)

    def leaf(self, value: Value, reader: StoredRecord) -> Finding:
        """For a wrong leaf: a parameter, an input of the program or a constant."""
        state = self._noise.state(value)
        record = self._target.records[value[0]]
        evidence = self._evidence(state)
        if record.kind == "param":
            return self._parameter(record, reader, state, evidence)
        seat = self._program_input(value)
        if seat is not None:
            evidence["input"] = seat[1].name
            return self._finding(
                seat[0], None, "argument", evidence, state, hint="the runs got different inputs"
            )
        first = self._first_edge(value, reader)
        evidence["constant"] = True
        if state.link is not None and self._ref.records[state.link.ref[0]].kind == "param":
            evidence["parameter"] = self._ref.records[state.link.ref[0]].name
            return self._finding(reader, reader.op, "parameter", evidence, state)
        return self._finding(first, first.op, "argument", evidence, state)

    def opaque(self, value: Value) -> Finding:
        """For what a compiled region returned: only the producer of its output can be named."""
        state = self._noise.state(value)
        record = self._target.records[value[0]]
        evidence = self._evidence(state) | {"region": record.note or "opaque"}
        hint = "inside a compiled region: the op that produced the reference's output is named"
        owner = None if state.link is None else self._ref.records[state.link.ref[0]]
        if owner is None or owner.kind != "op":
            return self._finding(record, None, "introduced", evidence, state, hint=hint)
        call = self._ref.call_of(owner)
        path = self._pairing.renames.apply(owner.module)
        found = self._place(path, call, owner.op, "introduced", evidence, state, None, hint=hint, at=record)
        return replace(found, source=_source(owner))

    def output(
        self,
        ref: StoredRecord,
        a: StoredSlot,
        target: StoredRecord,
        b: StoredSlot,
        found: Difference,
        band: float,
    ) -> Finding:
        """For a final output that is wrong though every value of the target behind it is right."""
        state = State(rho=found.rho, difference=found, explained=False, limit=band)
        region = Region(target, ref)
        region.only_target = self._unpaired_before(target, [b])
        region.only_ref = self._unmeasured_before(ref, [a])
        for rule in (self._modules, self._missing_ops, self._extra_ops):
            finding = rule(region, state)
            if finding is not None:
                return replace(finding, evidence={**finding.evidence, "output": b.name})
        evidence = self._evidence(state) | {"output": b.name}
        theirs, ours = self._ref.origins(ref, a), self._target.origins(target, b)
        view = self._differing_view(theirs[0], ours[0]) if theirs and ours else None
        return self._finding(view or target, view.op if view is not None else None, "wiring", evidence, state)

    # Rules, in order --------------------------------------------------------------------------------

    def _uninitialised(self, region: Region, state: State) -> Finding | None:
        for record in (*region.only_target, region.target):
            for slot in self._target.inputs(record):
                if slot.uninitialised and not _reads_unwritten(self._counterpart(record)):
                    evidence = self._evidence(state) | {"argument": slot.name.removeprefix("in.")}
                    return self._finding(
                        record,
                        record.op,
                        "uninitialised",
                        evidence,
                        state,
                        hint="reads memory that nothing wrote",
                    )
        return None

    def _random(self, region: Region, state: State) -> Finding | None:
        for record in (*region.only_target, region.target):
            if not record.random:
                continue
            twin = self._counterpart(record)
            if twin is not None and twin.random:
                if record is region.target:
                    return self._finding(record, record.op, "nondeterministic", self._evidence(state), state)
            elif not any(r.random for r in region.only_ref):
                evidence = self._evidence(state) | {"extra_op": record.op}
                return self._finding(
                    record,
                    record.op,
                    "structure",
                    evidence,
                    state,
                    hint="a random op that the reference lacks",
                )
        return None

    def _nonfinite(self, region: Region, state: State) -> Finding | None:
        if state.difference is None or not state.difference.nonfinite:
            return None
        for record in (*region.only_target, region.target):
            made = self._nonfinite_counts(self._target, self._target.outputs(record))
            read = self._nonfinite_counts(self._target, self._target.inputs(record))
            new_nan = made[0] > 0 and read[0] == 0
            new_inf = record is region.target and made[1] > 0 and read[1] == 0
            if new_nan or new_inf:
                evidence = self._evidence(state) | {"nan": made[0], "inf": made[1]}
                what = "NaN from inputs without NaN" if new_nan else "inf from finite inputs"
                return self._finding(record, record.op, "nonfinite", evidence, state, hint=what)
        return None

    def _modules(self, region: Region, state: State) -> Finding | None:
        """A module that the target never calls, or calls besides."""
        missing = self._unpaired_calls(self._ref, region.only_ref, self._pairing.calls)
        backward = {target: ref for ref, target in self._pairing.calls.items()}
        extra = self._unpaired_calls(self._target, region.only_target, backward)
        if missing and not region.only_target and len(missing) == 1:
            call = missing[0]
            evidence = self._evidence(state) | {"missing_module": call.path, "reader": region.target.op}
            path = self._pairing.renames.apply(call.path)
            return self._place(
                path, call, None, "structure", evidence, state, region, hint="the target never calls it"
            )
        if extra and not region.only_ref and len(extra) == 1:
            call = extra[0]
            evidence = self._evidence(state) | {"extra_module": call.path}
            return self._place(
                call.path,
                call,
                None,
                "structure",
                evidence,
                state,
                region,
                hint="the reference never calls it",
            )
        return None

    def _quantised(self, region: Region, state: State) -> Finding | None:
        """A result that is wrong beyond what its weight's codes and scales may cost."""
        for record in (*region.only_target, region.target):
            for slot in self._target.inputs(record):
                for origin in self._target.origins(record, slot):
                    codes = self._noise.codes.get(origin.value)
                    if codes is not None:
                        return self._made_parameter(region, state, codes.weight)
        return None

    def _crossed(self, region: Region, state: State) -> Finding | None:
        """An operand that both sides know, and that is another one of them than in the reference."""
        record, ref = region.target, region.ref
        if ref is None or self._counterpart(record) is not ref or not (region.only_ref or region.only_target):
            return None
        for a, b in paired_slots(ref, self._ref.inputs(ref), record, self._target.inputs(record)):
            theirs, ours = self._ref.origins(ref, a), self._target.origins(record, b)
            if len(theirs) != 1 or len(ours) != 1 or not self._holds_other(a, b):
                continue
            known = self._noise.state(ours[0].value).explained and self._noise.stands_for(theirs[0].value)
            if known and not self._stands_for(theirs[0].value, ours[0].value):
                return self._misdirected(record, b, theirs[0], ours[0], state)
        return None

    def _same_ops(self, region: Region, state: State) -> Finding | None:
        """Nothing unpaired in between: an argument, an operand, or the op itself."""
        if region.only_target or region.only_ref or region.ref is None:
            return None
        record, ref = region.target, region.ref
        wiring = self._wiring(record, ref, state)
        if wiring is not None:
            return wiring
        lost = self._lost_operand(record, ref, state)
        if lost is not None:
            return lost
        changed = changed_arguments(ref, record)
        evidence = self._evidence(state)
        if changed:
            return self._finding(record, record.op, "argument", evidence | {"arguments": changed}, state)
        if short(ref.op) != short(record.op):
            evidence["ref_op"] = ref.op
        return self._finding(record, record.op, "introduced", evidence, state)

    def _lost_operand(self, record: StoredRecord, ref: StoredRecord, state: State) -> Finding | None:
        """A tensor argument that only one side passes."""
        ours = {slot_role(record, slot) for slot in self._target.inputs(record)}
        theirs = {slot_role(ref, slot): slot for slot in self._ref.inputs(ref)}
        evidence = self._evidence(state)
        if family(record.op) != family(ref.op):
            return None
        for role, slot in theirs.items():
            if role not in ours:
                source = self._ref.origins(ref, slot)[0].value
                evidence["arguments"] = {role.removeprefix("in."): [self._describe(self._ref, source), None]}
                seat = self._not_passed(record, {source})
                return self._finding(seat, record.op, "argument", evidence, state, where=record)
        extra = [slot for slot in self._target.inputs(record) if slot_role(record, slot) not in theirs]
        if extra:
            source = self._target.origins(record, extra[0])[0].value
            name = slot_role(record, extra[0]).removeprefix("in.")
            evidence["arguments"] = {name: [None, self._describe(self._target, source)]}
            return self._finding(record, record.op, "argument", evidence, state)
        return None

    def _not_passed(self, record: StoredRecord, sources: Collection[Value]) -> StoredRecord | Call:
        """The outermost call in which one of these values of the reference should have been handed on to `record`."""
        seat: StoredRecord | Call = record
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
            seat = call.parent
        return seat

    def _missing_ops(self, region: Region, state: State) -> Finding | None:
        if region.only_target or not region.only_ref:
            return None
        last = region.only_ref[-1]
        evidence = self._evidence(state) | {"missing_op": last.op, "reader": region.target.op}
        if len(region.only_ref) > 1:
            evidence["missing_ops"] = [r.op for r in region.only_ref]
        made = {(r.seq, slot.index) for r in region.only_ref for slot in self._ref.outputs(r)}
        seat = self._not_passed(region.target, made)
        if isinstance(seat, Call):
            theirs = [
                r for r in region.only_ref if self._pairing.calls.get(self._ref.call_of(r).key) == seat.key
            ]
            op = theirs[-1].op if theirs else None
            return self._finding(seat, op, "structure", evidence, state, where=region.target)
        body = host(self._ref.call_of(last), self._pairing.calls)
        mine = self._hosted(region.target)
        if self._pairing.calls.get(body.key) == mine.key or self._fed_by_constant(region):
            op = region.target.op if region.target.kind == "op" else last.op
            return self._finding(region.target, op, "structure", evidence, state)
        path = self._pairing.renames.apply(last.module)
        call = self._target.calls.get(self._pairing.calls.get(body.key, body.key))
        return self._place(path, call or body, last.op, "structure", evidence, state, region)

    def _extra_ops(self, region: Region, state: State) -> Finding | None:
        if region.only_ref or not region.only_target:
            return None
        first = region.only_target[0]
        evidence = self._evidence(state) | {"extra_op": first.op}
        if len(region.only_target) > 1:
            evidence["extra_ops"] = [r.op for r in region.only_target]
        return self._finding(first, first.op, "structure", evidence, state)

    def _replaced(self, region: Region, state: State) -> Finding:
        """Both sides do something of their own: the first op whose result the reference does not have."""
        evidence = self._evidence(state) | {
            "ref_ops": [r.op for r in region.only_ref],
            "target_ops": [r.op for r in region.only_target],
        }
        made = {(r.seq, slot.index) for r in region.only_ref for slot in self._ref.outputs(r)}
        seat = self._not_passed(region.target, made) if region.ref is not None else region.target
        if isinstance(seat, Call):
            return self._finding(seat, None, "structure", evidence, state, where=region.target)
        fused = next((r for r in region.only_ref if family(r.op) in _FUSED), None)
        inside = [r for r in region.only_target if fused is None or self._same_body(fused, r)]
        candidates = [*(inside or region.only_target), region.target]
        if fused is not None and len(inside) > 2:
            scaled = _other_scale(fused, inside)
            if scaled is not None:
                record, ref_scale, scale = scaled
                evidence["arguments"] = {"scale": [ref_scale, scale]}
                return self._finding(record, record.op, "argument", evidence, state)
            return self._finding(candidates[0], None, "structure", evidence, state)
        chosen = next((r for r in candidates if not self._has_twin(r, region)), region.target)
        return self._finding(chosen, chosen.op, "structure", evidence, state)

    def _same_body(self, ref: StoredRecord, target: StoredRecord) -> bool:
        """Whether two ops stand in paired calls, or in calls hosted by paired ones."""
        theirs = host(self._ref.call_of(ref), self._pairing.calls)
        return self._pairing.calls.get(theirs.key) == self._hosted(target).key

    # Regions ----------------------------------------------------------------------------------------

    def _region(self, value: Value, state: State) -> Region:
        record = self._target.records[value[0]]
        pair = self._pairing.ops.get(record.seq)
        ref: StoredRecord | None = None
        if pair is not None:
            ref = self._ref.records[pair.ref]
        elif state.link is not None:
            owner = self._ref.records[state.link.ref[0]]
            ref = owner if owner.kind == "op" else None
        region = Region(record, ref)
        region.only_target = self._unpaired_before(record)
        if pair is None and not is_factory(record):
            region.only_target.append(record)
        if ref is not None:
            region.only_ref = self._unmeasured_before(ref)
            if ref.seq not in self._pairing.ops_by_ref and not is_factory(ref):
                region.only_ref.append(ref)
        return region

    def _unpaired_before(
        self, record: StoredRecord, slots: Iterable[StoredSlot] | None = None
    ) -> list[StoredRecord]:
        """Ops of the target between a record (or these slots of it) and the nearest compared values."""

        def opaque(value: Value) -> bool:
            return self._noise.state(value).explained is None and not self._target.is_leaf(value)

        return _walk(self._target, record, opaque, slots)

    def _unmeasured_before(
        self, record: StoredRecord, slots: Iterable[StoredSlot] | None = None
    ) -> list[StoredRecord]:
        def opaque(value: Value) -> bool:
            return not self._ref.is_leaf(value) and not self._noise.stands_for(value)

        return _walk(self._ref, record, opaque, slots)

    def _counterpart(self, record: StoredRecord) -> StoredRecord | None:
        pair = self._pairing.ops.get(record.seq)
        return self._ref.records[pair.ref] if pair is not None else None

    def _unpaired_calls(
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

    def _fed_by_constant(self, region: Region) -> bool:
        """Whether the reader takes a constant of the program where the reference computes something."""
        assert region.ref is not None
        for a, b in paired_slots(
            region.ref, self._ref.inputs(region.ref), region.target, self._target.inputs(region.target)
        ):
            ours = self._target.origins(region.target, b)
            theirs = self._ref.origins(region.ref, a)
            computed = any(o.value[0] in {r.seq for r in region.only_ref} for o in theirs)
            if computed and all(
                self._target.is_leaf(o.value) or is_factory(self._target.records[o.value[0]]) for o in ours
            ):
                return True
        return False

    def _has_twin(self, record: StoredRecord, region: Region) -> bool:
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

    # Wiring -----------------------------------------------------------------------------------------

    def _wiring(self, record: StoredRecord, ref: StoredRecord, state: State) -> Finding | None:
        """An operand that comes from elsewhere, or is looked at in another way."""
        for a, b in paired_slots(ref, self._ref.inputs(ref), record, self._target.inputs(record)):
            theirs, ours = self._ref.origins(ref, a), self._target.origins(record, b)
            if len(theirs) != 1 or len(ours) != 1:
                continue
            if not self._holds_other(a, b):
                continue
            evidence = self._evidence(state) | {"operand": b.name.removeprefix("in.")}
            if self._stands_for(theirs[0].value, ours[0].value):
                view = self._differing_view(theirs[0], ours[0])
                if view is None:
                    if a.shape == b.shape and same_path(self._ref, theirs[0], self._target, ours[0]):
                        continue
                    lost = self._lost_view(theirs[0], ours[0])
                    if lost is not None:
                        call = self._ref.call_of(lost)
                        path = self._pairing.renames.apply(lost.module)
                        evidence["missing_op"] = lost.op
                        return self._place(path, call, lost.op, "wiring", evidence, state, None, at=record)
                    view = record
                else:
                    evidence["view"] = changed_arguments(self._view_twin(theirs[0], view), view)
                return self._finding(view, view.op, "wiring", evidence, state)
            return self._misdirected(record, b, theirs[0], ours[0], state)
        return None

    def _misdirected(
        self, record: StoredRecord, slot: StoredSlot, theirs: Origin, ours: Origin, state: State
    ) -> Finding:
        """An operand that comes from elsewhere."""
        evidence = self._evidence(state) | {
            "operand": slot.name.removeprefix("in."),
            "expected": self._describe(self._ref, theirs.value),
            "found": self._describe(self._target, ours.value),
        }
        return self._finding(self._meeting(record, ours), record.op, "wiring", evidence, state, where=record)

    def _holds_other(self, a: StoredSlot, b: StoredSlot) -> bool:
        """Whether the slots' values differ, as far as that is known; unknown counts as possible."""
        if a.content >= 0 and b.content >= 0:
            found = self._pairing.comparer.compare(a.content, b.content)
            if found.known:
                return not found.equal and (found.nonfinite > 0 or found.rho > self._noise.band(1e-2, found))
        return True

    def _stands_for(self, ref: Value, target: Value) -> bool:
        """Whether a value of the target is that value of the reference: the same op's, or equal up to noise."""
        links = self._pairing.links.get(target, ())
        mine = [link for link in links if link.ref == ref]
        if any(link.method in ("op", "param") for link in mine):
            return True
        limit = self._noise.state(target).limit
        found = [difference for difference in map(self._pairing.compare, mine) if difference.known]
        if found:
            return any(within(difference, limit) for difference in found)
        return bool(mine) and not any(link.method in ("op", "param") for link in links)

    def _differing_view(self, theirs: Origin, ours: Origin) -> StoredRecord | None:
        """The first view on the target's way that is not on the reference's."""
        expected = [_view_key(self._ref.records[seq]) for seq in theirs.edges]
        for seq in ours.edges:
            record = self._target.records[seq]
            key = _view_key(record)
            if key in expected:
                expected.remove(key)
            elif short(record.op) not in ("clone", "detach", "alias", "_to_copy", "lift_fresh"):
                return record
        return None

    def _lost_view(self, theirs: Origin, ours: Origin) -> StoredRecord | None:
        """The first view on the reference's way that is not on the target's."""
        present = [_view_key(self._target.records[seq]) for seq in ours.edges]
        for seq in theirs.edges:
            record = self._ref.records[seq]
            key = _view_key(record)
            if key in present:
                present.remove(key)
            elif short(record.op) not in ("clone", "detach", "alias", "_to_copy", "lift_fresh"):
                return record
        return None

    def _view_twin(self, theirs: Origin, view: StoredRecord) -> StoredRecord | None:
        return next((r for r in map(self._ref.records.__getitem__, theirs.edges) if r.op == view.op), None)

    def _meeting(self, record: StoredRecord, origin: Origin) -> StoredRecord | Call:
        """Where an operand was handed over: the innermost call around both its source and its reader."""
        reader = self._target.call_of(record).enclosing()
        source = self._target.records[origin.value[0]]
        if source.kind == "param":
            return record
        around = {id(c) for c in self._target.call_of(source).enclosing()}
        common = next((c for c in reader if id(c) in around), reader[0])
        return record if common is reader[0] else common

    # Leaves -----------------------------------------------------------------------------------------

    def _parameter(
        self, record: StoredRecord, reader: StoredRecord, state: State, evidence: dict[str, Any]
    ) -> Finding:
        evidence["parameter"] = record.name
        evidence["path"] = f"{record.module}.{record.name}" if record.module else record.name
        hint = None
        link = state.link
        if link is not None:
            owner = self._ref.records[link.ref[0]]
            if owner.kind == "param" and (owner.module, owner.name) != (record.module, record.name):
                evidence["ref_parameter"] = f"{owner.module}.{owner.name}" if owner.module else owner.name
            better = self._pairing.comparer.permuted(link.ref_content, link.target_content, 1e-3)
            if better is not None:
                hint = f"the reference's, {better.transform}"
        call = self._target.call_of(reader)
        for around in call.enclosing():
            if around.path == record.module:
                call = around
        owner_path = record.module
        if not owner_path or not any(c.path == owner_path for c in call.enclosing()):
            return self._place(
                owner_path, call, reader.op, "parameter", evidence, state, None, hint=hint, at=reader
            )
        return self._place(
            owner_path, call, reader.op, "parameter", evidence, state, None, hint=hint, at=reader
        )

    def _made_parameter(self, region: Region, state: State, param: StoredRecord) -> Finding:
        """A value that the target computes where the reference has a weight (codes and scales, say)."""
        evidence = self._evidence(state) | {
            "parameter": param.name,
            "path": f"{param.module}.{param.name}" if param.module else param.name,
            "target_ops": [r.op for r in region.only_target],
        }
        return self._finding(region.target, region.target.op, "parameter", evidence, state)

    def _program_input(self, value: Value) -> tuple[StoredRecord, StoredSlot] | None:
        """The root call that was given this leaf, if one was."""
        leaf = self._target.slot(value)
        for call in self._target.roots:
            if call.record is None:
                continue
            for slot in call.record.slots:
                if slot.role == "in" and slot.is_tensor and slot.leaf and slot.storage == leaf.storage >= 0:
                    return call.record, slot
        return None

    def _first_edge(self, value: Value, reader: StoredRecord) -> StoredRecord:
        """The op that first took a constant: usually `lift_fresh`."""
        record = self._target.records[value[0]]
        return record if record.kind == "op" else reader

    # Findings ---------------------------------------------------------------------------------------

    def _evidence(self, state: State | None) -> dict[str, Any]:
        if state is None:
            return {}
        found: dict[str, Any] = {
            "error": state.rho,
            "band": self._noise.band(state.predicted, state.difference),
        }
        difference = state.difference
        if difference is not None:
            found["measured_by"] = difference.method
            if difference.nonfinite:
                found["nonfinite"] = difference.nonfinite
            if difference.worst is not None:
                found["worst_row"] = list(difference.worst[0])
                found["worst_row_error"] = difference.worst[1]
            if difference.transform:
                found["transform"] = difference.transform
        found["input_error"] = self._input_error(state)
        return found

    def _input_error(self, state: State) -> float:
        if state.link is None:
            return 0.0
        record = self._target.records[state.link.target[0]]
        if record.kind != "op":
            return 0.0
        return max((self._noise.slot_noise(record, s)[0] for s in self._target.inputs(record)), default=0.0)

    def _finding(
        self,
        seat: StoredRecord | Call,
        op: str | None,
        label: str,
        evidence: dict[str, Any],
        state: State | None,
        *,
        hint: str | None = None,
        where: StoredRecord | None = None,
    ) -> Finding:
        if isinstance(seat, Call):
            step, _, module, number = seat.key
            record = where
        else:
            step, module, number, record = seat.step, seat.module, seat.call, seat
        return Finding(
            module=module,
            call=None if number == NO_CALL else number,
            step=step,
            op=op,
            label=label,
            evidence=_plain(evidence),
            source=_source(record),
            hint=hint or self._hint(state),
            seq=record.seq if record is not None else -1,
            ref_seq=self._ref_seq(record, state),
        )

    def _place(
        self,
        module: str,
        call: Call,
        op: str | None,
        label: str,
        evidence: dict[str, Any],
        state: State,
        region: Region | None,
        *,
        hint: str | None = None,
        at: StoredRecord | None = None,
    ) -> Finding:
        record = at if at is not None else region.target if region is not None else None
        return Finding(
            module=module,
            call=None if call.number == NO_CALL else call.number,
            step=call.key[0],
            op=op,
            label=label,
            evidence=_plain(evidence),
            source=_source(record),
            hint=hint or self._hint(state),
            seq=record.seq if record is not None else -1,
            ref_seq=self._ref_seq(record, state),
        )

    def _ref_seq(self, record: StoredRecord | None, state: State | None) -> int:
        if record is not None and record.seq in self._pairing.ops:
            return self._pairing.ops[record.seq].ref
        return state.link.ref[0] if state is not None and state.link is not None else -1

    def _hint(self, state: State | None) -> str | None:
        from dispatch_trace.judge.hints import hint_of

        if state is None or state.link is None or state.difference is None:
            return None
        return hint_of(self._pairing, state.link, state.difference)

    def _hosted(self, record: StoredRecord) -> Call:
        backward = {target: ref for ref, target in self._pairing.calls.items()}
        return host(self._target.call_of(record), backward)

    def _describe(self, program: Program, value: Value) -> str:
        record = program.records[value[0]]
        if record.kind == "param":
            return f"{record.module}.{record.name}" if record.module else record.name
        slot = record.slots[value[1]].name
        if record.kind != "op":
            return f"{record.module or '(root)'} {slot}"
        return f"{record.module or '(root)'} {record.op}[{record.n}] {slot}"

    def _nonfinite_counts(self, program: Program, slots: Iterable[StoredSlot]) -> tuple[int, int]:
        nan = inf = 0
        for slot in slots:
            content = program.content(slot)
            if content is None and slot.role == "in":
                for seq, index in slot.producers[-1:]:
                    if seq in program.records:
                        content = program.content(program.records[seq].slots[index])
            if content is not None:
                nan += int(content.stats.get("nan") or 0)
                inf += int(content.stats.get("posinf") or 0) + int(content.stats.get("neginf") or 0)
        return nan, inf


def changed_arguments(ref: StoredRecord | None, target: StoredRecord) -> dict[str, list[Any]]:
    """{argument: [the reference's, the target's]} of arguments that are no tensors; a missing one is None."""
    if ref is None:
        return {}
    before, after = (_scalar_arguments(r) for r in (ref, target))
    return {
        name: [before.get(name), after.get(name)]
        for name in {**before, **after}
        if before.get(name) != after.get(name) and name not in METADATA_ARGUMENTS
    }


def _scalar_arguments(record: StoredRecord) -> dict[str, Any]:
    import json

    found: dict[str, Any] = json.loads(scalars(record))
    return found


def _walk(
    program: Program, record: StoredRecord, opaque: Any, slots: Iterable[StoredSlot] | None = None
) -> list[StoredRecord]:
    """Compute ops behind a record's inputs, through opaque values only; constants and allocations left out."""
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


def _other_scale(
    fused: StoredRecord, written_out: Iterable[StoredRecord]
) -> tuple[StoredRecord, float, float] | None:
    """The op that scales attention scores otherwise than the fused op: (op, the fused scale, its own)."""
    expected = dict(fused.args).get("scale")
    factors: list[tuple[StoredRecord, float]] = []
    for record in written_out:
        other = dict(record.args).get("other")
        if short(record.op) in ("mul", "div") and isinstance(other, (int, float)) and other:
            factors.append((record, float(other) if short(record.op) == "mul" else 1.0 / float(other)))
    if not isinstance(expected, (int, float)) or not factors:
        return None
    product = math.prod(factor for _, factor in factors)
    if math.isclose(product, expected, rel_tol=1e-3):
        return None
    return factors[0][0], float(expected), product


def _view_key(record: StoredRecord) -> tuple[str, str]:
    return short(record.op), scalars(record)


def _reads_unwritten(record: StoredRecord | None) -> bool:
    return record is not None and any(slot.uninitialised for slot in record.slots)


def _source(record: StoredRecord | None) -> str | None:
    return None if record is None or record.source is None else f"{record.source[0]}:{record.source[1]}"


def _plain(evidence: dict[str, Any]) -> dict[str, Any]:
    """Without what is unknown; infinite errors stay, JSON writers deal with them."""
    return {
        k: v for k, v in evidence.items() if v is not None and not (isinstance(v, float) and math.isnan(v))
    }
