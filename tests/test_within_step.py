"""Repeats within a step, and steps of a training, come out as judged one by one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from folding import Change, assert_same_findings, both_ways, judge_ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dispatch_trace as dt
from dispatch_trace.align.folded_pairs import FoldedPairs
from dispatch_trace.align.repeated import Folded, fold
from dispatch_trace.store.reader import open_ranks

REPEATS = 24
Run: TypeAlias = Callable[[Path, TorchDispatchMode], None]


class Rounding(TorchDispatchMode):
    """Beneath a recorder: products are off by rounding, and some of them, by number, by a change."""

    def __init__(self, noise: float, change: Change | None = None, at: Collection[int] = ()) -> None:
        super().__init__()
        self._noise, self._change, self._at = noise, change, at
        self._num = itertools.count()
        self._generator = torch.Generator().manual_seed(1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default):
            out = out * (1 + self._noise * torch.randn(out.shape, generator=self._generator))
            if next(self._num) in self._at and self._change is not None:
                out = self._change(out)
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.3 * self.down(nn.functional.gelu(self.up(self.norm(x))))


class Looping(nn.Module):
    """Calls a block again and again, on what it returned before."""

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.block, self.head, self.scale = Block(), nn.Linear(16, 5), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(REPEATS):
            x = self.block(x) if self.scale is None else self.block(x) * self.scale
        return self.head(x)


class Collecting(Looping):
    """Returns what all calls make."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.block(x + i) for i in range(REPEATS)]))


class Denoising(Looping):
    """Multiplies by another number each time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step in range(REPEATS):
            x = x - 0.1 * (step / REPEATS) * self.block(x)
        return self.head(x)


class Generating(Looping):
    """Reads all that it made before: sizes grow within one call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x[-1:]
        for _ in range(REPEATS):
            made = self.block(kept[-1:])
            kept = torch.cat([kept, torch.softmax(made @ kept.t() / 4, -1) @ kept])
        return self.head(kept)


def looping(model: Callable[[], nn.Module]) -> Run:
    def run(path: Path, beneath: TorchDispatchMode) -> None:
        torch.manual_seed(0)
        made, x = model().eval(), torch.randn(4, 16)
        with torch.no_grad(), beneath, dt.record(path, made, save="stats"):
            made(x)

    return run


def plain(path: Path, beneath: TorchDispatchMode) -> None:
    """A program without modules has no steps."""
    torch.manual_seed(0)
    up, down, x = torch.randn(16, 32) / 4, torch.randn(32, 16) / 8, torch.randn(4, 16)
    with torch.no_grad(), beneath, dt.record(path, save="stats"):
        for _ in range(REPEATS):
            x = 0.9 * x + torch.tanh(x @ up) @ down
            x = x - x.mean(-1, keepdim=True)


def training(optimiser: Callable[..., torch.optim.Optimizer], num: int = REPEATS) -> Run:
    def run(path: Path, beneath: TorchDispatchMode) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16))
        steps, generator = optimiser(model.parameters()), torch.Generator().manual_seed(1)
        with beneath, dt.record(path, model, save="stats") as recording:
            for _ in range(num):
                with recording.step():
                    x = torch.randn(8, 16, generator=generator)
                    loss = ((model(x) - x) ** 2).mean()
                    steps.zero_grad()
                    loss.backward()
                    steps.step()

    return run


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=False)


RUNS: dict[str, Run] = {
    "loop": looping(Looping),
    "loop with an op": looping(lambda: Looping(0.9)),
    "all results": looping(Collecting),
    "other arguments": looping(Denoising),
    "growing": looping(Generating),
    "no modules": plain,
    "momentum": training(momentum),
    "adamw": training(adamw),
}


def recorded(folder: Path, run: Run, noise: float = 1e-7, **fault: Any) -> list[Path]:
    run(folder / "ref", Rounding(0.0))
    run(folder / "target", Rounding(noise, **fault))
    return [folder / "ref", folder / "target"]


