"""Live comparison: each record of a running program is judged against a reference as it is made.

`dt.record(path, model, against="ref.trace", on_divergence=...)`. What must hold: rounding never stops the
program (bands as in `judge`, from the error that was measured at the inputs); a stop that comes late is
better than a false one. So a result is held against the program at once only where nothing is open: its op is
the reference's next in the same call, with all operands compared and right. Everything else (another weight,
another op, another input) may be a rewrite that heals: it is a suspicion until a module around it returns
something wrong, and then it is certain.

Leaves to `align` what takes both whole traces: pairing of rewritten bodies, twins, causes.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from dispatch_trace.align.canon import DISCRETE, dtype_class, edge_input, family, is_empty, short
from dispatch_trace.align.content import SKETCH_FLOOR, Difference
from dispatch_trace.capture.tracer import Tracer
from dispatch_trace.errors import DivergenceError
from dispatch_trace.judge.estimates import ACCUMULATOR, UNKNOWN_GAIN, C, gains_of, own_noise, roundoff
from dispatch_trace.judge.findings import Finding
from dispatch_trace.judge.magnitudes import magnitude_of
from dispatch_trace.judge.noise import within
from dispatch_trace.judge.operands import changed_arguments
from dispatch_trace.live_stop import Divergence, action_of, operands_here, stop_here
from dispatch_trace.live_values import LiveComparer, LiveContents, LiveProgram
from dispatch_trace.schema import NO_CALL, RawRecord, RawSlot, StoredRecord, StoredSlot
from dispatch_trace.store.reader import RankReader

_MAX_NOTED = 100

BodyKey = tuple[int, str, str, int]


@dataclass(frozen=True, slots=True)
class _State:
    """What is known of a value.

    Attributes:
      right: its error is noise; None where that is not known.
      error: measured, relative.
      number: of its content, -1 where there is none.
      clean: the error that it would have without any defect; what is wrong must not excuse what follows.
      outside: "parameter" or "argument" where no op made it.
    """

    right: bool | None
    error: float = 0.0
    number: int = -1
    clean: float = 0.0
    outside: str = ""


_UNKNOWN = _State(None)


@dataclass(slots=True)
class _Body:
    """The ops of one call of the reference, and how far the program has followed them."""

    records: list[StoredRecord] = field(default_factory=list)
    done: int = 0
    followed: bool = True


@dataclass(slots=True)
class _Step:
    """What was seen in one step.

    Attributes:
      suspicions: not certain yet.
      certain: paths of what was found, by then.
      largest: largest error of a right value so far.
      inside: by path of a module that is still running, the largest right error that a call within returned.
    """

    suspicions: list[Finding] = field(default_factory=list)
    certain: list[str] = field(default_factory=list)
    largest: float = 0.0
    inside: dict[str, float] = field(default_factory=lambda: defaultdict(float))


class LiveJudge:
    """Holds what a program computes against a reference.

    Args:
      ref: the reference, whole.
      on_divergence: "note", "raise", "break" or a callable, see `dt.record`.

    Attributes:
      divergences: found so far.
      counts: values by outcome: "equal", "within noise", "wrong", "not compared".
    """

    def __init__(self, ref: RankReader, on_divergence: Any) -> None:
        self._action = action_of(on_divergence)
        self._ref = ref
        self._contents = LiveContents()
        self._comparer = LiveComparer(ref, self._contents)
        self._program = LiveProgram().as_program()
        self._states: dict[tuple[int, int], _State] = {}
        self._steps: defaultdict[int, _Step] = defaultdict(_Step)
        self._bodies: defaultdict[BodyKey, _Body] = defaultdict(_Body)
        self._modules: dict[BodyKey, StoredRecord] = {}
        self._paths: set[str] = set()
        self._params: defaultdict[tuple[str, str], deque[StoredRecord]] = defaultdict(deque)
        self._params_seen: set[tuple[int, int]] = set()
        self._stopped = False
        self._worst = 0.0, 0.0
        self.divergences: list[Divergence] = []
        self.counts: Counter[str] = Counter()
        self._tracer: Tracer | None = None
        for record in ref.records():
            if record.kind == "param":
                self._params[record.module, record.name].append(record)
            elif record.kind == "module" and record.grad_phase == "fwd":
                self._modules[_body_of(record)] = record
                self._paths.add(record.module)
            elif record.kind == "op" and not is_empty(record) and edge_input(record) is None:
                self._bodies[_body_of(record)].records.append(record)

    # The writer's questions ------------------------------------------------------------------------

    def look(self, record: RawRecord) -> tuple[bool, Divergence | None]:
        """Judges a record that has just been made.

        Returns: whether it differs, so that its data is to be kept; and what is certain now, if anything.
        """
        with self._own_work():
            wrong, found = False, None
            if record.kind == "param":
                wrong = self._param(record)
            elif record.kind == "op":
                wrong, found = self._op(record)
            elif record.kind == "module" and record.grad_phase == "fwd" and not record.note:
                wrong, found = self._module(record)
            self._contents.forget_data()
            return wrong, None if found is None else self._divergence(found, record)

    def act(self, divergence: Divergence) -> None:
        """Does what was asked for at a divergence; only a callable hears of more than the first.

        Raises:
          DivergenceError: so it was asked. What a callable raises passes unchanged, and the debugger's end.
        """
        if len(self.divergences) < _MAX_NOTED:
            self.divergences.append(divergence)
        first, self._stopped = not self._stopped, True
        try:
            if callable(self._action):
                with self._unrecorded():
                    self._action(divergence)
            elif first and self._action == "break":
                with self._unrecorded():
                    stop_here(divergence)
            elif first and self._action == "raise":
                raise DivergenceError(str(divergence), divergence)
            elif first:
                sys.stderr.write(f"dispatch_trace: {divergence}\n")
        except Exception as error:
            if self._tracer is not None:
                self._tracer.let_through = error
            raise

    def attach(self, tracer: Tracer) -> None:
        """Tells whose records these are."""
        self._tracer = tracer

    def _own_work(self) -> AbstractContextManager[Any]:
        """Ops in here are the recorder's own."""
        tracer = self._tracer
        if tracer is None or tracer.state.busy:
            return contextlib.nullcontext()
        return tracer.own_ops(tracer.state)

    @contextlib.contextmanager
    def _unrecorded(self) -> Iterator[None]:
        """The user's own ops at a stop are no part of the program."""
        state = None if self._tracer is None else self._tracer.state
        before = state is not None and state.busy
        if state is not None:
            state.busy = True
        try:
            yield
        finally:
            if state is not None:
                state.busy = before

    def summary(self) -> dict[str, Any]:
        """For the header of the trace: plain values."""
        return {
            "reference": str(self._ref.path),
            "counts": dict(self.counts),
            "divergences": [str(each) for each in self.divergences],
        }

    # Parameters and ops ------------------------------------------------------------------------------

    def _param(self, record: RawRecord) -> bool:
        versions = self._params.get((record.module, record.name))
        state = _UNKNOWN
        if versions and record.slots:
            ref = versions.popleft() if len(versions) > 1 else versions[0]
            number = self._contents.number(record.slots[0])
            state = replace(self._leaf(ref.slots[0], record.slots[0], number), outside="parameter")
        self._states[record.seq, 0] = state
        self._params_seen.add((record.seq, 0))
        self._count(state)
        return state.right is False

    def _leaf(self, ref: StoredSlot, slot: RawSlot, number: int) -> _State:
        """A tensor that was not computed here: equal after rounding to the coarser dtype, or not."""
        found = self._comparer.compare(ref.content, number)
        if not found.known:
            return _State(None, number=number)
        units = roundoff(ref.dtype), roundoff(slot.dtype)
        floats = dtype_class(slot.dtype) in "fc8"
        limit = max(units) * (1.0 if units[0] != units[1] else C) if floats else 0.0
        limit = max(limit, C * SKETCH_FLOOR if found.method == "sketch" and floats else 0.0)
        right = within(found, limit)
        return _State(right, _error(found), number, _error(found) if right else 0.0, "argument")

    def _op(self, record: RawRecord) -> tuple[bool, Finding | None]:
        ref = self._next(record)
        inputs = self._inputs(record, ref)
        source = edge_input(record)  # type: ignore[arg-type]
        if source is not None or is_empty(record):  # type: ignore[arg-type]
            self._hand_on(record, source, inputs)
            return False, None
        outputs = [(i, s) for i, s in enumerate(record.slots) if s.role != "in" and s.is_tensor]
        numbers = {i: self._contents.number(s) for i, s in outputs}
        stored = self._stored(record, inputs, numbers)
        wrong, finding = False, None
        for i, slot in outputs:
            state = _State(None, number=numbers[i])
            twin = None if ref is None else _twin(ref, slot)
            if ref is not None and twin is not None:
                state, difference, band = self._output(ref, twin, stored, stored.slots[i], inputs)
                if state.right is False:
                    wrong = True
                    if finding is None:
                        finding = self._held(ref, stored, inputs, difference, band)
            self._states[record.seq, i] = state
            self._count(state)
        return wrong, finding

    def _next(self, record: RawRecord) -> StoredRecord | None:
        """The reference's op in this place; None from where its call runs otherwise than the reference's."""
        if edge_input(record) is not None or is_empty(record):  # type: ignore[arg-type]
            return None
        body = self._bodies.get(_body_of(record))
        if body is None or not body.followed:
            return None
        ref = body.records[body.done] if body.done < len(body.records) else None
        if ref is None or family(ref.op) != family(record.op) or _shapes(ref) != _shapes(record):
            body.followed = False
            return None
        body.done += 1
        return ref

    def _inputs(self, record: RawRecord, ref: StoredRecord | None) -> dict[int, _State]:
        """What is known of the tensors that an op reads, by index of the slot."""
        found = {}
        for i, slot in enumerate(record.slots):
            if slot.role != "in" or not slot.is_tensor:
                continue
            known = [self._states[p] for p in slot.producers if p in self._states]
            if known and not slot.leaf:
                found[i] = min(known, key=_badness)
                continue
            if known and self._is_param(slot):
                found[i] = known[0]
                continue
            twin = None if ref is None else next((s for s in ref.slots if s.name == slot.name), None)
            number = self._contents.number(slot)
            found[i] = _State(None, number=number)
            if twin is not None and twin.is_tensor and twin.content >= 0:
                found[i] = self._leaf(twin, slot, number)
            if slot.leaf:
                self._states[record.seq, i] = found[i]
        return found

    def _hand_on(self, record: RawRecord, source: Any, inputs: dict[int, _State]) -> None:
        """A view, a copy or a cast has the state of what it looks at, and rounds."""
        index = next((i for i, slot in enumerate(record.slots) if slot is source), -1)
        state = inputs.get(index, _State(True) if source is None else _UNKNOWN)
        for i, slot in enumerate(record.slots):
            if slot.role == "in" or not slot.is_tensor:
                continue
            number = self._contents.number(slot)
            cast = roundoff(slot.dtype) if source is not None else 0.0
            rounding = cast if source is not None and cast > roundoff(source.dtype) else 0.0
            self._states[record.seq, i] = replace(
                state,
                error=math.hypot(state.error, rounding),
                clean=math.hypot(state.clean, rounding),
                number=number if number >= 0 else state.number,
            )

    def _output(
        self,
        ref: StoredRecord,
        twin: StoredSlot,
        record: StoredRecord,
        slot: StoredSlot,
        inputs: dict[int, _State],
    ) -> tuple[_State, Difference, float]:
        """(state, difference, band) of a result, from the errors that were measured at the operands."""
        found = self._comparer.compare(twin.content, slot.content)
        if not found.known:
            return _State(None, number=slot.content), found, 0.0
        if found.equal:
            return _State(True, 0.0, slot.content), found, 0.0
        measure = self._contents.magnitude
        parts = [own_noise(self._program, record, slot, measure), roundoff(twin.dtype)]
        for operand, gain in gains_of(self._program, record, slot, measure):
            state = inputs.get(operand.index)
            parts.append(gain * state.clean if state is not None and state.clean else 0.0)
        parts.append(SKETCH_FLOOR if found.method == "sketch" else 0.0)
        ours, theirs = measure(record, slot).rms, self._ref_size(twin)
        band = C * math.hypot(*parts) * (max(1.0, ours / theirs) if ours and theirs else 1.0)
        right: bool | None = within(found, band)
        noisy = any(state.error or state.right is None for state in inputs.values())
        if not right and (record.random or (short(record.op) in DISCRETE and noisy)):
            right = None
        if not right and noisy and dtype_class(slot.dtype) in "ib":
            right = None
        clean = min(_error(found), band / C) if right is False else _error(found)
        return _State(right, _error(found), slot.content, clean), found, band

    def _ref_size(self, slot: StoredSlot) -> float | None:
        return magnitude_of(self._ref.content(slot.content)).rms if slot.content >= 0 else None

    def _held(
        self,
        ref: StoredRecord,
        record: StoredRecord,
        inputs: dict[int, _State],
        difference: Difference,
        band: float,
    ) -> Finding | None:
        """What a wrong result means: certain, a suspicion, or nothing new."""
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
            return _finding(record, label, evidence, ref_seq=ref.seq)
        origins = [inputs[slot.index].outside for slot in wrong]
        if all(origins) and all(s.right is not None for s in inputs.values()):
            label = "parameter" if "parameter" in origins else "argument"
            evidence["input"] = wrong[0].name
            self._suspect(_finding(record, label, evidence, ref_seq=ref.seq))
        return None

    def _is_param(self, slot: RawSlot | StoredSlot) -> bool:
        return any(producer in self._params_seen for producer in slot.producers)

    def _stored(self, record: RawRecord, inputs: dict[int, _State], numbers: dict[int, int]) -> StoredRecord:
        """The record as the judges know records, with our numbers of contents."""
        slots = tuple(
            _stored_slot(i, slot, numbers.get(i, inputs[i].number if i in inputs else -1))
            for i, slot in enumerate(record.slots)
        )
        names = "seq kind step model grad_phase module call op n overload name source light random producer"
        fields = {name: getattr(record, name) for name in f"{names} opened thread note".split()}
        return StoredRecord(rank=0, args=tuple(record.args), slots=slots, **fields)

    # Modules -----------------------------------------------------------------------------------------

    def _module(self, record: RawRecord) -> tuple[bool, Finding | None]:
        step = self._steps[record.step]
        ref = self._modules.get(_body_of(record))
        inside = step.inside.pop(record.module, 0.0)
        if ref is None:
            self.counts["not compared"] += 1
            return False, None
        given, before = self._border(record, ref, "in", step, 0.0)
        if given is False and not step.suspicions:
            evidence: dict[str, Any] = dict(zip(("error", "band"), self._worst, strict=True))
            evidence["handed_to"] = record.module
            caller = next((p for p in _around(record.module) if p in self._paths), "")
            finding = _finding(record, "wiring", evidence, ref_seq=ref.seq)
            self._suspect(replace(finding, module=caller, call=None))
        before = max(before, inside)
        returned, after = self._border(record, ref, "out", step, before)
        state = _State(returned, after)
        self._count(state)
        for i, slot in enumerate(record.slots):
            if slot.role != "in" and slot.is_tensor and not slot.producers:
                self._states[record.seq, i] = state
        if returned:
            step.largest = max(step.largest, after)
            for path in _around(record.module):
                step.inside[path] = max(step.inside[path], after)
            step.suspicions = [s for s in step.suspicions if not _is_within(_place(s), record.module)]
            return False, None
        if returned is None:
            return False, None
        return True, self._wrong_module(record, ref, step, given)

    def _wrong_module(
        self, record: RawRecord, ref: StoredRecord, step: _Step, given: bool | None
    ) -> Finding | None:
        known = [s for s in step.suspicions if _is_within(_place(s), record.module)]
        if known:
            step.suspicions = [s for s in step.suspicions if s not in known]
            first = min(known, key=lambda s: s.seq)
            step.certain.append(first.module)
            return replace(first, evidence={**first.evidence, "certain_since": record.module or "(root)"})
        if step.suspicions or step.certain or given is not True:
            return None  # it goes on what is known already, or was handed it
        evidence = dict(zip(("error", "band"), self._worst, strict=True))
        finding = _finding(record, "introduced", evidence, ref_seq=ref.seq)
        if not record.module:
            step.certain.append(record.module)
            return finding
        self._suspect(finding)
        return None

    def _border(
        self, record: RawRecord, ref: StoredRecord, role: str, step: _Step, before: float
    ) -> tuple[bool | None, float]:
        """(all right, largest error) of what goes in or comes out of a call; None where it is not known."""
        theirs = {slot.name: slot for slot in ref.slots if slot.role == role and slot.is_tensor}
        right: bool | None = True
        worst = 0.0
        compared = False
        for slot in record.slots:
            if slot.role != role or not slot.is_tensor:
                continue
            twin = theirs.get(slot.name)
            known = [self._states[p] for p in slot.producers if p in self._states]
            found = (
                Difference(known=False)
                if twin is None
                else self._comparer.compare(twin.content, self._contents.number(slot))
            )
            if not found.known or twin is None:
                right = False if right is False else None
                continue
            compared = True
            floats = dtype_class(slot.dtype) in "fc8"
            unit = max(roundoff(slot.dtype), roundoff(twin.dtype))
            length = max([*(s.shape[-1] for s in record.slots if s.is_tensor and s.shape), 1])
            own = unit + math.sqrt(max(length, 1)) * min(ACCUMULATOR, unit or ACCUMULATOR)
            handed = max(before, step.largest) if role == "in" else before
            band = C * math.hypot(own, UNKNOWN_GAIN * handed, SKETCH_FLOOR) if floats else 0.0
            seen = [state.right for state in known]
            if within(found, band) if not seen or role == "out" else all(seen):
                worst = max(worst, _error(found))
                continue
            if not floats and (handed or step.largest):
                right = False if right is False else None  # a decision on noisy numbers
                continue
            right = False
            self._worst = _error(found), band
        return (right if compared else (True if role == "in" else None)), worst

    # ----------------------------------------------------------------------------------------------

    def _suspect(self, finding: Finding) -> None:
        step = self._steps[finding.step]
        if not step.certain and not any(_place(s) == _place(finding) for s in step.suspicions):
            step.suspicions.append(finding)  # behind what is certain everything is suspect

    def _count(self, state: _State) -> None:
        outcome = {None: "not compared", False: "wrong", True: "within noise"}[state.right]
        self.counts["equal" if state.right and not state.error else outcome] += 1

    def _divergence(self, finding: Finding, record: RawRecord) -> Divergence:
        """What was found, with the values at hand."""
        late = finding.evidence.get("certain_since", "")
        if not late:
            self._steps[finding.step].certain.append(finding.module)
        ref = self._ref.record(finding.ref_seq) if not late else self._modules.get(_body_of(record))
        slot = next(
            (s for s in record.slots if s.role != "in" and s.is_tensor and s.content is not None), None
        )
        expected = None
        twin = None if ref is None or slot is None else _twin(ref, slot)
        if twin is not None and twin.content >= 0 and self._ref.content(twin.content).has_data:
            expected = self._ref.tensor(twin.content)
        output = None if slot is None or slot.content is None else slot.content.tensor
        return Divergence(finding, output, expected, operands_here(), late=late)


