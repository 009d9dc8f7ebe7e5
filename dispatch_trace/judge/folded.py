"""Judges steps that repeat all at once, as far as all of them go the way of the first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dispatch_trace.align.repeated import Folded
from dispatch_trace.judge.findings import Judgement
from dispatch_trace.store.reader import RankReader

# After so many rounds in which steps went astray, all are judged one by one.
_MAX_ROUNDS = 3


def judge_folded(folded: Folded, judge: Callable[[RankReader, RankReader], Judgement]) -> Judgement | None:
    """What a judge says of two ranks, from their views in which steps that repeat show once.

    Steps that went astray are taken out and judged beside the others, each by itself. With a finding at hand
    every step counts by itself: which of them is the first, and how large its figures are.

    Args:
      judge: pairs and judges two ranks; runs on the views.
    Returns: the same judgement as that of the whole ranks, or None where it takes these.
    """
    for _ in range(_MAX_ROUNDS):
        found = judge(folded.ref, folded.target)
        if found.findings:
            return None
        astray = folded.astray()
        if not astray:
            return replace(found, pairs=folded.unfolded(found.pairs))
        rest = folded.without(astray)
        if rest is None:
            return None
        folded = rest
    return None


__all__ = ["judge_folded"]
