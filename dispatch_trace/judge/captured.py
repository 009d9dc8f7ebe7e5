"""Final outputs of a target of which only some modules were captured: where the reference's are in it.

The root's return may be missing, and yet the value be there, because a captured module made it. Where it is
not, the last values before it are judged instead; they can show a divergence, never a match.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from dispatch_trace.align.flow import has_inputs
from dispatch_trace.align.graph import Call
from dispatch_trace.judge.noise import NoisePass
from dispatch_trace.schema import StoredRecord, StoredSlot

_Pair: TypeAlias = tuple[StoredRecord, StoredSlot, StoredRecord, StoredSlot]


def captured_outputs(noise: NoisePass) -> tuple[list[_Pair], list[str]]:
    """(ref record, slot, target record, slot) to compare for roots that the target has not, and reasons."""
    pairing = noise.pairing
    found: dict[tuple[int, int, int, int], _Pair] = {}
    missing: dict[str, None] = {}
    for call in _roots_without_partner(noise):
        assert call.record is not None
        for slot in call.record.slots:
            if slot.role != "out" or not slot.is_tensor:
                continue
            links, is_whole = noise.flow.captured(call.record, slot)
            if not is_whole:
                missing[slot.name] = None
            for link in links:
                ref, a, target, b = link.slots
                ref_record, record = pairing.ref.records[ref], pairing.target.records[target]
                found.setdefault(link.slots, (ref_record, ref_record.slots[a], record, record.slots[b]))
    reasons = []
    if missing:
        reasons.append(f"final outputs that no captured module of the target returns: {', '.join(missing)}")
    return list(found.values()), reasons


def _roots_without_partner(noise: NoisePass) -> Iterator[Call]:
    pairing = noise.pairing
    paired = {key[:2] for key in pairing.calls}
    unfed = any(not has_inputs(target) for _, target in pairing.modules)
    for call in pairing.ref.roots:
        if unfed and call.record is not None and call.key not in pairing.calls and call.key[:2] in paired:
            yield call
