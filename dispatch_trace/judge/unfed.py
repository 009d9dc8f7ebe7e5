"""Blame for a module that recorded no inputs, where all that it was computed from is right.

Between what was captured before and this module's output lie ops of the reference: those of its own body,
and code around it that was captured nowhere (`Flow.between`). Sums of the caller can be tried on the target's
own values; where they hold, or cannot be told wrong, the module is named. Where the code around does more, it
cannot be known which of both went wrong: the call around both is named, with the candidates.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dispatch_trace.align.canon import dtype_class, family
from dispatch_trace.align.graph import Call, Value
from dispatch_trace.judge.estimates import C, roundoff
from dispatch_trace.judge.findings import Finding
from dispatch_trace.judge.noise import NoisePass
from dispatch_trace.judge.sites import Sites
from dispatch_trace.schema import StoredRecord, StoredSlot

_MAX_NAMED = 5
_MAX_DEPTH = 32
# Elementwise code between modules: residual sums and gates, and what only moves values.
ELEMENTWISE = frozenset({"add", "sub", "mul", "div", "neg", "concat"})
# Roundings on the way through a sum that the target may have done and float64 does not.
_ROUNDINGS = 4.0


class UnfedBlame:
    """Names what is to blame for a wrong value of a module without inputs."""

    def __init__(self, noise: NoisePass, sites: Sites) -> None:
        self._noise = noise
        self._sites = sites
        self._pairing = noise.pairing
        self._ref = noise.pairing.ref
        self._target = noise.pairing.target

    def find(self, value: Value) -> Finding:
        """The finding for a wrong value that comes from right ones only."""
        state = self._noise.state(value)
        before = self._noise.flow.before(value)
        evidence: dict[str, Any] = self._sites.evidence(state) | {
            "input_error": max((self._noise.state(v).noise for v in before), default=0.0),
            "inputs": [self._sites.describe(self._target, v) for v in before[:_MAX_NAMED]],
        }
        record = self._target.records[value[0]]
        label, hint = "introduced", "what it read is known from the reference only: the target kept no inputs"
        if state.difference is not None and state.difference.nonfinite:
            label = "nonfinite"
        uncaptured = self._noise.flow.uncaptured(value)
        if uncaptured:
            evidence["not_captured"] = uncaptured[:_MAX_NAMED]
            hint = f"{hint}; it may be {', '.join(uncaptured[:_MAX_NAMED])}, which were not captured"
        if not self._noise.flow.order_is_known(value):
            return self._unordered(value, label, evidence)
        outside = self._noise.flow.between(value)
        heavy = [r for r in outside if family(r.op) not in ELEMENTWISE]
        owner = self._owner(value, heavy, outside)
        if owner is None:
            return self._sites.finding(record, None, label, evidence, state, hint=hint)
        evidence["candidates"] = [record.module, *dict.fromkeys(r.op for r in heavy or outside)][:_MAX_NAMED]
        hint = f"either its own code before {record.module or '(root)'}, or {record.module or '(root)'}"
        return self._sites.finding(owner, None, label, evidence, state, hint=hint, where=record)

    def _unordered(self, value: Value, label: str, evidence: dict[str, Any]) -> Finding:
        """Where no trace says in which order siblings ran: of several wrong ones any may be the first."""
        state = self._noise.state(value)
        record = self._target.records[value[0]]
        call = self._target.call_of(record)
        siblings = self._target.roots if call.parent is None else call.parent.children
        wrong = [
            sibling.path
            for sibling in siblings
            if sibling.key[:2] == call.key[:2]
            and sibling.record is not None
            and self._is_wrong(sibling.record)
        ]
        if len(wrong) < 2 or call.path.rpartition(".")[2].isdecimal():
            return self._sites.finding(record, None, label, evidence, state)
        evidence["candidates"] = wrong[:_MAX_NAMED]
        hint = f"no trace says which of these ran first: {', '.join(wrong[:_MAX_NAMED])}"
        if call.parent is None or call.parent.record is None:
            return self._sites.finding(record, None, "suspect", evidence, state, hint=hint)
        return self._sites.finding(call.parent, None, label, evidence, state, hint=hint, where=record)

    def _is_wrong(self, record: StoredRecord) -> bool:
        return any(
            self._noise.state((record.seq, slot.index)).wrong
            for slot in record.slots
            if slot.role == "out" and slot.is_tensor
        )

    def _owner(self, value: Value, heavy: list[StoredRecord], outside: list[StoredRecord]) -> Call | None:
        """The captured call around the module and the code before it that may be to blame instead."""
        if self._noise.flow.is_made_outside(value):
            return self._caller(value)
        owner = self._around(value, heavy or outside)
        if owner is None or heavy:
            return owner
        return owner if self._returns_its_sum(owner) is False else None

    def _caller(self, value: Value) -> Call | None:
        """The innermost captured call around the module of a value."""
        around = self._target.call_of(self._target.records[value[0]]).enclosing()[1:]
        return next((call for call in around if call.record is not None), None)

    def _around(self, value: Value, ops: list[StoredRecord]) -> Call | None:
        """The innermost captured call around the module of a value that one of some ops stands in."""
        backward = {target: ref for ref, target in self._pairing.calls.items()}
        mine = self._target.call_of(self._target.records[value[0]])
        places = {call.key for record in ops for call in self._ref.call_of(record).enclosing()}
        for call in self._ref.calls[backward[mine.key]].enclosing()[1:]:
            paired = self._pairing.calls.get(call.key)
            if call.key in places and paired is not None and self._target.calls[paired].record is not None:
                return self._target.calls[paired]
        return None

    # Sums, tried on the target's values ---------------------------------------------------------------

    def _returns_its_sum(self, call: Call) -> bool | None:
        """Whether a call returns what its own sums make of the target's values; None where more is done."""
        record = call.record
        slot = next((s for s in record.slots if s.role == "out" and s.is_tensor), None) if record else None
        if record is None or slot is None or slot.content < 0:
            return None
        links = [k for k in self._pairing.links.get((record.seq, slot.index), ()) if k.method == "module"]
        returned = self._noise.pairing.comparer.array(False, slot.content)
        if not links or returned is None:
            return None
        value = links[0].ref
        if self._ref.is_leaf(value) or self._ref.records[value[0]].kind != "op":
            return None
        made = self._made(self._ref.records[value[0]], _MAX_DEPTH)
        if made is None or made.size != returned.size or not np.isfinite(made).all():
            return None
        size = float(np.linalg.norm(made))
        error = float(np.linalg.norm(made.reshape(-1) - returned.reshape(-1).astype(np.float64)))
        return error <= C * _ROUNDINGS * roundoff(slot.dtype) * size

    def _made(self, record: StoredRecord, depth: int) -> npt.NDArray[np.float64] | None:
        """The result of a sum of the reference on the target's values."""
        args = dict(record.args)
        operands = [self._operand(record, slot, depth) for slot in self._ref.inputs(record)]
        if not operands or any(operand is None for operand in operands):
            return None
        first = operands[0]
        second: Any = operands[1] if len(operands) == 2 else args.get("other")
        if first is None or not isinstance(second, (np.ndarray, int, float)) or len(operands) > 2:
            return None
        match family(record.op), record.op:
            case "add", _:
                return np.asarray(first + args.get("alpha", 1) * second)
            case "sub", "aten.sub":
                return np.asarray(first - args.get("alpha", 1) * second)
            case "mul", _:
                return np.asarray(first * second)
        return None

    def _operand(self, record: StoredRecord, slot: StoredSlot, depth: int) -> npt.NDArray[np.float64] | None:
        origins = self._ref.origins(record, slot)
        if len(origins) != 1 or not (origins[0].whole and origins[0].same_order) or depth == 0:
            return None
        value = origins[0].value
        links = self._noise.flow.compared(value)
        array: npt.NDArray[Any] | None = None
        if links:
            array = self._pairing.comparer.array(False, links[-1].target_content)
        elif self._ref.is_leaf(value):
            content = self._ref.slot(value).content
            array = None if content < 0 else self._pairing.comparer.array(True, content)
        elif family(self._ref.records[value[0]].op) in ELEMENTWISE:
            array = self._made(self._ref.records[value[0]], depth - 1)
        if array is None or dtype_class(slot.dtype) != "f" or array.size != np.prod(slot.shape, dtype=int):
            return None
        return array.reshape(slot.shape).astype(np.float64)
