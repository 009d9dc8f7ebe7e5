"""Findings about records and calls: where they point, what evidence goes with them."""

from __future__ import annotations

import math
from typing import Any

from dispatch_trace.align.graph import Call, Program, Value
from dispatch_trace.judge.findings import Finding
from dispatch_trace.judge.hints import hint_of
from dispatch_trace.judge.noise import NoisePass, State
from dispatch_trace.per_step import greatest
from dispatch_trace.schema import NO_CALL, StoredRecord


class Sites:
    """Makes findings that point at records or calls of the target."""

    def __init__(self, noise: NoisePass) -> None:
        self._noise = noise
        self._pairing = noise.pairing
        self._target = noise.pairing.target

    def evidence(self, state: State | None) -> dict[str, Any]:
        """What was measured at a value: errors, band, worst row."""
        if state is None:
            return {}
        found: dict[str, Any] = {
            "error": state.rho,
            "band": self._noise.band(state.predicted, state.difference),
        }
        floor = 0.0 if state.link is None else self._pairing.floors.get(state.link.ref, 0.0)
        if floor:
            found["floor"] = floor
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
        return greatest(0.0, *(self._noise.slot_noise(record, s)[0] for s in self._target.inputs(record)))

    def finding(
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
        """A finding about the call of a record, or about a call (shown at the record `where`)."""
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
            source=source_of(record),
            hint=hint or self._hint(state),
            seq=record.seq if record is not None else -1,
            ref_seq=self._ref_seq(record, state),
        )

    def place(
        self,
        module: str,
        call: Call,
        op: str | None,
        label: str,
        evidence: dict[str, Any],
        state: State | None,
        *,
        at: StoredRecord,
        hint: str | None = None,
    ) -> Finding:
        """A finding about a module by its path (of the target), shown at the record `at`."""
        return Finding(
            module=module,
            call=None if call.number == NO_CALL else call.number,
            step=call.key[0],
            op=op,
            label=label,
            evidence=_plain(evidence),
            source=source_of(at),
            hint=hint or self._hint(state),
            seq=at.seq,
            ref_seq=self._ref_seq(at, state),
        )

    def _ref_seq(self, record: StoredRecord | None, state: State | None) -> int:
        if record is not None and record.seq in self._pairing.ops:
            return self._pairing.ops[record.seq].ref
        return state.link.ref[0] if state is not None and state.link is not None else -1

    def _hint(self, state: State | None) -> str | None:
        if state is None or state.link is None or state.difference is None:
            return None
        return hint_of(self._pairing, state.link, state.difference)

    def describe(self, program: Program, value: Value) -> str:
        """A value in words: a parameter's path, or the op that made it."""
        record = program.records[value[0]]
        if record.kind == "param":
            return f"{record.module}.{record.name}" if record.module else record.name
        slot = record.slots[value[1]].name
        if record.kind != "op":
            return f"{record.module or '(root)'} {slot}"
        return f"{record.module or '(root)'} {record.op}[{record.n}] {slot}"


def source_of(record: StoredRecord | None) -> str | None:
    return None if record is None or record.source is None else f"{record.source[0]}:{record.source[1]}"


def _plain(evidence: dict[str, Any]) -> dict[str, Any]:
    """Without what is unknown; infinite errors stay, JSON writers deal with them."""
    return {
        k: v for k, v in evidence.items() if v is not None and not (isinstance(v, float) and math.isnan(v))
    }
