"""What statistics alone tell of two values: how far they are apart at least.

Some dumps hold figures of a tensor and nothing else. Two tensors of equal figures may be anything; two of
other figures are certainly apart, by what the triangle inequality leaves: the norm of a difference is at
least the difference of norms, at least sqrt(n) times that of means, and no element moves the maximum by
more than itself.
"""

from __future__ import annotations

import math

from dispatch_trace.align.pairs import Pairing, module_slots
from dispatch_trace.judge.operands import changed_arguments
from dispatch_trace.schema import StoredContent

# Below this what is apart may be rounding: figures are taken in float32, values in bfloat16.
_APART = 0.02


def apart_at_least(ref: StoredContent, target: StoredContent) -> float:
    """A lower bound of ||target - ref|| / ||ref||, from statistics; 0 where they tell nothing.

    Args:
      ref, target: of one shape.
    """
    a, b = ref.stats, target.stats
    n = math.prod(ref.shape)
    if not a or not b or ref.shape != target.shape or n <= 0 or any(size < 0 for size in ref.shape):
        return 0.0
    bounds = [0.0]
    norms = _root(a.get("sq_sum")), _root(b.get("sq_sum"))
    if norms[0] is not None and norms[1] is not None:
        bounds.append(abs(norms[1] - norms[0]))
    for name, share in (("sum", math.sqrt(n)), ("abs_sum", math.sqrt(n)), ("min", 1.0), ("max", 1.0)):
        first, second = a.get(name), b.get(name)
        if first is not None and second is not None:
            bounds.append(abs(float(second) - float(first)) / share)
    size = norms[0]
    if size is None:  # an upper bound of it keeps the quotient a lower one
        extremes = [abs(float(v)) for v in (a.get("min"), a.get("max")) if v is not None]
        if len(extremes) < 2:
            return 0.0
        size = max(extremes) * math.sqrt(n)
    return max(bounds) / size if size else 0.0


def figures_notices(pairing: Pairing) -> list[str]:
    """What statistics and arguments say of values that one side does not hold."""
    return [*statistics_notices(pairing), *argument_notices(pairing)]


def statistics_notices(pairing: Pairing) -> list[str]:
    """Says of pairs without values which one is certainly apart first, in the order of the target."""
    counted = 0
    for ref, target in sorted(pairing.modules, key=lambda pair: pair[1].seq):
        for a, b in module_slots(ref, target, pairing):
            if b.role != "out" or a.content < 0 or b.content < 0:
                continue
            first, second = pairing.ref.content(a), pairing.target.content(b)
            if first is None or second is None or (first.hash and second.hash):
                continue
            counted += 1
            apart = apart_at_least(first, second)
            if apart > _APART:
                where = f"{target.module or '(root)'} (step {target.step}, call {target.call}, {b.name})"
                return [
                    f"judged by statistics, {where} is the first that is certainly apart: by at least "
                    f"{apart:.2g} of its size. What ran before it may be, too"
                ]
    if counted:
        return [f"statistics of {counted} module outputs are alike, which proves nothing of their values"]
    return []


def argument_notices(pairing: Pairing) -> list[str]:
    """Says which paired ops without values got other arguments first: a log may hold nothing else."""
    for pair in sorted(pairing.ops.values(), key=lambda pair: pair.target):
        ref, target = pairing.ref.records[pair.ref], pairing.target.records[pair.target]
        contents = [s.content for s in target.slots if s.role != "in" and s.is_tensor]
        if any(number >= 0 and pairing.target.reader.content(number).hash for number in contents):
            continue
        for name, value in changed_arguments(ref, target).items():
            return [
                f"without values: {target.op} in {target.module or '(root)'} (step {target.step}) is the "
                f"first op that got other arguments: {name} {value}"
            ]
    return []


def _root(value: float | int | None) -> float | None:
    return None if value is None else math.sqrt(max(float(value), 0.0))
