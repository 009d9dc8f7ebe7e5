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
from dispatch_trace.align.graph import Call, around_all, slot_numel
from dispatch_trace.align.named import keeps_last_call
from dispatch_trace.judge.estimates import ACCUMULATOR, UNKNOWN_GAIN, roundoff
from dispatch_trace.judge.findings import Finding
from dispatch_trace.judge.noise import NoisePass, within
from dispatch_trace.judge.sites import Sites
from dispatch_trace.schema import StoredRecord, StoredSlot

_MAX_NAMED = 5


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
        self._unordered = keeps_last_call(noise.pairing.target.reader)

    def find(self, call: Call) -> Finding | None:
        """The finding for a call that returns something wrong; None where nothing inside was recorded."""
        if not any(child.record is not None for child in call.children):
            return self._own(call) if call.parent is not None else None
        missing = self._missing_child(call)
        if missing is not None:
            return missing
        return self._inside(call) or self._own(call)

    def around(self, call: Call) -> Finding | None:
        """The finding for something wrong that a call was handed: what ran before it in the same step.

        Where the root's own call is in neither trace, the calls that it made stand side by side.
        """
        top = call.enclosing()[-1]
        handed = bool(top.path) and self._is_wrong(self._border(top, "in"), top, 0.0)
        if top is not call and top.record is not None and not handed:
            return self.find(top)
        roots = [root for root in self._pairing.target.roots if root.key[:2] == call.key[:2]]
        return self._inside(Call((*call.key[:2], "", 0), None, None, children=roots))

    def _inside(self, call: Call) -> Finding | None:
        """The finding for the first thing wrong within a call; None where all that was compared is right."""
        error = self._border(call, "in").error
        unknown: list[Call] = []
        for child in self._within(call):
            given, returned = self._border(child, "in"), self._border(child, "out")
            if self._is_wrong(given, child, error):
                return self._handed(call, child, given, error, unknown)
            if self._is_wrong(returned, child, given.error):
                if given.difference is None and (unknown or not self._was_handed_on(child)):
                    return self._either(child, returned, error, unknown)
                return self.find(child) or self._own(child)
            if returned.difference is None:
                inside = self._inside(child)
                if inside is not None:
                    return inside
                unknown.append(child)
            error = max(error, returned.error)
        return None

    def _within(self, call: Call) -> list[Call]:
        """The calls within a call that both traces have, none of them inside another one, in order."""
        found: list[Call] = []
        for child in sorted(call.children, key=self._place):
            both = child.record is not None and child.key in self._backward
            found += [child] if both else self._within(child)
        return found

    def _place(self, call: Call) -> int:
        """When a call returned; a dump without an order has that of the reference."""
        twin = (
            self._pairing.ref.calls.get(self._backward.get(call.key, call.key)) if self._unordered else None
        )
        return call.closed if twin is None else twin.closed

    def _handed(self, call: Call, child: Call, given: _Border, error: float, unknown: list[Call]) -> Finding:
        """For something wrong that a child was handed though all that was compared before it is right.

        Args:
          unknown: children before it of whose outputs one side has none.
        """
        assert child.record is not None and given.slot is not None
        evidence = self._evidence(given, child, error) | {"handed_to": child.path}
        if call.record is None and child is self._within(call)[0]:
            hint = "the runs got different inputs"
            return self._sites.finding(child.record, None, "argument", evidence, None, hint=hint)
        maker = self._maker(call, child, given.slot)
        if maker is not None:
            return self._sites.finding(maker, None, "introduced", evidence, None, where=maker.record)
        if unknown:
            evidence["candidates"] = [call.path, *(other.path for other in unknown)]
        return self._sites.finding(call, None, "wiring", evidence, None, where=child.record)

    def _maker(self, call: Call, child: Call, slot: StoredSlot) -> Call | None:
        """The call within `call` that returned just what a child was handed, and could not be compared."""
        for inner in sorted(call.children, key=lambda c: c.closed):
            found = self._maker(inner, child, slot)
            if found is not None:
                return found
            if inner.closed >= child.opened or slot.content not in _contents(inner, "out"):
                continue
            if self._border(inner, "out").difference is None:
                return inner
        return None

    def _either(self, child: Call, returned: _Border, error: float, unknown: list[Call]) -> Finding:
        """For a child of which nobody knows what it was given: it, or one before it that was not compared.

        The innermost call around all of them is certain.
        """
        seat = around_all([*unknown, child]) if unknown or child.parent is None else child.parent
        names = [*(other.path for other in unknown), child.path][-_MAX_NAMED:]
        evidence = self._evidence(returned, child, error) | {"candidates": names}
        hint = f"either its own code before {child.path}, or {', '.join(names)}"
        return self._sites.finding(seat, None, "introduced", evidence, None, where=child.record, hint=hint)

    def _was_handed_on(self, child: Call) -> bool:
        """Whether all that a child was given was returned by calls that were compared, or handed down to it.

        Then no code of its caller made it.
        """
        assert child.record is not None
        known: set[int] = set()
        for around in child.enclosing()[1:]:
            known |= _contents(around, "in")
        for other in self._pairing.target.calls.values():
            if other.closed < child.opened and self._border(other, "out").difference is not None:
                # What went into something right as well is no more in doubt.
                known |= _contents(other, "out") | _contents(other, "in")
        given = [s for s in child.record.slots if s.role == "in" and s.is_tensor]
        return all(s.content in known for s in given if dtype_class(s.dtype) in "fc")

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

    def knows_inputs(self, call: Call) -> bool:
        """Whether anything that a call was given could be compared."""
        return self._border(call, "in").difference is not None

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


def _contents(call: Call, role: str) -> set[int]:
    slots = () if call.record is None else call.record.slots
    return {slot.content for slot in slots if slot.role == role and slot.content >= 0}