@pytest.fixture
def _to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few repeats do not pay where some of them go astray; they are folded all the same."""
    monkeypatch.setattr("dispatch_trace.judge.folded._MAX_SHARE", 20.0)


@pytest.mark.usefixtures("_to_the_end")
@pytest.mark.parametrize("name", RUNS)
def test_clean_pairs_come_out_as_one_by_one(tmp_path: Path, name: str) -> None:
    once, each = both_ways(*recorded(tmp_path, RUNS[name]))
    assert_same_findings(once, each)
    assert each.verdict == "match"


@pytest.mark.parametrize("name", ["loop", "all results", "no modules", "momentum"])
def test_most_repeats_show_once(tmp_path: Path, name: str) -> None:
    ref, target = recorded(tmp_path, RUNS[name], noise=0.0)
    folded = fold(open_ranks(ref)[0], open_ranks(target)[0])
    assert folded is not None and folded.grows
    assert 3 * folded.num_shown < folded.num_records


@pytest.mark.parametrize("name", ["loop", "loop with an op", "all results", "growing", "momentum"])
@pytest.mark.parametrize("at", [(41,), range(80, 999)], ids=["once", "later"])
def test_what_is_wrong_in_one_repeat_is_found_as_one_by_one(
    tmp_path: Path, name: str, at: Collection[int]
) -> None:
    def off(out: torch.Tensor) -> torch.Tensor:
        return out * 1.5

    ref, target = recorded(tmp_path, RUNS[name], change=off, at=at)
    once, each = both_ways(ref, target)
    if once is not None:
        assert_same_findings(once, each)
    found = dt.align(ref, target)
    assert [repr(p) for p in found.pairs] == [repr(p) for p in each.pairs]
    assert found.verdict == each.verdict
    mine = [repr(f) for f in found.findings if f.label != "nondeterministic"]
    assert mine == [repr(f) for f in each.findings]


@pytest.mark.usefixtures("_to_the_end")
def test_a_fault_far_behind_is_found_beside_repeats_that_show_once(tmp_path: Path) -> None:
    def off(out: torch.Tensor) -> torch.Tensor:
        return out * 1.5

    ref, target = recorded(tmp_path, RUNS["loop"], change=off, at=[43])
    once, each = both_ways(ref, target)
    assert_same_findings(once, each)
    assert once is not None and once.verdict == "diverged"
    first = once.findings[0]
    assert (first.module, first.call, first.op) == ("block.down", 21, "aten.addmm")


def test_other_numbers_of_repeats_are_lined_up_whole(tmp_path: Path) -> None:
    """Which of them is missing, only all of them can tell."""

    class Shorter(Looping):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(REPEATS - 1):
                x = self.block(x)
            return self.head(x)

    RUNS["loop"](tmp_path / "ref", Rounding(0.0))
    looping(Shorter)(tmp_path / "target", Rounding(0.0))
    assert fold(open_ranks(tmp_path / "ref")[0], open_ranks(tmp_path / "target")[0]) is None


def test_a_program_without_modules_is_compared(tmp_path: Path) -> None:
    ref, target = recorded(tmp_path, plain)
    found = dt.align(ref, target)
    assert found.verdict == "match" and isinstance(found.pairs, FoldedPairs)
    assert found.coverage["share"] == 1.0
    assert judge_ranks(open_ranks(ref)[0], open_ranks(target)[0]).verdict == "match"


LONG = 60


class Long(Looping):
    """A fault stays, and its error hardly changes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(LONG):
            x = self.block(x)
        return self.head(x)


@pytest.mark.parametrize(
    "run, at", [(looping(Long), 41), (training(momentum, LONG), 101)], ids=["one step", "a training"]
)
def test_what_is_wrong_behind_a_fault_is_judged_at_once(
    tmp_path: Path, run: Run, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[int] = []

    def parted(folded: Folded) -> Folded | None:
        found = take_apart(folded)
        shown.append(0 if found is None else found.num_shown)
        return found

    take_apart = Folded.parted
    monkeypatch.setattr(Folded, "parted", parted)
    monkeypatch.setattr("dispatch_trace.judge.folded._MAX_SHARE", 20.0)
    ref, target = recorded(tmp_path, run, change=lambda out: out * 1.5, at=[at])
    once, each = both_ways(ref, target)
    assert_same_findings(once, each)
    assert [f.label for f in each.findings if f.fatal] == ["introduced"]
    num_records = sum(dt.open(path).num_records for path in (ref, target))
    assert 0 < 2 * shown[-1] < num_records


def test_a_weight_that_an_optimiser_wrote_from_something_wrong_is_not_to_blame(tmp_path: Path) -> None:
    ref, target = recorded(tmp_path, RUNS["momentum"], change=lambda out: out * 1.5, at=[41])
    found = dt.align(ref, target)
    assert [f.label for f in found.findings if f.fatal] == ["introduced"]
    weights = [pair for pair in found.pairs if pair.target is not None and pair.target.kind == "param"]
    assert {pair.label for pair in weights} <= {"", "inherited"}
