"""From a value that is wrong to the op, argument, weight or module to blame for it.

A culprit is a wrong value all of whose inputs are right. Between it and the nearest compared values lie ops
without a partner, on either side: its *region*. What the region holds decides what is said (docs/blame.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from dispatch_trace.align.canon import family, is_factory, short
from dispatch_trace.align.content import Difference
from dispatch_trace.align.flow import has_inputs
from dispatch_trace.align.graph import Call, Program, Value, around_all
from dispatch_trace.align.modules import host
from dispatch_trace.align.pairs import Pairing
from dispatch_trace.judge.findings import Finding
from dispatch_trace.judge.masks import masked_otherwise
from dispatch_trace.judge.modules import ModuleBlame
from dispatch_trace.judge.noise import NoisePass, State
from dispatch_trace.judge.operands import Operands, changed_arguments
from dispatch_trace.judge.packed import PackedBlame
from dispatch_trace.judge.regions import Region, Regions
from dispatch_trace.judge.sites import Sites, source_of
from dispatch_trace.judge.tied import tied_operand
from dispatch_trace.judge.unfed import ELEMENTWISE, UnfedBlame
from dispatch_trace.per_step import whole
from dispatch_trace.schema import StoredRecord, StoredSlot

# Module calls that one op of the reference is spread over, from which on it stands for them all.
_MANY_CALLS = 3
_MAX_NAMED = 5
# Written out by hand these become so many ops that none of them answers for the whole.
_FUSED = frozenset({"attention", "layer_norm", "rms_norm", "group_norm", "batch_norm"})


class Blame:
    """Names what is to blame for wrong values."""

    def __init__(self, noise: NoisePass) -> None:
        self._noise = noise
        self._pairing: Pairing = noise.pairing
        self._ref: Program = noise.pairing.ref
        self._target: Program = noise.pairing.target
        self.sites = self._sites = Sites(noise)
        self._regions = Regions(noise)
        self._operands = Operands(noise, self._sites, self._regions)
        self._ref_has_ops = any(record.kind == "op" for record in self._ref.records.values())
        self._modules_only = ModuleBlame(noise, self._sites)
        self._unfed = UnfedBlame(noise, self._sites)
        self._packed = PackedBlame(noise, self._sites, self._regions)

    # Entry points -----------------------------------------------------------------------------------

    def value(self, value: Value) -> Finding:
        """For a wrong value that an op of the target made."""
        state = self._noise.state(value)
        region = self._regions.of(value, state)
        if not self._ref_has_ops:
            return self._without_ref_ops(region, state)
        if state.link is not None and self._ref.records[state.link.ref[0]].kind == "param":
            return self._made_parameter(region, state, self._ref.records[state.link.ref[0]])
        for rule in (
            self._uninitialised,
            self._random,
            self._nonfinite,
            self._quantised,
            self._overwritten,
            self._operands.crossed,
            self._modules,
            self._same_ops,
            self._missing_ops,
            self._extra_ops,
        ):
            found = rule(region, state)
            if found is not None:
                break
        else:
            found = self._replaced(region, state)
        return self._packed.instead(found, region, state)

    def leaf(self, value: Value, reader: StoredRecord) -> Finding:
        """For a wrong leaf: a parameter, an input of the program or a constant."""
        state = self._noise.state(value)
        record = self._target.records[value[0]]
        if record.kind == "param" or record.step != reader.step:
            self._target.reader.lose(reader)  # steps share it, and the first that reads it is named
        evidence = self._sites.evidence(state)
        if record.kind == "param":
            several = self._packed.one_of_several(value, reader, state)
            return several or self._parameter(record, reader, state, evidence)
        seat = self._program_input(value)
        if seat is not None:
            evidence["input"] = seat[1].name
            return self._sites.finding(
                seat[0], None, "argument", evidence, state, hint="the runs got different inputs"
            )
        if record.kind == "module":
            handed = self._modules_only.around(self._target.call_of(record))
            if handed is not None:
                return handed
        first = self._first_edge(value, reader)
        evidence["constant"] = True
        if state.link is not None and self._ref.records[state.link.ref[0]].kind == "param":
            evidence["parameter"] = self._ref.records[state.link.ref[0]].name
            return self._sites.finding(reader, reader.op, "parameter", evidence, state)
        return self._sites.finding(first, first.op, "argument", evidence, state)

    def opaque(self, value: Value) -> Finding:
        """For what a compiled region returned: only the producer of its output can be named."""
        state = self._noise.state(value)
        record = self._target.records[value[0]]
        if not has_inputs(record):
            return self._unfed.find(value)
        call = self._target.call_of(record)
        around = None if self._modules_only.knows_inputs(call) else self._modules_only.around(call)
        if around is not None:
            return self._tapped(around) or around
        inside = self._modules_only.find(call)
        if inside is not None and not (inside.label == "introduced" and inside.seq == record.seq):
            # Else all that was captured within is right, and lost on its way out.
            return self._tapped(inside) or inside
        evidence = self._sites.evidence(state) | {"region": record.note or "opaque"}
        hint = "inside a compiled region: the op that produced the reference's output is named"
        owner = None if state.link is None else self._ref.records[state.link.ref[0]]
        if owner is None or owner.kind != "op":
            return self._sites.finding(record, None, "introduced", evidence, state, hint=hint)
        call = self._ref.call_of(owner)
        path = self._pairing.renames.nearest(owner.module)
        found = self._sites.place(path, call, owner.op, "introduced", evidence, state, at=record, hint=hint)
        return replace(found, source=source_of(owner))

    def _tapped(self, inside: Finding) -> Finding | None:
        """The first op to blame in the body of a call that is, where ops of compiled code were recorded."""
        at = (inside.step, inside.module, inside.call)
        bodies = [c.ops["fwd"] for c in self._target.calls.values() if (c.key[0], c.path, c.number) == at]
        for record in (record for body in bodies for record in body):
            for out in self._target.outputs(record):
                state = self._noise.states.get((record.seq, out.index))
                if state is None or not state.wrong or state.tainted:
                    continue
                found = self.value((record.seq, out.index))
                if found.module == inside.module:
                    return found
        return None

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
        self._regions.fill(region, [b])
        region.only_ref = self._regions.unmeasured_before(ref, [a])
        overwritten = self._operands.overwritten(ref, [a], target, [b], state)
        if overwritten is not None:
            return replace(overwritten, evidence={**overwritten.evidence, "output": b.name})
        for rule in (self._modules, self._missing_ops, self._extra_ops):
            finding = rule(region, state)
            if finding is not None:
                return replace(finding, evidence={**finding.evidence, "output": b.name})
        evidence = self._sites.evidence(state) | {"output": b.name}
        theirs, ours = self._ref.origins(ref, a), self._target.origins(target, b)
        if len(theirs) == len(ours) == 1:
            call = self._operands.returned(theirs[0].value, ours[0].value, reader=target)
            if call is not None:
                return self._operands.short_return(call, theirs[0].value, target, evidence, state)
        view = self._operands.differing_view(theirs[0], ours[0]) if theirs and ours else None
        return self._sites.finding(
            view or target, view.op if view is not None else None, "wiring", evidence, state
        )

    def _without_ref_ops(self, region: Region, state: State) -> Finding:
        """The reference was recorded by modules only: the module is certain, the op if there is just one."""
        ops = region.only_target or [region.target]
        evidence = self._sites.evidence(state) | {"target_ops": [r.op for r in ops]}
        op = ops[0].op if len(ops) == 1 else None
        # Where the reference has no value between several modules, the call around them is what is certain.
        heavy = [
            record
            for record in region.only_target
            if family(record.op) not in ELEMENTWISE and not self._regions.leads_elsewhere(record)
        ]
        calls = [self._target.call_of(record) for record in heavy or [region.target]]
        seat = around_all(calls)
        if seat is self._target.call_of(region.target):
            return self._sites.finding(region.target, op, "introduced", evidence, state)
        chains = [call.enclosing() for call in calls]
        beneath = [chain[chain.index(seat) - 1] for chain in chains if seat in chain and chain[0] is not seat]
        evidence["candidates"] = list(dict.fromkeys(call.path for call in beneath))[:_MAX_NAMED]
        return self._sites.finding(seat, None, "introduced", evidence, state, where=region.target)

    # Rules, in order --------------------------------------------------------------------------------

    def _uninitialised(self, region: Region, state: State) -> Finding | None:
        for record in region.inside:
            for slot in self._target.inputs(record):
                if slot.uninitialised and not _reads_unwritten(self._regions.counterpart(record)):
                    evidence = self._sites.evidence(state) | {"argument": slot.name.removeprefix("in.")}
                    return self._sites.finding(
                        record,
                        record.op,
                        "uninitialised",
                        evidence,
                        state,
                        hint="reads memory that nothing wrote",
                    )
        return None

    def _random(self, region: Region, state: State) -> Finding | None:
        for record in region.inside:
            if not record.random:
                continue
            twin = self._regions.counterpart(record)
            if twin is not None and twin.random:
                if record is region.target and record.seq in self._pairing.redrawn:
                    hint = "draws other random numbers than the forward pass that it computes again"
                    evidence = self._sites.evidence(state)
                    return self._sites.finding(record, record.op, "introduced", evidence, state, hint=hint)
                if record is region.target:
                    return self._sites.finding(
                        record, record.op, "nondeterministic", self._sites.evidence(state), state
                    )
            elif not any(r.random for r in region.only_ref):
                evidence = self._sites.evidence(state) | {"extra_op": record.op}
                return self._sites.finding(
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
        for record in region.inside:
            made = self._nonfinite_counts(self._target, self._target.outputs(record))
            read = self._nonfinite_counts(self._target, self._target.inputs(record))
            new_nan = made[0] > 0 and read[0] == 0
            new_inf = record is region.target and made[1] > 0 and read[1] == 0
            if new_nan or new_inf:
                evidence = self._sites.evidence(state) | {"nan": made[0], "inf": made[1]}
                what = "NaN from inputs without NaN" if new_nan else "inf from finite inputs"
                return self._sites.finding(record, record.op, "nonfinite", evidence, state, hint=what)
        return None

    def _modules(self, region: Region, state: State) -> Finding | None:
        """A module that the target never calls, or calls besides."""
        missing = self._regions.unpaired_calls(self._ref, region.only_ref, self._pairing.calls)
        backward = {target: ref for ref, target in self._pairing.calls.items()}
        extra = self._regions.unpaired_calls(self._target, region.only_target, backward)
        if missing and not region.only_target and len(missing) == 1:
            call = missing[0]
            evidence = self._sites.evidence(state) | {"missing_module": call.path, "reader": region.target.op}
            path = self._pairing.renames.nearest(call.path)
            return self._sites.place(
                path,
                call,
                None,
                "structure",
                evidence,
                state,
                at=region.target,
                hint="the target never calls it",
            )
        if extra and not region.only_ref and len(extra) == 1:
            call = extra[0]
            evidence = self._sites.evidence(state) | {"extra_module": call.path}
            if call.parent is not None and any(key[2] == call.path for key in backward):
                # One more call of a module that both sides call: whoever makes it is to blame.
                return self._sites.finding(
                    call.parent, None, "structure", evidence, state, where=region.target
                )
            return self._sites.place(
                call.path,
                call,
                None,
                "structure",
                evidence,
                state,
                at=region.target,
                hint="the reference never calls it",
            )
        return None

    def _quantised(self, region: Region, state: State) -> Finding | None:
        """A result that is wrong beyond what its weight's codes and scales may cost."""
        for record in region.inside:
            for slot in self._target.inputs(record):
                for origin in self._target.origins(record, slot):
                    codes = self._noise.codes.get(origin.value)
                    if codes is not None:
                        return self._made_parameter(region, state, codes.weight)
        return None

    def _overwritten(self, region: Region, state: State) -> Finding | None:
        record, ref = region.target, self._regions.counterpart(region.target)
        if ref is None:
            return None
        return self._operands.overwritten(
            ref, self._ref.inputs(ref), record, self._target.inputs(record), state
        )

    def _same_ops(self, region: Region, state: State) -> Finding | None:
        """Nothing unpaired in between: an argument, an operand, or the op itself."""
        if region.only_target or region.only_ref or region.ref is None:
            return None
        record, ref = region.target, region.ref
        if is_factory(record) and not is_factory(ref):
            # A constant where the reference computes something; what its shape came from is no operand.
            evidence = self._sites.evidence(state) | {"extra_op": record.op, "ref_op": ref.op}
            return self._sites.finding(record, record.op, "structure", evidence, state)
        tied = tied_operand(self._noise, ref, record)
        if tied is not None:
            evidence = self._sites.evidence(state) | {"path": tied[0], "tied_to": tied[1]}
            hint = "one weight goes by several names, which are several in the reference"
            return self._sites.finding(record, record.op, "parameter", evidence, state, hint=hint)
        wiring = self._operands.wiring(record, ref, state)
        if wiring is not None:
            return wiring
        lost = self._operands.lost_operand(record, ref, state)
        if lost is not None:
            return lost
        evidence = self._sites.evidence(state)
        for each in (*region.unseen, record):
            twin = ref if each is record else self._regions.counterpart(each)
            changed = {} if twin is None else changed_arguments(twin, each)
            if changed:
                return self._sites.finding(
                    each, each.op, "argument", evidence | {"arguments": changed}, state
                )
        masked = masked_otherwise(self._pairing, ref, record)
        if masked is not None:
            changed = changed_arguments(*masked, masks=True)
            evidence |= {"reader": record.op} | ({"arguments": changed} if changed else {})
            label = "argument" if changed else "introduced"
            return self._sites.finding(masked[1], masked[1].op, label, evidence, state)
        elsewhere = self._operands.written_elsewhere(ref, record, state)
        if elsewhere is not None:
            return elsewhere
        if short(ref.op) != short(record.op):
            evidence["ref_op"] = ref.op
        return self._sites.finding(record, record.op, "introduced", evidence, state)

    def _missing_ops(self, region: Region, state: State) -> Finding | None:
        if region.only_target or not region.only_ref:
            return None
        last = region.only_ref[-1]
        evidence = self._sites.evidence(state) | {"missing_op": last.op, "reader": region.target.op}
        if len(region.only_ref) > 1:
            evidence["missing_ops"] = [r.op for r in region.only_ref]
        made = {(r.seq, slot.index) for r in region.only_ref for slot in self._ref.outputs(r)}
        seat = self._operands.not_passed(region.target, made)
        if isinstance(seat, Call):
            theirs = [
                r for r in region.only_ref if self._pairing.calls.get(self._ref.call_of(r).key) == seat.key
            ]
            op = theirs[-1].op if theirs else None
            return self._sites.finding(seat, op, "structure", evidence, state, where=region.target)
        body = host(self._ref.call_of(last), self._pairing.calls)
        mine = self._regions.hosted(region.target)
        if self._pairing.calls.get(body.key) == mine.key or self._regions.fed_by_constant(region):
            op = region.target.op if region.target.kind == "op" else last.op
            return self._sites.finding(region.target, op, "structure", evidence, state)
        path = self._pairing.renames.nearest(last.module)
        call = self._target.calls.get(self._pairing.calls.get(body.key, body.key))
        return self._sites.place(path, call or body, last.op, "structure", evidence, state, at=region.target)

    def _extra_ops(self, region: Region, state: State) -> Finding | None:
        if region.only_ref or not region.only_target:
            return None
        # What is computed beside, as a factor is, may be right; what reads the reference's operand is not.
        expected = self._regions.expected_by(region)
        reading = [r for r in region.only_target if expected.intersection(self._regions.read_by(r))]
        first = next(iter(reading or region.only_target))
        evidence = self._sites.evidence(state) | {"extra_op": first.op}
        if len(region.only_target) > 1:
            evidence["extra_ops"] = [r.op for r in region.only_target]
        return self._sites.finding(first, first.op, "structure", evidence, state)

    def _replaced(self, region: Region, state: State) -> Finding:
        """Both sides do something of their own: the first op whose result the reference does not have."""
        evidence = self._sites.evidence(state) | {
            "ref_ops": [r.op for r in region.only_ref],
            "target_ops": [r.op for r in region.only_target],
        }
        made = {(r.seq, slot.index) for r in region.only_ref for slot in self._ref.outputs(r)}
        seat = self._operands.not_passed(region.target, made) if region.ref is not None else region.target
        if isinstance(seat, Call):
            return self._sites.finding(seat, None, "structure", evidence, state, where=region.target)
        changed = self._changed_alongside(region, evidence, state)
        if changed is not None:
            return changed
        kept = {family(r.op) for r in region.only_target}  # then it is not the one that is written out
        fused = next((r for r in region.only_ref if family(r.op) in _FUSED - kept), None)
        inside = [r for r in region.only_target if fused is None or self._regions.same_body(fused, r)]
        candidates = [*(inside or region.only_target), region.target]
        if fused is not None and len(inside) > 2:
            scaled = _other_scale(fused, inside)
            if scaled is not None:
                record, ref_scale, scale = scaled
                evidence["arguments"] = {"scale": [ref_scale, scale]}
                return self._sites.finding(record, record.op, "argument", evidence, state)
            return self._sites.finding(candidates[0], None, "structure", evidence, state)
        calls = list(dict.fromkeys(self._target.call_of(r) for r in [*region.only_target, region.target]))
        theirs = {self._ref.call_of(r) for r in region.only_ref}
        if len(calls) >= _MANY_CALLS and (len(region.only_ref) == 1 or len(calls) > 2 * len(theirs)):
            # One op, or one body, stands for modules of the target: which of them is wrong is not known.
            evidence["candidates"] = [call.path for call in calls][:_MAX_NAMED]
            return self._sites.finding(
                around_all(calls), None, "structure", evidence, state, where=region.target
            )
        lacking = [r for r in candidates if not self._regions.has_twin(r, region)]
        # What right values are made of as well, as one table of angles is in every layer, is right itself.
        chosen = next((r for r in lacking if not self._regions.leads_elsewhere(r)), region.target)
        if len(calls) >= _MANY_CALLS and self._target.call_of(chosen) is around_all(calls):
            evidence["candidates"] = [call.path for call in calls][:_MAX_NAMED]
            return self._sites.finding(chosen, None, "structure", evidence, state)
        return self._sites.finding(chosen, chosen.op, "structure", evidence, state)

    def _changed_alongside(self, region: Region, evidence: dict[str, Any], state: State) -> Finding | None:
        """The first argument that differs, where both sides do the same ops but results of other sizes."""
        for ref, target in zip(region.only_ref, region.only_target, strict=False):
            if ref.op != target.op or not self._regions.same_body(ref, target):
                break
            changed = changed_arguments(ref, target)
            if changed:
                evidence = evidence | {"arguments": changed}
                return self._sites.finding(target, target.op, "argument", evidence, state)
        return None

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
        return self._sites.place(
            record.module, call, reader.op, "parameter", evidence, state, at=reader, hint=hint
        )

    def _made_parameter(self, region: Region, state: State, param: StoredRecord) -> Finding:
        """A value that the target computes where the reference has a weight (codes and scales, say)."""
        evidence = self._sites.evidence(state) | {
            "parameter": param.name,
            "path": f"{param.module}.{param.name}" if param.module else param.name,
            "target_ops": [r.op for r in region.only_target],
        }
        return self._sites.finding(region.target, region.target.op, "parameter", evidence, state)

    def _program_input(self, value: Value) -> tuple[StoredRecord, StoredSlot] | None:
        """The root call that was given this leaf, if one was."""
        leaf = self._target.slot(value)
        for call in self._target.roots:
            if call.record is None or self._may_be_made(call):
                continue
            for slot in call.record.slots:
                if slot.role == "in" and slot.is_tensor and slot.leaf and slot.storage == leaf.storage >= 0:
                    return call.record, slot
        return None

    def _may_be_made(self, call: Call) -> bool:
        """Whether code between calls, which a recording of modules does not see, may have made its inputs."""
        if not call.path or (self._target.reader.header.get("options") or {}).get("level") != "module":
            return False
        return any(root.key[:2] == call.key[:2] and root.closed < call.opened for root in self._target.roots)

    def _first_edge(self, value: Value, reader: StoredRecord) -> StoredRecord:
        """The op that first took a constant: usually `lift_fresh`."""
        record = self._target.records[value[0]]
        return record if record.kind == "op" else reader

    # Findings ---------------------------------------------------------------------------------------

    def _nonfinite_counts(self, program: Program, slots: Iterable[StoredSlot]) -> tuple[int, int]:
        nan = inf = 0
        for slot in slots:
            content = slot.content
            if content < 0 and slot.role == "in":
                for seq, index in slot.producers[-1:]:
                    if seq in program.records:
                        content = program.records[seq].slots[index].content
            if content >= 0:
                stats = program.stats(content)
                nan += whole(stats.get("nan"))
                inf += whole(stats.get("posinf")) + whole(stats.get("neginf"))
        return nan, inf


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


def _reads_unwritten(record: StoredRecord | None) -> bool:
    return record is not None and any(slot.uninitialised for slot in record.slots)
