"""What faults of single ops (`local`) make of a judgement: findings where their effect reaches an output."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dispatch_trace.align.graph import Program
from dispatch_trace.judge.findings import Finding, Judgement, demoted
from dispatch_trace.judge.noise import NoisePass
from dispatch_trace.judge.sites import Sites
from dispatch_trace.judge.verdict import Output, RoundJudge
from dispatch_trace.schema import StoredRecord

if TYPE_CHECKING:
    from dispatch_trace.judge.local import Fault

# Faults of a kernel that is wrong wherever it is used are listed up to here.
MAX_LISTED = 50
# Labels by which the estimates may have named what a faulty op does, at the op or behind it.
_OUTDONE = frozenset({"introduced", "structure", "wiring", "argument", "nonfinite"})


def with_faults(round_judge: RoundJudge, judgement: Judgement, faults: Iterable[Fault]) -> Judgement:
    """The judgement with a finding for each fault.

    A fault is fatal where its result leads to a final output that is not the reference's bit for bit, unless
    runs of the reference are as far from each other there. What the estimates hold against ops behind the
    first fatal one becomes a suspect.

    Args:
      round_judge: by estimates; it has judged.
      faults: of the target, in the order in which it ran.
    """
    noise = round_judge.noise
    target = noise.pairing.target
    known = [f for f in faults if f.record.seq in target.records][:MAX_LISTED]
    if not known:
        return judgement
    reaching = _leading_to(target, [o for o in round_judge.outputs if not o.difference.equal])
    sites, found = Sites(noise), []
    for fault in known:
        label = "nonfinite" if fault.how == "nonfinite" else "introduced"
        evidence = {"judge": "local replay", "slot": fault.slot.name, **fault.evidence}
        floor = _floor(noise, fault)
        if floor:
            evidence["floor"] = floor
        fatal = fault.record.seq in reaching and not evidence.get("local_error", math.inf) <= floor
        if not fatal:
            evidence["kind"], label = label, "suspect"
        finding = sites.finding(fault.record, fault.record.op, label, evidence, None, hint=_hint(fault))
        found.append(replace(finding, fatal=fatal, judge="local replay"))
    seqs = {f.seq for f in found}
    first = min((f.seq for f in found if f.fatal), default=None)
    views = _views_before(target, [f.record for f in known if f.record.seq == first])
    rest = [
        f if first is None else _outdone(f, first, views)
        for f in judgement.findings
        if f.seq not in seqs or f.label not in _OUTDONE | {"suspect"}
    ]
    findings = [*found, *rest]
    fatal_ones = sorted((f for f in findings if f.fatal), key=lambda f: (f.step, f.seq))
    return replace(judgement, findings=[*fatal_ones, *(f for f in findings if not f.fatal)])


def _floor(noise: NoisePass, fault: Fault) -> float:
    """How far runs of the reference are from each other at this value; 0 where nobody measured it."""
    links = noise.pairing.links.get((fault.record.seq, fault.slot.index), ())
    return max((noise.pairing.floors.get(link.ref, 0.0) for link in links), default=0.0)


def _leading_to(target: Program, outputs: Iterable[Output]) -> set[int]:
    """Records whose results go into these outputs."""
    todo = [(output.record.seq, output.slot.index) for output in outputs]
    seen, found = set(todo), set[int]()
    while todo:
        seq, index = todo.pop()
        record = target.records.get(seq)
        if record is None:
            continue
        own = record.slots[index] if index >= 0 else None
        if record.kind == "op" and (own is None or own.role != "in"):
            if seq in found:
                continue
            found.add(seq)
            needs = [s for s in record.slots if s.role == "in"]
        else:
            needs = [own] if own is not None else []
            if not (own is not None and own.producers) and record.producer >= 0:
                todo.append((record.producer, -1))
        for slot in needs:
            for value in slot.producers:
                if value not in seen:
                    seen.add(value)
                    todo.append(value)
    return found


def _views_before(target: Program, records: Iterable[StoredRecord]) -> set[int]:
    """Views and casts through which ops read: what is wrong with a result is no fault of theirs."""
    origins = (
        o for record in records for slot in target.inputs(record) for o in target.origins(record, slot)
    )
    return {seq for origin in origins for seq in origin.edges}


def _outdone(finding: Finding, first: int, views: set[int]) -> Finding:
    """A fatal finding of the estimates at or behind a faulty op, as a suspect."""
    behind = finding.seq >= first or finding.seq in views
    if finding.judge != "estimates" or finding.label not in _OUTDONE or not behind:
        return finding
    return demoted(finding, "a faulty op stands before it")


def _hint(fault: Fault) -> str | None:
    evidence: dict[str, Any] = fault.evidence
    error, native = evidence.get("local_error"), evidence.get("native_error")
    if fault.how == "scale":
        return f"on its own inputs the result is scaled by {evidence['scale']:.6g}"
    if fault.how == "nonfinite":
        return "not finite where the same op on the same inputs is finite here, or the other way round"
    if fault.how == "offset":
        return "on its own inputs the result is biased"
    if fault.how == "element":
        return "on its own inputs single elements of the result are wrong"
    if fault.how == "value":
        return "on its own inputs the op gives another result here"
    if fault.how == "bits":
        return "the other ops of its kind come back bit for bit from their own inputs, this one does not"
    if error is None or native is None or not math.isfinite(error):
        return None
    return f"on its own inputs the result is off by {error:.2g}; run again here it is off by {native:.2g}"


__all__ = ["with_faults"]
