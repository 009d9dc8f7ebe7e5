"""Steps whose sizes differ, or that read what the step before made, come out as judged one by one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from folding import (
    Change,
    Faulty,
    assert_same_findings,
    both_ways,
    judge_ranks,
    run,
    run_faulty,
)
from torch import nn

import dispatch_trace as dt
from dispatch_trace.align.folded_pairs import FoldedPairs
from dispatch_trace.align.growing import plain_arguments
from dispatch_trace.align.repeated import fold
from dispatch_trace.judge.findings import Judgement
from dispatch_trace.judge.folded import judge_folded
from dispatch_trace.store.columns import pack_plain
from dispatch_trace.store.reader import RankReader, open_ranks
from dispatch_trace.store.table import Names

STEPS = 14


class Decoder(nn.Module):
    """Keeps keys and values, of which there is one more with each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(7, 16), nn.Linear(16, 48)
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 7)
        self.cache: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        if self.cache is not None:
            k, v = torch.cat([self.cache[0], k]), torch.cat([self.cache[1], v])
        self.cache = k, v
        keys, values = (each.view(1, k.shape[0], 16).repeat(2, 1, 1) for each in self.cache)
        scores = torch.bmm(q.unsqueeze(1), keys.transpose(1, 2)) / 4
        return self.out(x + torch.bmm(torch.softmax(scores, -1), values).squeeze(1))


class Recurrent(nn.Module):
    """Reads what the call before returned."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear = nn.Embedding(7, 16), nn.Linear(16, 16)
        self.state: torch.Tensor | None = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.linear(self.embed(ids))
        self.state = x if self.state is None else torch.tanh(x + 0.5 * self.state)
        return self.state


class Experts(nn.Module):
    """Each expert computes the tokens that it is given: with each call other numbers of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router = nn.Embedding(7, 16), nn.Linear(16, 2)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(torch.cat([ids, ids.flip(0), torch.arange(7)]))
        choice, out = self.router(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.nonzero(choice == number)[:, 0]
            out = out.index_add(0, rows, expert(x[rows]))
        return x + out


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().eval()


def tokens(num: int = STEPS) -> list[torch.Tensor]:
    """Two a step, of few kinds, so that some come again."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 7, (2,), generator=generator) for _ in range(num)]


def rounding(seed: int) -> Change:
    generator = torch.Generator().manual_seed(seed)
    return lambda out: out * (1 + 1e-7 * torch.randn(out.shape, generator=generator))


def grown(out: torch.Tensor) -> torch.Tensor:
    return out * 1.05


def traces(folder: Path, kind: Callable[[], nn.Module], change: Change, steps: Collection[int]) -> list[Path]:
    ref = run(folder / "ref", made(kind), tokens())
    return [ref, run_faulty(folder / "target", made(kind), tokens(), Faulty(steps, change, number=1))]


@pytest.mark.parametrize("kind", [Decoder, Recurrent, Experts])
@pytest.mark.parametrize("options", [{}, {"tolerance": 1e-3}], ids=["rounding", "tolerance"])
def test_clean_pairs_come_out_as_step_by_step(
    tmp_path: Path, kind: Callable[[], nn.Module], options: dict[str, Any]
) -> None:
    once, each = both_ways(*traces(tmp_path, kind, rounding(1), range(STEPS)), **options)
    assert_same_findings(once, each)
    assert each.verdict == "match"


@pytest.mark.parametrize("kind", [Decoder, Recurrent], ids=["decoder", "recurrent"])
def test_nearly_all_steps_show_once(tmp_path: Path, kind: Callable[[], nn.Module]) -> None:
    ref, target = traces(tmp_path, kind, rounding(1), range(STEPS))
    folded = fold(open_ranks(ref)[0], open_ranks(target)[0])
    assert folded is not None and folded.grows
    shown = {record.step for record in folded.target.records() if record.kind != "param"}
    last = {STEPS - 1}  # nobody reads what it keeps
    assert shown == {0, 1, 2, *last}


@pytest.mark.parametrize("kind", [Decoder, Recurrent])
@pytest.mark.parametrize("steps", [{9}, range(9, STEPS)], ids=["one step", "later"])
def test_what_is_wrong_in_one_step_and_those_behind_it_comes_out_as_step_by_step(
    tmp_path: Path, kind: Callable[[], nn.Module], steps: Collection[int]
) -> None:
    ref, target = traces(tmp_path, kind, grown, steps)
    once, each = both_ways(ref, target)
    if once is not None:  # else few steps are left that are right
        assert_same_findings(once, each)
    assert each.verdict == "diverged"
    found = dt.align(ref, target)
    assert found.verdict == "diverged" and found.first is not None and found.first.step == 9
    assert [repr(p) for p in found.pairs] == [repr(p) for p in each.pairs]


def test_sizes_that_differ_from_trace_to_trace_do_not_repeat(tmp_path: Path) -> None:
    ref = run(tmp_path / "ref", made(Decoder), tokens())
    padded = made(Decoder)
    padded.cache = torch.zeros(1, 16), torch.zeros(1, 16)
    target = run(tmp_path / "target", padded, tokens())
    assert fold(open_ranks(ref)[0], open_ranks(target)[0]) is None


def test_a_rule_that_takes_no_sizes_of_several_steps_judges_step_by_step(tmp_path: Path) -> None:
    ref, target = traces(tmp_path, Decoder, rounding(1), range(STEPS))
    folded = fold(open_ranks(ref)[0], open_ranks(target)[0])
    assert folded is not None

    def judged_by_shape(ours: RankReader, theirs: RankReader) -> Judgement:
        assert {slot.shape for record in theirs.records() for slot in record.slots}
        return judge_ranks(ours, theirs)

    assert judge_folded(folded, judged_by_shape) is None


def test_integers_beyond_64_bits_are_no_sizes() -> None:
    names = Names()
    numbers = names.numbers([pack_plain([["seed", seed]]) for seed in (3, 4, 1 << 63, (1 << 64) - 1)])[:-1]
    plain = plain_arguments(numbers, names)
    assert plain[0] == plain[1] and len(set(plain.tolist())) == 3


def test_an_alignment_answers_like_any_other(tmp_path: Path) -> None:
    ref, target = traces(tmp_path, Decoder, rounding(1), range(STEPS))
    found, again = dt.align(ref, target), dt.align(ref, target, steps=range(STEPS))
    assert isinstance(found.pairs, FoldedPairs) and isinstance(again.pairs, list)
    assert found.to_json() == again.to_json() and found.table() == again.table()
    for mine, theirs in itertools.islice(zip(found.pairs, again.pairs, strict=True), 0, None, 7):
        assert mine.target == theirs.target and mine.ref == theirs.ref
