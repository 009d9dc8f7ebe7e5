"""What a partial recording was handed from outside is taken as given.

A recording of a few modules (`select`) does not hold what their inputs were made by. Who narrows a search
down to a module has judged its inputs before, in a recording of all modules: what differs there is noise on
its way through, and asking again would blame the border for it. Twins read the reference's values there
(`twin_leaves`), estimates reckon with the measured error.
"""

from __future__ import annotations

import math

from dispatch_trace.align.canon import dtype_class
from dispatch_trace.align.content import Difference
from dispatch_trace.align.graph import Call, Value
from dispatch_trace.align.pairs import Pairing, module_slots
from dispatch_trace.judge.estimates import C
from dispatch_trace.judge.noise import ROW_FACTOR
from dispatch_trace.schema import NO_CALL


def given_inputs(pairing: Pairing) -> dict[Value, float]:
    """By value of the reference: the relative error that is no concern of the recorded modules.

    Inputs of the outermost recorded calls, whatever they differ by; and other float tensors that come from
    outside (caches, tables that are no parameters), as long as they are no farther off than those inputs
    explain, so that a wrong constant stays a finding.
    """
    found: dict[Value, float] = {}
    carried: dict[Call, float] = {}
    for ref_key, target_key in pairing.calls.items():
        ref, target = pairing.ref.calls[ref_key], pairing.target.calls[target_key]
        if (
            target.parent is not None
            or target.number == NO_CALL
            or ref.record is None
            or target.record is None
        ):
            continue
        worst = 0.0
        for ref_slot, slot in module_slots(ref.record, target.record, pairing):
            if slot.role != "in" or dtype_class(slot.dtype) not in "fc":
                continue
            error = _floor(pairing.compare_slots(ref.record, ref_slot, target.record, slot))
            worst = max(worst, error)
            for origin in pairing.ref.origins(ref.record, ref_slot):
                if error and pairing.ref.is_leaf(origin.value):
                    found[origin.value] = max(error, found.get(origin.value, 0.0))
        carried[target] = worst
    for links in list(pairing.links.values()):
        for link in links:
            record = pairing.target.records[link.target[0]]
            if (
                link.ref in found
                or record.kind == "param"
                or pairing.ref.records[link.ref[0]].kind == "param"
            ):
                continue
            if not (pairing.target.is_leaf(link.target) and pairing.ref.is_leaf(link.ref)):
                continue
            if dtype_class(pairing.target.slot(link.target).dtype) not in "fc":
                continue
            error = _floor(pairing.compare(link))
            around = pairing.target.call_of(record).enclosing()[-1]
            if 0.0 < error <= C * carried.get(around, 0.0):
                found[link.ref] = error
    return found


def _floor(difference: Difference) -> float:
    """The limit within which a difference lies, its worst row included; 0 where nothing is to be granted."""
    if not difference.known or difference.equal or difference.nonfinite or not math.isfinite(difference.rho):
        return 0.0
    worst = 0.0 if difference.worst is None else difference.worst[1] / ROW_FACTOR
    return max(difference.rho, worst) * (1 + 1e-6)


__all__ = ["given_inputs"]
