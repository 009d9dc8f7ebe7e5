"""Final outputs of a target of which only some modules were captured: where the reference's are in it.

The root's return may be missing, and yet the value be there, because a captured module made it. Where it is
not, the last values before it are judged instead; they can show a divergence, never a match.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from dispatch_trace.align.flow import has_inputs
from dispatch_trace.align.graph import Call, Program
from dispatch_trace.align.pairs import module_slots
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
    returned, lost = _returned_unpaired(noise)
    for pair in returned:
        found.setdefault((pair[0].seq, pair[1].index, pair[2].seq, pair[3].index), pair)
    reasons = []
    if missing:
        reasons.append(f"final outputs that no captured module of the target returns: {', '.join(missing)}")
    if lost:
        reasons.append(f"final outputs of which the reference has no value: {', '.join(lost)}")
    return list(found.values()), reasons


def _roots_without_partner(noise: NoisePass) -> Iterator[Call]:
    pairing = noise.pairing
    paired = {key[:2] for key in pairing.calls}
    partly = _lacks_root(pairing.target) or any(not has_inputs(target) for _, target in pairing.modules)
    for call in pairing.ref.roots:
        partner = pairing.calls.get(call.key)
        if call.record is None or call.key[:2] not in paired:
            continue
        if partly if partner is None else lacks_return(pairing.target, pairing.target.calls[partner]):
            yield call


def _returned_unpaired(noise: NoisePass) -> tuple[list[_Pair], list[str]]:
    """What roots of the target return, where the reference's format keeps no root.

    A module that returned the same value stands for it. Returns: pairs to compare, and outputs that no such
    module returned; for these the last module's output, which may show a divergence, is among the pairs.
    """
    pairing = noise.pairing
    pairs: list[_Pair] = []
    lost: list[str] = []
    backward = {target: ref for ref, target in pairing.calls.items()}
    read = {s.content for r in pairing.target.records.values() for s in r.slots if s.role == "in"}
    made = [
        (ref, a, target, b)
        for ref, target in pairing.modules
        for a, b in module_slots(ref, target, pairing)
        if b.role == "out"
    ]
    returned = {pair[3].content: pair for pair in made if pair[3].content >= 0}
    for call in pairing.target.roots:
        partner = backward.get(call.key)
        if call.record is None:
            continue
        kept = (
            not _lacks_root(pairing.ref)
            if partner is None
            else not lacks_return(pairing.ref, pairing.ref.calls[partner])
        )
        if kept:
            continue
        for slot in call.record.slots:
            if slot.role != "out" or not slot.is_tensor:
                continue
            if slot.content in returned:
                pairs.append(returned[slot.content])
            else:
                lost.append(slot.name)
        if partner is not None and lacks_return(pairing.target, call):
            # Neither trace has what the root returned: what its modules returned and none read stands for it.
            inner = {child.record.seq for child in call.children if child.record is not None}
            pairs += [p for p in made if p[2].seq in inner and p[3].content not in read]
        inside = [pair for pair in made if call.opened <= pair[2].seq <= call.closed]
        if lost and inside:
            pairs.append(max(inside, key=lambda pair: pair[2].seq))
    return pairs, lost


def lacks_return(program: Program, call: Call) -> bool:
    """Whether a call of a root is in a foreign dump without anything that it returned."""
    record = call.record
    if record is None or "format" not in program.reader.header:
        return False
    return not any(slot.role == "out" and slot.is_tensor for slot in record.slots)


def _lacks_root(program: Program) -> bool:
    """Whether a trace is a dump of a format that never keeps the call of the root module."""
    return (program.reader.header.get("options") or {}).get("root") is False
