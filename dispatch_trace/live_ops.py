"""Live comparison of ops and parameters: each result against that of the reference's op in its place.

A result is held against the program at once only where its op is the reference's next in the same call and
reads the same values, all of them right. From where a call runs otherwise than the reference's, ops pair
again where they read the same values; what lies between is a region, compared where its results are read.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dispatch_trace.align.canon import DISCRETE, dtype_class, edge_input, family, is_empty, short
from dispatch_trace.align.content import Difference
from dispatch_trace.align.modules import Renames
from dispatch_trace.align.summaries import SKETCH_FLOOR
from dispatch_trace.judge.estimates import C, gains_of, own_noise, roundoff
from dispatch_trace.judge.findings import Finding
from dispatch_trace.judge.magnitudes import magnitude_of
from dispatch_trace.judge.noise import within
from dispatch_trace.judge.operands import changed_arguments
from dispatch_trace.judge.quantised import grid_between
from dispatch_trace.live_replaced import SURELY, replaced
from dispatch_trace.live_state import (
    UNKNOWN,
    Body,
    Known,
    State,
    body_of,
    error_of,
    live_finding,
    twin_of,
)
from dispatch_trace.live_values import LiveProgram
from dispatch_trace.schema import RawRecord, RawSlot, StoredRecord, StoredSlot

# So many of the reference's next ops are tried where one has no counterpart.
_AHEAD = 32
_MAX_LOOSE = 64
_MAX_VIEWS = 32


class LiveOps:
    """Judges ops and parameters of a running program."""

    def __init__(self, known: Known, params: Iterable[StoredRecord], renames: Renames) -> None:
        self._known = known
        self._ref = known.ref
        self._program = LiveProgram().as_program()
        self._params: defaultdict[tuple[str, str], deque[StoredRecord]] = defaultdict(deque)
        for record in params:
            self._params[renames.apply(record.module), record.name].append(record)

    def param(self, record: RawRecord) -> bool:
        """Whether a parameter is another one."""
        known = self._known
        versions = self._params.get((record.module, record.name))
        state = UNKNOWN
        if versions and record.slots:
            ref = versions.popleft() if len(versions) > 1 else versions[0]
            number = known.contents.number(record.slots[0])
            state = replace(self._leaf(ref.slots[0], record.slots[0], number), outside="parameter")
            if state.right is False and self._is_rounded(ref.slots[0].content, number):
                state = replace(state, right=True, clean=state.error)
            if state.right:
                known.rounded[record.module] = max(known.rounded[record.module], state.error)
            known.other_weights = known.other_weights or state.right is False
        known.states[record.seq, 0] = state
        known.params_seen.add((record.seq, 0))
        known.count(state)
        return state.right is False

    def op(self, record: RawRecord) -> tuple[bool, Finding | None, StoredRecord | None]:
        """(whether a result is wrong, what is certain now, the reference's op)."""
        known = self._known
        source = edge_input(record)  # type: ignore[arg-type]
        if source is not None or is_empty(record):  # type: ignore[arg-type]
            self._hand_on(record, source, self._inputs(record, None))
            return False, None, None
        ref = self._next(record)
        inputs = self._inputs(record, ref)
        outputs = [(i, s) for i, s in enumerate(record.slots) if s.role != "in" and s.is_tensor]
        numbers = {i: known.contents.number(s) for i, s in outputs}
        finding, wrong = None, False
        if ref is not None:
            finding = self._settle(record, ref, inputs)
            wrong = finding is not None
        stored = self._stored(record, inputs, numbers)
        found = {} if ref is None else self._results(ref, stored, outputs, inputs)
        if ref is not None and self._is_another(ref, stored, found, inputs):
            ref = None
        loose = _loose(inputs, stored)
        opened = ref is None or any(s.right is None and s.loose for s in inputs.values())
        for i, _ in outputs:
            state = State(None, number=numbers[i], loose=loose)
            if i in found:
                judged, difference, band = found[i]
                wrong = wrong or judged.right is False
                if not opened or judged.right:
                    state = judged
                if ref is not None and state.right is False and finding is None:
                    finding = self._held(ref, stored, inputs, difference, band)
            known.states[record.seq, i] = state
            known.count(state)
        return wrong, finding, ref

    def _results(
        self,
        ref: StoredRecord,
        record: StoredRecord,
        outputs: Sequence[tuple[int, RawSlot]],
        inputs: dict[int, State],
    ) -> dict[int, tuple[State, Difference, float]]:
        """By index of the slot (state, difference, band) of what an op returned or wrote."""
        self._known.matched.add(ref.seq)
        twins = {i: twin_of(ref, slot) for i, slot in outputs}
        return {
            i: self._output(ref, twin, record, record.slots[i], inputs)
            for i, twin in twins.items()
            if twin is not None
        }

    def _is_another(
        self,
        ref: StoredRecord,
        record: StoredRecord,
        found: Mapping[int, tuple[State, Difference, float]],
        inputs: dict[int, State],
    ) -> bool:
        """Whether an op with a wrong result turns out to read something else than its counterpart.

        Then it is none: the same numbers may be added in another order.
        """
        first = next((each for each in found.values() if each[0].right is False), None)
        if first is None or not all(state.right for state in inputs.values()):
            return False
        other = self._another(ref, record, inputs)
        if other is None:
            return False
        _, difference, band = first
        evidence = {"error": difference.rho, "band": band, "operand": other.removeprefix("in.")}
        self._known.suspect(live_finding(record, "wiring", evidence, ref_seq=ref.seq))
        self._known.matched.discard(ref.seq)
        body = self._known.bodies[body_of(record)]
        body.parted = True
        body.done = next(i for i, each in enumerate(body.records) if each is ref)
        return True

    def _is_rounded(self, ref_content: int, number: int) -> bool:
        """Whether a weight is the reference's, rounded to a grid: that is noise, to be reckoned with."""
        comparer = self._known.comparer
        difference = comparer.compare(ref_content, number)
        return grid_between(comparer, ref_content, number, difference) is not None

    # Counterparts ------------------------------------------------------------------------------------

    def _next(self, record: RawRecord) -> StoredRecord | None:
        """The reference's op in this place; None where it has none."""
        body = self._known.bodies.get(body_of(record))
        if body is None:
            return None
        ref = body.records[body.done] if body.done < len(body.records) else None
        if not body.parted and ref is not None and _alike(ref, record):
            body.done += 1
            return ref
        body.parted = True
        return self._ahead(body, record)

    def _ahead(self, body: Body, record: RawRecord) -> StoredRecord | None:
        """The next op of the reference that is this one and reads what this one does."""
        for place in range(body.done, min(body.done + _AHEAD, len(body.records))):
            ref = body.records[place]
            if _alike(ref, record) and not changed_arguments(ref, record) and self._reads_same(ref, record):  # type: ignore[arg-type]
                body.done = place + 1
                return ref
        return None

    def _reads_same(self, ref: StoredRecord, record: RawRecord) -> bool:
        """Whether all operands are the reference's, but for those that ops without counterpart made.

        One operand at least must be the reference's, a weight or a computed value.
        """
        sure = False
        for i, state in self._inputs(record, ref).items():
            twin = _operand(ref, record.slots[i])
            if twin is None:
                return False
            if self._is_same(twin, record.slots[i], state):
                sure = True
            elif not state.loose or state.right is not None:
                return False
        return sure

    def _is_same(self, twin: StoredSlot, slot: RawSlot | StoredSlot, state: State) -> bool:
        """Whether an operand is the reference's, up to noise, and looked at in the same way."""
        theirs = self._shown(twin)
        if theirs < 0 or state.number < 0 or state.right is False:
            return False
        if tuple(twin.shape) != tuple(slot.shape):
            return False
        is_view = slot.content is None or twin.content < 0
        if is_view and (twin.strides, twin.offset) != (slot.strides, slot.offset):
            return False
        if state.right and state.twin == theirs:
            return True
        found = self._known.comparer.compare(theirs, state.number)
        limit = max(4 * state.error, C * math.hypot(roundoff(twin.dtype), roundoff(slot.dtype), SKETCH_FLOOR))
        return found.known and within(found, limit if dtype_class(slot.dtype) in "fc8" else 0.0)

    def _shown(self, slot: StoredSlot) -> int:
        """The content that a slot of the reference shows, whole or in part."""
        for _ in range(_MAX_VIEWS):
            if slot.content >= 0 or not slot.producers:
                return slot.content
            seq, index = slot.producers[0]
            record = self._ref.record(seq)
            source = edge_input(record) if record.light else None
            slot = record.slots[index] if source is None else source
            if source is None and slot.content < 0:
                return -1
        return -1

    # Operands ----------------------------------------------------------------------------------------

    def _inputs(self, record: RawRecord, ref: StoredRecord | None) -> dict[int, State]:
        """What is known of the tensors that an op reads, by index of the slot."""
        known = self._known
        found = {}
        for i, slot in enumerate(record.slots):
            if slot.role != "in" or not slot.is_tensor:
                continue
            states = known.of(slot)
            if states and (not slot.leaf or any(p in known.params_seen for p in slot.producers)):
                found[i] = states[0] if slot.leaf else min(states, key=_badness)
                continue
            twin = None if ref is None else _operand(ref, slot)
            number = known.contents.number(slot)
            found[i] = State(None, number=number)
            if twin is not None and twin.is_tensor and twin.content >= 0:
                found[i] = self._leaf(twin, slot, number)
            if slot.leaf:
                known.states[record.seq, i] = found[i]
        return found

    def _leaf(self, ref: StoredSlot, slot: RawSlot, number: int) -> State:
        """A tensor that was not computed here: equal after rounding to the coarser dtype, or not."""
        found = self._known.comparer.compare(ref.content, number)
        if not found.known:
            return State(None, number=number)
        units = roundoff(ref.dtype), roundoff(slot.dtype)
        floats = dtype_class(slot.dtype) in "fc8"
        limit = max(units) * (1.0 if units[0] != units[1] else C) if floats else 0.0
        limit = max(limit, C * SKETCH_FLOOR if found.method == "sketch" and floats else 0.0)
        right = within(found, limit)
        error = error_of(found)
        return State(right, error, number, error if right else 0.0, "argument", ref.content)

    def _settle(self, record: RawRecord, ref: StoredRecord, inputs: dict[int, State]) -> Finding | None:
        """Compares operands that ops without counterpart made with what the reference read."""
        known = self._known
        largest = known.steps[record.step].largest
        finding = None
        for i, state in inputs.items():
            slot = record.slots[i]
            twin = _operand(ref, slot)
            if not state.loose or state.right is not None or twin is None or state.number < 0:
                continue
            theirs = self._shown(twin)
            if theirs < 0 or (twin.content < 0) != (slot.content is None):
                continue
            found = known.comparer.compare(theirs, state.number)
            if not found.known:
                continue
            length = max([*(s.shape[-1] for s in record.slots if s.is_tensor and s.shape), 1])
            band = known.border_band(slot, twin, length, largest)
            error = error_of(found)
            if within(found, band):
                settled = State(True, error, state.number, error, twin=theirs)
            else:
                shown = replace(twin, content=theirs)
                held = replaced(known, state, shown, found, band, whole=False)
                if held is None:
                    continue
                finding = finding or known.report(held, f"{record.module or '(root)'} {record.op}")
                settled = State(False, error, state.number, band / C)
            inputs[i] = settled
            for producer in slot.producers:
                if known.states.get(producer, UNKNOWN).loose:
                    known.states[producer] = settled
        return finding

    def _hand_on(self, record: RawRecord, source: Any, inputs: dict[int, State]) -> None:
        """A view, a copy or a cast has the state of what it looks at, and rounds."""
        known = self._known
        index = next((i for i, slot in enumerate(record.slots) if slot is source), -1)
        state = inputs.get(index, State(True) if source is None else UNKNOWN)
        for i, slot in enumerate(record.slots):
            if slot.role == "in" or not slot.is_tensor:
                continue
            number = known.contents.number(slot)
            cast = roundoff(slot.dtype) if source is not None else 0.0
            rounding = cast if source is not None and cast > roundoff(source.dtype) else 0.0
            known.states[record.seq, i] = replace(
                state,
                error=math.hypot(state.error, rounding),
                clean=math.hypot(state.clean, rounding),
                number=number if number >= 0 else state.number,
                twin=state.twin if number < 0 else -1,
            )

    # Results -----------------------------------------------------------------------------------------

    def _output(
        self,
        ref: StoredRecord,
        twin: StoredSlot,
        record: StoredRecord,
        slot: StoredSlot,
        inputs: dict[int, State],
    ) -> tuple[State, Difference, float]:
        """(state, difference, band) of a result, from the errors that were measured at the operands."""
        known = self._known
        found = known.comparer.compare(twin.content, slot.content)
        if not found.known:
            return State(None, number=slot.content), found, 0.0
        if found.equal:
            return State(True, 0.0, slot.content, twin=twin.content), found, 0.0
        measure = known.contents.magnitude
        parts = [own_noise(self._program, record, slot, measure), roundoff(twin.dtype)]
        # Predicted noise grows from op to op; behind a mistake it must not catch up with it.
        usual = max(known.steps[record.step].largest, roundoff(slot.dtype), roundoff(twin.dtype))
        for operand, gain in gains_of(self._program, record, slot, measure):
            state = inputs.get(operand.index, UNKNOWN)
            clean = min(state.clean, usual) if state.right is False else state.clean
            parts.append(gain * clean if clean else 0.0)
        parts.append(SKETCH_FLOOR if found.method == "sketch" else 0.0)
        ours, theirs = measure(record, slot).rms, self._ref_size(twin)
        band = C * math.hypot(*parts) * (max(1.0, ours / theirs) if ours and theirs else 1.0)
        right: bool | None = within(found, band)
        noisy = any(state.error or state.right is None for state in inputs.values())
        if not right and (record.random or (short(record.op) in DISCRETE and noisy)):
            right = None
        if not right and noisy and dtype_class(slot.dtype) in "ib":
            right = None
        clean = min(error_of(found), band / C) if right is False else error_of(found)
        return State(right, error_of(found), slot.content, clean, twin=twin.content), found, band

    def _ref_size(self, slot: StoredSlot) -> float | None:
        return magnitude_of(self._ref.content(slot.content)).rms if slot.content >= 0 else None

    def _held(
        self,
        ref: StoredRecord,
        record: StoredRecord,
        inputs: dict[int, State],
        difference: Difference,
        band: float,
    ) -> Finding | None:
        """What a wrong result means: certain, a suspicion, or nothing new."""
        known = self._known
        evidence: dict[str, Any] = {"error": difference.rho, "band": band, "measured_by": difference.method}
        evidence["input_error"] = max((s.error for s in inputs.values()), default=0.0)
        if difference.nonfinite:
            evidence["nonfinite"] = difference.nonfinite
        changed = changed_arguments(ref, record)
        label = "argument" if changed else "nonfinite" if difference.nonfinite else "introduced"
        if changed:
            evidence["arguments"] = changed
        wrong = [record.slots[i] for i, s in inputs.items() if s.right is False]
        if not wrong and all(state.right for state in inputs.values()):
            found = live_finding(record, label, evidence, ref_seq=ref.seq)
            noisy = evidence["input_error"] > 0.0 and label == "introduced"
            if not noisy or error_of(difference) > SURELY * band:
                return found
            known.suspect(found)  # how far noise grows is an estimate
            return None
        origins = [inputs[slot.index].outside for slot in wrong]
        if all(origins) and all(s.right is not None for s in inputs.values()):
            label = "parameter" if "parameter" in origins else "argument"
            evidence["input"] = wrong[0].name
            known.suspect(live_finding(record, label, evidence, ref_seq=ref.seq))
        return None

    def _another(self, ref: StoredRecord, record: StoredRecord, inputs: dict[int, State]) -> str | None:
        """The operand that is right by itself, and not what the reference read in its place."""
        for i, state in inputs.items():
            twin = _operand(ref, record.slots[i])
            if twin is None or not self._is_same(twin, record.slots[i], state):
                return record.slots[i].name
        return None

    def _stored(self, record: RawRecord, inputs: dict[int, State], numbers: dict[int, int]) -> StoredRecord:
        """The record as the judges know records, with our numbers of contents."""
        slots = tuple(
            _stored_slot(i, slot, numbers.get(i, inputs[i].number if i in inputs else -1))
            for i, slot in enumerate(record.slots)
        )
        names = "seq kind step model grad_phase module call op n overload name source light random producer"
        fields = {name: getattr(record, name) for name in f"{names} opened thread note".split()}
        return StoredRecord(rank=0, args=tuple(record.args), slots=slots, **fields)


def _loose(inputs: dict[int, State], record: StoredRecord) -> tuple[StoredRecord, ...]:
    """The ops without counterpart that lead to here, this one included; () where something else is open."""
    if record.random or not all(s.right or (s.right is None and s.loose) for s in inputs.values()):
        return ()
    before = {r.seq: r for s in inputs.values() if s.right is None for r in s.loose}
    found = (*(r for _, r in sorted(before.items())), record)
    return found if len(found) <= _MAX_LOOSE else ()


def _alike(ref: StoredRecord, record: RawRecord) -> bool:
    return family(ref.op) == family(record.op) and _shapes(ref) == _shapes(record)


def _operand(ref: StoredRecord, slot: RawSlot | StoredSlot) -> StoredSlot | None:
    return next((s for s in ref.slots if s.name == slot.name and s.is_tensor), None)


def _shapes(record: Any) -> list[tuple[int, ...]]:
    return [tuple(s.shape) for s in record.slots if s.role != "in" and s.is_tensor]


def _stored_slot(index: int, slot: RawSlot, content: int) -> StoredSlot:
    names = "name role is_tensor dtype shape strides offset device layout producers leaf uninitialised note"
    return StoredSlot(index=index, content=content, **{name: getattr(slot, name) for name in names.split()})


def _badness(state: State) -> tuple[bool, bool, float]:
    """Orders states: wrong ones first, then unknown ones, then by error."""
    return (state.right is not False, state.right is not None, -state.error)


__all__ = ["LiveOps"]
