"""Ops of a running program that took the place of others of the reference: a rewrite, or a mistake?

Most of what differs op by op heals: scales move past products, activations and norms are written out, fused
ops replace both. A value of the reference that such ops fail to give is a mistake for certain only where
nothing that follows could make it good without taking it back:

* the ops read what the reference's ops read, all of it right;
* both sides put a nonlinear op there, and not the same ones: nothing linear makes one of the other;
* the value is no multiple of the reference's, and off by several times its band;
* and it is complete: a module returns it, or both sides have one whole activation there (a sigmoid alone may
  be half of a SiLU) and an op reads it that reads the same values besides.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from dispatch_trace.align.canon import NONLINEAR, WHOLE_ACTIVATIONS, edge_input, family
from dispatch_trace.align.content import Difference
from dispatch_trace.judge.findings import Finding
from dispatch_trace.judge.hints import multiple_of
from dispatch_trace.live_state import Known, State, error_of, live_finding
from dispatch_trace.schema import StoredRecord, StoredSlot

# So many times its band a value is off where it is held against the program at once.
SURELY = 4.0
_MAX_OPS = 64


def replaced(
    known: Known, state: State, twin: StoredSlot, difference: Difference, band: float, *, whole: bool
) -> Finding | None:
    """What is certain of a wrong value that ops without counterpart computed; None where it may heal.

    Args:
      state: of the value, with those ops.
      twin: the reference's.
      whole: a module returned it.
    """
    theirs = region_of(known, twin)
    if not state.loose or not theirs or not (error_of(difference) > SURELY * band or difference.nonfinite):
        return None
    ours = state.loose
    mine, other = _nonlinear(ours), _nonlinear(theirs)
    if not mine or not other or mine == other:
        return None
    if not whole and not all(set(families) <= WHOLE_ACTIVATIONS for families in (mine, other)):
        return None
    if difference.nonfinite == 0 and is_multiple(known, state.number, twin.content, difference):
        return None
    return structure(ours, theirs, difference, band)


def structure(
    ours: tuple[StoredRecord, ...], theirs: list[StoredRecord], difference: Difference, band: float
) -> Finding:
    """The finding that names the first op whose like the reference lacks."""
    lacking = Counter(family(r.op) for r in theirs)
    first = next((r for r in ours if family(r.op) not in lacking), ours[0])
    evidence: dict[str, Any] = {
        "error": error_of(difference),
        "band": band,
        "measured_by": difference.method,
        "extra_op": first.op,
        "in_place_of": list(dict.fromkeys(r.op for r in theirs)),
    }
    if difference.nonfinite:
        evidence["nonfinite"] = difference.nonfinite
    return live_finding(first, "structure", evidence, ref_seq=theirs[0].seq if theirs else -1)


def is_multiple(known: Known, number: int, ref_content: int, difference: Difference) -> bool:
    """Whether a value is the reference's times a number, which a later op may undo."""
    if number < 0 or ref_content < 0:
        return False
    a, b = known.ref.sketch(ref_content), known.contents.sketch(number)
    if a is None or b is None:
        return True  # nothing tells
    ratio = multiple_of(a, b, min(1.0, error_of(difference)))
    return ratio is not None and math.isfinite(ratio)


def region_of(known: Known, twin: StoredSlot) -> list[StoredRecord]:
    """Ops of the reference without counterpart that led to a value, in order; [] where they do not end."""
    found: dict[int, StoredRecord] = {}
    todo = [seq for seq, _ in twin.producers]
    while todo:
        seq = todo.pop()
        if seq in known.matched or seq in found:
            continue
        record = known.ref.record(seq)
        if record.kind != "op":
            continue
        if len(found) >= _MAX_OPS:
            return []
        found[seq] = record
        todo += [p for slot in record.slots if slot.role == "in" for p, _ in slot.producers]
    return [record for _, record in sorted(found.items()) if edge_input(record) is None]


def _nonlinear(records: Any) -> Counter[str]:
    families = (family(record.op) for record in records)
    return Counter(name for name in families if name in NONLINEAR)


__all__ = ["SURELY", "is_multiple", "region_of", "replaced", "structure"]
