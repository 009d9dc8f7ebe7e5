"""Behind a choice that falls otherwise sizes are others: what is judged there, and what is left open."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dispatch_trace as dt

WIDTH, EXPERTS = 16, 4


class Experts(nn.Module):
    """Two of four experts for each token, each run once on the tokens that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)

    def forward(self, x: Any, chosen: Any, weights: Any) -> Any:
        out = torch.zeros_like(x)
        taken = nn.functional.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for number in range(EXPERTS):
            which, token = torch.where(taken[number])
            hidden = torch.relu(x[token] @ self.up[number])
            result = hidden @ self.down[number] * weights[token, which, None]
            out.index_add_(0, token, result.to(out.dtype))
        return out


class Counted(Experts):
    """The same on tokens in the order of their experts, as many for each as the program has read back."""

    def forward(self, x: Any, chosen: Any, weights: Any) -> Any:
        order = chosen.reshape(-1).argsort(stable=True)
        token = order // chosen.shape[1]
        counts = chosen.reshape(-1).bincount(minlength=EXPERTS).tolist()
        parts = [
            torch.relu(part @ up) @ down
            for part, up, down in zip(x[token].split(counts), self.up, self.down, strict=True)
        ]
        result = torch.cat(parts) * weights.reshape(-1, 1)[order]
        return torch.zeros_like(x).index_add_(0, token, result.to(x.dtype))


class Mixture(nn.Module):
    def __init__(self, kind: type[Experts]) -> None:
        super().__init__()
        self.first, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts, self.last = kind(), nn.Linear(WIDTH, WIDTH)

    def choose(self, scores: Any) -> Any:
        return scores.topk(2, dim=-1)

    def forward(self, x: Any) -> Any:
        x = x + self.first(x)
        weights, chosen = self.choose(self.router(x).float().softmax(-1))
        return self.last(x + self.experts(x, chosen, weights))


class BestTwo(Mixture):
    """Chooses by the largest score, twice."""

    def choose(self, scores: Any) -> Any:
        first = scores.max(dim=-1, keepdim=True)
        second = scores.scatter(-1, first.indices, -1.0).max(dim=-1, keepdim=True)
        return tuple(torch.cat(pair, dim=-1) for pair in zip(first, second, strict=True))


def exchanged(model: Any) -> None:
    model.experts.down[:2] = model.experts.down[:2].flip(0).clone()


def aligned(tmp_path: Path, model: Mixture, change: Callable[[Any], Any] | None = None) -> dt.Alignment:
    """A float32 reference against a bfloat16 target, with tokens that nearly tie."""
    target = copy.deepcopy(model)
    with torch.no_grad():
        if change is not None:
            change(target)
        x = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(3))
        for name, each in (("ref", model), ("target", target.to(torch.bfloat16))):
            with dt.record(tmp_path / name, each, save="leaves", overwrite=True):
                each(x.to(next(each.parameters()).dtype))
    return dt.align(tmp_path / "ref", tmp_path / "target")


def flips(found: dt.Alignment) -> list[str | None]:
    return [f.op for f in found.findings if f.label == "flip"]


def test_another_choice_by_rounding_is_the_same_program(tmp_path: Path) -> None:
    torch.manual_seed(0)
    found = aligned(tmp_path, Mixture(Experts))
    assert flips(found), "no choice fell otherwise: no test of it"
    sizes = [
        [slot.shape for r in dt.open(tmp_path / name).records if r.op == "aten.nonzero" for slot in r.slots]
        for name in ("ref", "target")
    ]
    assert sizes[0] != sizes[1], "no size followed the choice: no test of it"
    assert found.verdict == "match", found.reasons


def test_the_place_of_a_largest_score_is_a_choice(tmp_path: Path) -> None:
    torch.manual_seed(0)
    found = aligned(tmp_path, BestTwo(Experts))
    assert "aten.max" in flips(found), "no choice fell otherwise: no test of it"
    assert found.verdict == "match", found.reasons


def test_a_bug_behind_another_choice_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    found = aligned(tmp_path, Mixture(Experts), exchanged)
    assert flips(found), "no choice fell otherwise: no test of it"
    assert found.first is not None
    assert (found.first.label, found.first.module, found.first.judge) == ("parameter", "experts", "twins")


def test_a_program_laid_out_by_its_choice_is_left_to_the_estimates(tmp_path: Path) -> None:
    torch.manual_seed(0)
    found = aligned(tmp_path, Mixture(Counted))
    assert flips(found), "no choice fell otherwise: no test of it"
    assert found.verdict != "diverged"
    assert any("judged by estimates alone" in notice for notice in found.notices)
