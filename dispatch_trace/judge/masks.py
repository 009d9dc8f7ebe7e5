"""Where masks part: -inf in one run, a large number in the other, or another one.

Masks of any size count as alike until a row is masked throughout: then an op minds what they are, and is
not to blame for it.
"""

from __future__ import annotations

from dispatch_trace.align.graph import Program
from dispatch_trace.align.pairs import Pairing, paired_slots
from dispatch_trace.align.summaries import EXTREME
from dispatch_trace.per_step import whole
from dispatch_trace.schema import StoredRecord, StoredSlot

# Scores are added to masks, and are nothing beside them.
_SAME = 1e-3


def masked_otherwise(
    pairing: Pairing, ref: StoredRecord, target: StoredRecord
) -> tuple[StoredRecord, StoredRecord] | None:
    """The first pair of ops that masks by something else than the other run does.

    Args:
      ref, target: a pair of ops whose operands agree, up to masks.
    Returns: None where what they read is masked alike.
    """
    pairing = pairing.recorded or pairing  # float64 runs leave masks out of their figures
    found = None
    pair: tuple[StoredRecord, StoredRecord] | None = (ref, target)
    while pair is not None:
        pair = _fed_other_masks(pairing, *pair)
        found = pair or found
    return found


def _fed_other_masks(
    pairing: Pairing, ref: StoredRecord, target: StoredRecord
) -> tuple[StoredRecord, StoredRecord] | None:
    """The pair of ops that hands other masks to a pair of ops."""
    for a, b in paired_slots(ref, pairing.ref.inputs(ref), target, pairing.target.inputs(target)):
        theirs, ours = pairing.ref.origins(ref, a), pairing.target.origins(target, b)
        pair = pairing.ops.get(ours[0].value[0])
        if len(theirs) != 1 or len(ours) != 1 or pair is None or pair.ref != theirs[0].value[0]:
            continue
        masks = [
            _masks(program, program.slot(origin.value))
            for program, origin in ((pairing.ref, theirs[0]), (pairing.target, ours[0]))
        ]
        if masks[0] is None or masks[1] is None:
            continue
        if any(abs(x - y) > _SAME * abs(x) for x, y in zip(*masks, strict=True)):
            return pairing.ref.records[pair.ref], pairing.target.records[pair.target]
    return None


def _masks(program: Program, slot: StoredSlot) -> tuple[float, ...] | None:
    """How many elements are infinite, and the ends of the range where they are as large as masks."""
    if slot.content < 0:
        return None
    stats = program.stats(slot.content)
    ends = [0.0 if end is None else end for end in map(stats.get, ("min", "max"))]
    large = (end if abs(end) >= EXTREME else 0.0 for end in ends)
    return (whole(stats.get("posinf")), whole(stats.get("neginf")), *large)
