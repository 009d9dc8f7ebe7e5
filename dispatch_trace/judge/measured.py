"""What is said of values of which there are only statistics, or only arguments.

Some dumps hold figures of a tensor and nothing else. Two tensors of equal figures may be anything; two of
other figures are certainly apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from dispatch_trace.align.figures import apart_at_least
from dispatch_trace.align.pairs import Pairing, module_slots
from dispatch_trace.judge.operands import changed_arguments
from dispatch_trace.schema import NO_CALL, StoredRecord, StoredSlot

# Below this what is apart may be rounding: figures are taken in float32, values in bfloat16.
_APART = 0.02


def figures_notices(pairing: Pairing) -> list[str]:
    """What statistics and arguments say of values that one side does not hold."""
    return [*statistics_notices(pairing), *argument_notices(pairing)]


def statistics_notices(pairing: Pairing) -> list[str]:
    """Says of pairs without values which one is certainly apart first, in the order of the target."""
    counted: Counter[str] = Counter()
    for target, a, b in sorted(_outputs(pairing), key=lambda found: found[0].seq):
        if b.role == "in" or a.content < 0 or b.content < 0:
            continue
        if pairing.ref.reader.has_hash(a.content) and pairing.target.reader.has_hash(b.content):
            continue
        first, second = pairing.ref.content(a), pairing.target.content(b)
        if first is None or second is None:
            continue
        counted["op results" if target.kind == "op" else "module outputs"] += 1
        apart = apart_at_least(first, second)
        if apart > _APART:
            place = [
                f"step {target.step}",
                *([] if target.call == NO_CALL else [f"call {target.call}"]),
                b.name,
            ]
            where = f"{target.module or '(root)'} {target.op}".rstrip()
            return [
                f"judged by statistics, {where} ({', '.join(place)}) is the first that is certainly apart: "
                f"by at least {apart:.2g} of its size. What ran before it may be, too"
            ]
    if not counted:
        return []
    what = " and ".join(f"{number} {name}" for name, number in counted.items())
    return [f"statistics of {what} are alike, which proves nothing of their values"]


def _outputs(pairing: Pairing) -> Iterator[tuple[StoredRecord, StoredSlot, StoredSlot]]:
    """(record of the target, slot of the reference, slot of the target) of all paired results."""
    for ref, target in pairing.modules:
        for a, b in module_slots(ref, target, pairing):
            yield target, a, b
    for pair in pairing.ops.values():
        record, other = pairing.target.records[pair.target], pairing.ref.records[pair.ref]
        outputs = [[s for s in r.slots if s.role != "in" and s.is_tensor] for r in (other, record)]
        for a, b in zip(*outputs, strict=False):
            if a.name == b.name or len(outputs[0]) == len(outputs[1]) == 1:
                yield record, a, b


def argument_notices(pairing: Pairing) -> list[str]:
    """Says which paired ops without values got other arguments first: a log may hold nothing else."""
    for pair in sorted(pairing.ops.values(), key=lambda pair: pair.target):
        ref, target = pairing.ref.records[pair.ref], pairing.target.records[pair.target]
        contents = [s.content for s in target.slots if s.role != "in" and s.is_tensor]
        if any(number >= 0 and pairing.target.reader.has_hash(number) for number in contents):
            continue
        for name, value in changed_arguments(ref, target).items():
            return [
                f"without values: {target.op} in {target.module or '(root)'} (step {target.step}) is the "
                f"first op that got other arguments: {name} {value}"
            ]
    return []