def _body_of(record: RawRecord | StoredRecord) -> BodyKey:
    # Models need not have one name in both programs; of several only the paths tell them apart.
    return (record.step, record.grad_phase, record.module, record.call)


def _twin(ref: StoredRecord, slot: RawSlot) -> StoredSlot | None:
    outputs = [s for s in ref.slots if s.role != "in" and s.is_tensor]
    return next((s for s in outputs if s.name == slot.name), outputs[0] if len(outputs) == 1 else None)


def _shapes(record: Any) -> list[tuple[int, ...]]:
    return [tuple(s.shape) for s in record.slots if s.role != "in" and s.is_tensor]


def _stored_slot(index: int, slot: RawSlot, content: int) -> StoredSlot:
    names = "name role is_tensor dtype shape strides device layout producers leaf uninitialised note"
    return StoredSlot(index=index, content=content, **{name: getattr(slot, name) for name in names.split()})


def _error(found: Difference) -> float:
    return found.rho if math.isfinite(found.rho) else 1.0


def _badness(state: _State) -> tuple[bool, bool, float]:
    """Orders states: wrong ones first, then unknown ones, then by error."""
    return (state.right is not False, state.right is not None, -state.error)


def _around(path: str) -> list[str]:
    """Paths of the modules around one, the root last."""
    found = []
    while path:
        path = path.rpartition(".")[0]
        found.append(path)
    return found


def _is_within(path: str, around: str) -> bool:
    """Whether a module lies strictly within another; everything lies within the root, itself included."""
    return not around or path.startswith(f"{around}.")


def _place(suspicion: Finding) -> str:
    """The module that something was seen at: it makes the one around it answer."""
    return str(suspicion.evidence.get("handed_to", suspicion.module))


def _finding(
    record: RawRecord | StoredRecord, label: str, evidence: dict[str, Any], *, ref_seq: int
) -> Finding:
    return Finding(
        module=record.module,
        call=None if record.call == NO_CALL else record.call,
        step=record.step,
        op=record.op or None,
        label=label,
        evidence={**evidence, "judge": "live"},
        source=None if record.source is None else f"{record.source[0]}:{record.source[1]}",
        judge="live",
        seq=record.seq,
        ref_seq=ref_seq,
    )


__all__ = ["LiveJudge"]
