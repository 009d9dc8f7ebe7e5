"""Steps that repeat, judged at once and one by one: what tests of both compare."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dispatch_trace as dt
from dispatch_trace.align.folded_pairs import FoldedPairs
from dispatch_trace.align.lineup import pair_traces
from dispatch_trace.align.repeated import fold
from dispatch_trace.judge.findings import Judgement
from dispatch_trace.judge.folded import judge_folded
from dispatch_trace.judge.joined import judge
from dispatch_trace.report.facts import jsonable, pair_row
from dispatch_trace.store.reader import RankReader, open_ranks

STEPS = 6
MANY = 12  # of which some may go astray before it pays to look at each

Change: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


def inputs(num: int = STEPS, rows: int = 6) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(rows, 32, generator=generator) for _ in range(num)]


def run(path: Path, model: nn.Module, given: Iterable[Any], **options: Any) -> Path:
    with torch.no_grad(), dt.record(path, model, **{"save": "stats", **options}):
        for each in given:
            model(each)
    return path


def judge_ranks(ref: RankReader, target: RankReader, **options: Any) -> Judgement:
    return judge(pair_traces(ref, target), **options)


def both_ways(ref: Path, target: Path, **options: Any) -> tuple[Judgement | None, Judgement]:
    """The judgement of steps taken together, and that of each by itself."""
    sides = open_ranks(ref)[0], open_ranks(target)[0]
    folded = fold(*sides)
    once = None if folded is None else judge_folded(folded, lambda a, b: judge_ranks(a, b, **options))
    return once, judge_ranks(open_ranks(ref)[0], open_ranks(target)[0], **options)


def facts(judgement: Judgement) -> dict[str, Any]:
    """All that an alignment says, pair by pair, with every bit of its figures."""
    rows = [
        pair_row(pair) | {"error": repr(pair.error), "band": repr(pair.band), "notes": pair.notes}
        for pair in judgement.pairs
    ]
    found: dict[str, Any] = jsonable(
        {
            "verdict": judgement.verdict,
            "findings": [repr(finding) for finding in judgement.findings],
            "coverage": judgement.coverage,
            "notices": judgement.notices,
            "reasons": judgement.reasons,
            "pairs": rows,
        }
    )
    return found


def assert_same(once: Judgement | None, each: Judgement) -> None:
    assert once is not None and isinstance(once.pairs, FoldedPairs)
    mine, theirs = facts(once), facts(each)
    assert [p for p, q in zip(mine["pairs"], theirs["pairs"], strict=True) if p != q] == []
    assert mine == theirs


class Faulty(TorchDispatchMode):
    """Beneath a recorder: an `aten.addmm` (by number) of some calls of a model returns something else."""

    def __init__(self, steps: Collection[int], change: Change, *, number: int = 2) -> None:
        super().__init__()
        self._steps, self._change, self._number = steps, change, number
        self._step, self._num_products = -1, 0

    def begin(self, *_: Any) -> None:
        self._step, self._num_products = self._step + 1, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.addmm.default:
            self._num_products += 1
            return (
                self._change(out) if self._num_products == self._number and self._step in self._steps else out
            )
        return out


def run_faulty(path: Path, model: nn.Module, given: Iterable[Any], fault: Faulty) -> Path:
    model.register_forward_pre_hook(fault.begin)
    with fault:
        return run(path, model, given)


def assert_same_findings(once: Judgement | None, each: Judgement) -> None:
    """All that is known of each finding, to the last bit, besides."""
    assert_same(once, each)
    assert once is not None
    assert [repr(asdict(f)) for f in once.findings] == [repr(asdict(f)) for f in each.findings]
