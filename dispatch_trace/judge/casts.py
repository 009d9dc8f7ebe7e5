"""Undeclared casts: whether a lower precision is how the target computes, or one op's fault.

Who runs all products in bfloat16 has chosen so, and whose modules hand on bfloat16 computes in it. A cast
before one of many products that are not cast, which takes the outputs farther from the program's own values
than rounding does, is a fault of that op.
"""

from __future__ import annotations

from collections import Counter

from dispatch_trace.align.canon import dtype_class, family
from dispatch_trace.align.pairs import Pairing
from dispatch_trace.judge.estimates import roundoff
from dispatch_trace.judge.noise import NoisePass

# From this share of all ops of a kind on, casting them is how the program computes.
_POLICY = 0.5


def own_precision(pairing: Pairing) -> float:
    """The coarsest roundoff of what modules of the target return, where those of the reference return finer
    numbers: nobody hides that it computes so. Else 0."""
    coarsest = [
        max(
            (
                roundoff(slot.dtype)
                for records in pairing.modules
                for slot in records[side].slots
                if slot.role == "out" and slot.is_tensor and dtype_class(slot.dtype) == "f"
            ),
            default=0.0,
        )
        for side in (0, 1)
    ]
    return coarsest[1] if coarsest[1] > coarsest[0] else 0.0


def lone_casts(noise: NoisePass) -> list[int]:
    """Casts (or ops that round more coarsely than all around) that are no policy: their records, in order.

    Args:
      noise: the estimates' states; their flags name the casts.
    """
    target = noise.pairing.target
    casts = {seq for state in noise.states.values() for kind, seq in state.flags if kind == "cast"}
    if not casts:
        return []
    coarsest = own_precision(noise.pairing)
    totals: Counter[str] = Counter()
    cast_ops: Counter[str] = Counter()
    kinds: dict[int, set[str]] = {seq: set() for seq in casts}
    for record in target.records.values():
        if record.kind != "op" or target.is_edge(record):
            continue
        if not any(dtype_class(slot.dtype) == "f" for slot in target.outputs(record)):
            continue
        passed = {
            seq
            for slot in target.inputs(record)
            for origin in target.origins(record, slot)
            for seq in origin.edges
        }
        mine = casts & {record.seq, *passed}
        totals[family(record.op)] += 1
        cast_ops[family(record.op)] += bool(mine)
        for seq in mine:
            kinds[seq].add(family(record.op))
    return sorted(
        seq
        for seq, names in kinds.items()
        if names
        and all(cast_ops[name] < _POLICY * totals[name] for name in names)
        and max(roundoff(slot.dtype) for slot in target.outputs(target.records[seq])) > coarsest
    )
