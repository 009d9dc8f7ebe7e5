"""Judges steps that repeat all at once, as far as all of them go the way of the first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dispatch_trace.align.repeated import Folded
from dispatch_trace.judge.findings import Finding, Judgement
from dispatch_trace.judge.handed_on import AstrayError
from dispatch_trace.per_step import SeveralNumbersError, of_step
from dispatch_trace.store.reader import RankReader

# After so many rounds in which steps went astray, all are judged one by one,
_MAX_ROUNDS = 12
# and so they are before the rounds look at more records than this times all: one that stands for several
# takes ten times as long as one that stands for itself. Of few records all may be looked at.
_MAX_SHARE = 0.15
_FEW_RECORDS = 20_000


def judge_folded(folded: Folded, judge: Callable[[RankReader, RankReader], Judgement]) -> Judgement | None:
    """What a judge says of two ranks, from their views in which steps that repeat show once.

    Steps that went astray are taken out, and stand for each other where they left the way at one place. What
    is found in a step that repeats is found in all that it stands for, with figures of their own.

    Args:
      judge: pairs and judges two ranks; runs on the views.
    Returns: the same judgement as that of the whole ranks, or None where it takes these.
    """
    num_seen = 0
    rest: Folded | None = folded
    for _ in range(_MAX_ROUNDS):
        if rest is None:
            return None
        num_seen += rest.num_shown
        if num_seen > max(_MAX_SHARE * rest.num_records, min(rest.num_records, _FEW_RECORDS)):
            return None
        try:
            found = judge(rest.ref, rest.target)
        except AstrayError:
            rest = rest.parted()
            continue
        except SeveralNumbersError:
            return None
        if not (rest.astray() or (rest.grows and rest.target.doubted)):
            if rest.grows and (
                found.verdict == "inconclusive"
                or any(rest.is_about_several(f.seq, f.ref_seq) for f in found.findings)
            ):
                return None
            findings = found.findings if rest.grows else _of_all_steps(rest, found.findings)
            if findings is None:
                return None
            return replace(found, findings=findings, pairs=rest.unfolded(found.pairs))
        rest = rest.parted()
    return None


def _of_all_steps(folded: Folded, findings: Sequence[Finding]) -> list[Finding] | None:
    """The findings of the steps that those of the views stand for; None where their order is not known."""
    found: list[Finding] = []
    for _, several in itertools.groupby(findings, key=lambda finding: finding.fatal):
        group = list(several)
        if any(a.step > b.step for a, b in itertools.pairwise(group)):
            return None  # they are in the order of the run, and what one step reads another has made
        each = [one for finding in group for one in _of_each_step(folded, finding)]
        found += sorted(each, key=lambda finding: finding.step)
    return found


def _of_each_step(folded: Folded, finding: Finding) -> list[Finding]:
    steps = folded.steps(finding.step)
    if len(steps) == 1:
        return [finding]
    ref, target = (
        reader.record(seq) if seq >= 0 else None
        for reader, seq in ((folded.ref, finding.ref_seq), (folded.target, finding.seq))
    )
    return [
        replace(
            finding,
            step=step,
            evidence=_evidence(finding.evidence, at),
            hint=of_step(finding.hint, at),
            seq=-1 if target is None else folded.target.seq_in_step(target, at),
            ref_seq=-1 if ref is None else folded.ref.seq_in_step(ref, at),
        )
        for at, step in enumerate(steps)
    ]


def _evidence(evidence: dict[str, Any], at: int) -> dict[str, Any]:
    """The figures of one step, without what is unknown there."""
    found = {name: _of_step(value, at) for name, value in evidence.items()}
    return {name: v for name, v in found.items() if not (isinstance(v, float) and math.isnan(v))}


def _of_step(value: Any, at: int) -> Any:
    if isinstance(value, dict):
        return {name: _of_step(one, at) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_of_step(one, at) for one in value)
    return of_step(value, at)


__all__ = ["judge_folded"]
