"""Blame where only modules were recorded: the innermost call that returns something wrong from right inputs.

A call whose children are all right is to blame itself: its own glue code, or, where it has no children, its
forward. A child that is handed something wrong, though everything before it was right, blames its caller.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dispatch_trace.align.canon import dtype_class
from dispatch_trace.align.content import Difference
from dispatch_trace.align.graph import Call, slot_numel
from dispatch_trace.judge.estimates import ACCUMULATOR, UNKNOWN_GAIN, roundoff
from dispatch_trace.judge.findings import Finding
from dispatch_trace.judge.noise import NoisePass, within
from dispatch_trace.judge.sites import Sites
from dispatch_trace.schema import StoredRecord, StoredSlot


@dataclass(frozen=True, slots=True)
class _Border:
    """What goes in or comes out of a pair of calls, compared.

    Attributes:
      error: the largest; 0 where nothing could be compared.
      slot, difference: of the target, where it is.
    """

    error: float
    slot: StoredSlot | None
    difference: Difference | None


class ModuleBlame:
    """Descends through module calls of the target to the one to blame."""

    def __init__(self, noise: NoisePass, sites: Sites) -> None:
        self._noise = noise
        self._sites = sites
        self._pairing = noise.pairing
        self._backward = {target: ref for ref, target in noise.pairing.calls.items()}

    def find(self, call: Call) -> Finding | None:
        """The finding for a call that returns something wrong; None where nothing inside was recorded."""
        if not any(child.record is not None for child in call.children):
            return self._own(call) if call.parent is not None else None
        missing = self._missing_child(call)
        if missing is not None:
            return missing
        error = self._border(call, "in").error
        for child in sorted(call.children, key=lambda c: c.closed):
            if child.record is None or child.key not in self._backward:
                continue
            given, returned = self._border(child, "in"), self._border(child, "out")
            if self._is_wrong(given, child, error):
                evidence = self._evidence(given, child, error) | {"handed_to": child.path}
                return self._sites.finding(call, None, "wiring", evidence, None, where=child.record)
            if self._is_wrong(returned, child, given.error):
                return self.find(child) or self._own(child)
            error = max(error, returned.error)
        return self._own(call)

    def _own(self, call: Call) -> Finding:
        """The call itself: a parameter of its own that differs, else what it does."""
        record = call.record
        assert record is not None
        returned = self._border(call, "out")
        inside = [self._border(child, "out").error for child in call.children if child.key in self._backward]
        evidence = self._evidence(returned, call, max([self._border(call, "in").error, *inside]))
        for param in self._params(call):
            state = self._noise.state((param.seq, 0))
            if state.wrong:
                path = f"{param.module}.{param.name}" if param.module else param.name
                evidence |= {"parameter": param.name, "path": path, "parameter_error": state.rho}
                return self._sites.finding(call, None, "parameter", evidence, state, where=record)
        return self._sites.finding(call, None, "introduced", evidence, None, where=record)

    def _missing_child(self, call: Call) -> Finding | None:
        """A call that the reference makes and the target does not, where nothing before it is wrong."""
        twin = self._pairing.ref.calls.get(self._backward.get(call.key, call.key))
        if twin is None:
            return None
        for child in sorted(twin.children, key=lambda c: c.closed):
            partner = self._pairing.calls.get(child.key)
            if partner is None:
                path = self._pairing.renames.nearest(child.path)
                evidence = {"missing_module": child.path}
                assert call.record is not None
                return self._sites.place(
                    path,
                    child,
                    None,
                    "structure",
                    evidence,
                    None,
                    at=call.record,
                    hint="the target never calls it",
                )
            mine = self._pairing.target.calls[partner]
            if self._is_wrong(self._border(mine, "out"), mine, self._border(mine, "in").error):
                return None
        return None

    # ----------------------------------------------------------------------------------------------

    def _border(self, call: Call, role: str) -> _Border:
        ref_key = self._backward.get(call.key)
        ref = self._pairing.ref.calls[ref_key].record if ref_key is not None else None
        worst = _Border(0.0, None, None)
        if ref is None or call.record is None:
            return worst
        theirs = {slot.name: slot for slot in ref.slots if slot.role == role and slot.is_tensor}
        for slot in call.record.slots:
            twin = theirs.get(slot.name)
            if slot.role != role or not slot.is_tensor or twin is None:
                continue
            found = self._pairing.compare_slots(ref, twin, call.record, slot)
            error = 1.0 if found.nonfinite else found.rho
            if found.known and (worst.difference is None or error > worst.error):
                worst = _Border(error, slot, found)
        return worst

    def _is_wrong(self, border: _Border, call: Call, before: float) -> bool:
        if border.difference is None or border.slot is None:
            return False
        return not within(border.difference, self._band(border, call, before))

    def _band(self, border: _Border, call: Call, before: float) -> float:
        assert border.slot is not None
        slots = [s for s in call.record.slots if s.is_tensor] if call.record is not None else []
        unit = max((roundoff(s.dtype) for s in slots if dtype_class(s.dtype) == "f"), default=0.0)
        fan_in = max(
            (slot_numel(p.slots[0]) // max(p.slots[0].shape[0], 1) for p in self._weights(call)), default=1
        )
        own = unit + math.sqrt(fan_in) * min(ACCUMULATOR, unit or ACCUMULATOR)
        declared = self._noise.declared_within(call)
        return self._noise.band(math.hypot(own, declared, UNKNOWN_GAIN * before), border.difference)

    def _params(self, call: Call) -> list[StoredRecord]:
        return [
            versions[0]
            for (model, module, _), versions in self._pairing.target.params.items()
            if module == call.path and model == call.key[1]
        ]

    def _weights(self, call: Call) -> Iterable[StoredRecord]:
        return (p for p in self._params(call) if len(p.slots[0].shape) > 1)

    def _evidence(self, border: _Border, call: Call, before: float) -> dict[str, Any]:
        found: dict[str, Any] = {"error": border.error, "input_error": before}
        if border.slot is not None and border.difference is not None:
            found |= {
                "band": self._band(border, call, before),
                "slot": border.slot.name,
                "measured_by": border.difference.method,
            }
            if border.difference.worst is not None:
                found["worst_row"], found["worst_row_error"] = border.difference.worst
        return found
