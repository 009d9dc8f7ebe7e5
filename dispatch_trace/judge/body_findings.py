"""What bodies of module calls (`bodies`) make of a judgement: what stands, and what came in with inputs."""

from __future__ import annotations

from dataclasses import replace

from dispatch_trace.align.graph import CallKey
from dispatch_trace.judge.bodies import Bodies
from dispatch_trace.judge.findings import Finding, Judgement
from dispatch_trace.judge.noise import NoisePass
from dispatch_trace.judge.sites import Sites
from dispatch_trace.judge.verdict import RoundJudge
from dispatch_trace.schema import StoredRecord

_JUDGED = frozenset({"introduced", "nonfinite"})


def with_bodies(round_judge: RoundJudge, judgement: Judgement) -> Judgement:
    """The judgement, with what the reference's bodies say of calls whose own ops the target did not record.

    What the estimates blame such a call for stands where its body is off as well, and is `inherited` where
    the call returns what the reference's body makes of its inputs. Where an output is wrong and nothing else
    is to blame, the first call whose body is off is.

    Args:
      round_judge: by estimates; it has judged.
    """
    noise = round_judge.noise
    calls = _without_ops(noise)
    if not calls or all(o.difference.equal for o in round_judge.outputs):
        return judgement
    bodies, findings, refuted = Bodies(noise), list[Finding](), list[str]()
    for finding in judgement.findings:
        record = _call_of(noise, finding, calls) if finding.fatal and finding.label in _JUDGED else None
        if record is None or finding.judge != "estimates":
            findings.append(finding)
            continue
        body = bodies.judge(record)
        evidence = {**finding.evidence, "body": body.evidence}
        # A root inherits nothing, and a band as wide as what was found refutes nothing.
        root = noise.pairing.target.call_of(record).parent is None
        if body.ok is None or (body.ok and (root or body.band >= finding.evidence.get("error", 0.0))):
            findings.append(replace(finding, evidence=evidence))
            continue
        evidence["judge"] = "body"
        if body.ok:
            refuted.append(record.module or "the root")
            evidence |= {"kind": finding.label}
            finding = replace(
                finding,
                label="inherited",
                fatal=False,
                hint="it returns what the reference makes of its inputs",
            )
        findings.append(replace(finding, judge="body", evidence=evidence))
    reasons = list(judgement.reasons)
    if not any(f.fatal for f in findings) and any(o.explained is False for o in round_judge.outputs):
        first = _first_off(noise, bodies, calls)
        findings = [*([first] if first is not None else []), *findings]
        if first is None and refuted:
            reasons.append(
                f"an output is off, and what was to blame returns what the reference makes of its inputs: "
                f"{', '.join(refuted[:5])}"
            )
    findings = [*(f for f in findings if f.fatal), *(f for f in findings if not f.fatal)]
    return replace(judgement, findings=findings, reasons=reasons)


def _without_ops(noise: NoisePass) -> list[StoredRecord]:
    """Module records of the target's calls in which no op was recorded, those within before those around."""
    with_ops: set[CallKey] = set()
    for call in noise.pairing.target.calls.values():
        if any(call.ops.values()):
            with_ops.update(around.key for around in call.enclosing())
    return sorted(
        (
            call.record
            for call in noise.pairing.target.calls.values()
            if call.record is not None and call.key not in with_ops
        ),
        key=lambda record: record.seq,
    )


def _call_of(noise: NoisePass, finding: Finding, calls: list[StoredRecord]) -> StoredRecord | None:
    """The call that a finding is about; None where it is seen at another call than the one it names."""
    record = noise.pairing.target.records.get(finding.seq)
    if record is None or not any(record is other for other in calls):
        return None
    return record if (record.module, record.call) == (finding.module, finding.call) else None


def _first_off(noise: NoisePass, bodies: Bodies, calls: list[StoredRecord]) -> Finding | None:
    """The first call whose body is off."""
    for record in calls:
        body = bodies.judge(record)
        if body.ok is False:
            evidence = {"judge": "body", "body": body.evidence, "error": body.error, "band": body.band}
            found = Sites(noise).finding(record, None, "introduced", evidence, None)
            return replace(found, judge="body")
    return None


__all__ = ["with_bodies"]
