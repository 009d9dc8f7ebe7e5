"""Weights that go by several names in the target, and are several weights in the reference.

Such a weight is right where one of its names is read and wrong where another one is: what it holds equals the
reference's parameter of the one name, not that of the other. No value tells them apart, only the reader does.
"""

from __future__ import annotations

from dispatch_trace.align.graph import Value
from dispatch_trace.align.pairs import Pairing, paired_slots
from dispatch_trace.judge.noise import NoisePass, within
from dispatch_trace.schema import StoredRecord


def tied_operand(noise: NoisePass, ref: StoredRecord, record: StoredRecord) -> tuple[str, list[str]] | None:
    """(path of the parameter that a target's op ought to read, the names that it shares its memory with).

    None unless the op reads a weight that is right elsewhere and not the reference's of this place.
    """
    pairing = noise.pairing
    for a, b in paired_slots(ref, pairing.ref.inputs(ref), record, pairing.target.inputs(record)):
        theirs, ours = pairing.ref.origins(ref, a), pairing.target.origins(record, b)
        if len(theirs) != 1 or len(ours) != 1:
            continue
        owner, held = (
            pairing.ref.records[theirs[0].value[0]],
            pairing.target.records[ours[0].value[0]],
        )
        if owner.kind != "param" or held.kind != "param" or not noise.state(ours[0].value).explained:
            continue
        names = _names(pairing, held)
        expected = _path(owner, pairing.renames.nearest(owner.module))
        if expected in names and len(names) > 1 and _is_another(noise, theirs[0].value, ours[0].value):
            return expected, sorted(names - {expected})
    return None


def _is_another(noise: NoisePass, ref: Value, target: Value) -> bool:
    """Whether a target's value is known to be none that the reference has there."""
    limit = noise.state(target).limit
    links = [link for link in noise.pairing.links.get(target, ()) if link.ref == ref]
    found = [difference for difference in map(noise.pairing.compare, links) if difference.known]
    return bool(found) and not any(within(difference, limit) for difference in found)


def _names(pairing: Pairing, held: StoredRecord) -> set[str]:
    """All names of a parameter of the target: those whose records lie in the same place of one memory."""
    slot = held.slots[0]
    place = slot.storage, slot.offset, slot.shape, slot.strides
    found = set()
    for versions in pairing.target.params.values():
        for each in versions:
            other = each.slots[0]
            if (other.storage, other.offset, other.shape, other.strides) == place and slot.storage >= 0:
                found.add(_path(each, each.module))
    return found


def _path(record: StoredRecord, module: str) -> str:
    return f"{module}.{record.name}" if module else record.name
