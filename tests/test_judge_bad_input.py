"""What was not meant to be compared, or cannot be, is said plainly in the result."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from aligning import align_models, batch, net, record
from torch import nn

import dispatch_trace as dt


def test_traces_of_different_models(tmp_path: Path) -> None:
    other = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 5))
    alignment = align_models(tmp_path, net(), other, batch())
    assert alignment.verdict == "inconclusive"
    assert "other models: " in alignment.notices[0] and "no module path in common" in alignment.notices[0]
    assert any("shapes differ: [6, 8] against [6, 5]" in reason for reason in alignment.reasons)


@pytest.mark.parametrize("longer", ["reference", "target"])
def test_one_step_against_two(tmp_path: Path, longer: str) -> None:
    one = record(tmp_path / "one", net(), batch())
    two, model = tmp_path / "two", net()
    with torch.no_grad(), dt.record(two, model, save="tensors"):
        model(batch())
        model(batch() + 1)
    alignment = dt.align(one, two) if longer == "target" else dt.align(two, one)
    assert alignment.verdict == "inconclusive"
    assert alignment.reasons == [f"steps that only the {longer} has: 1"]


class Drawn(nn.Module):
    """A random, a stateful or a plain body behind a linear layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.fc, self.norm = nn.Linear(32, 32), nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        if self.kind == "random":
            return torch.bernoulli(torch.sigmoid(y)) * y
        if self.kind == "stateful":
            return self.norm(y)  # type: ignore[no-any-return]
        return torch.ops.dispatch_trace_bad_input.twice(y)  # type: ignore[no-any-return]


def test_rename_rules_that_go_round_in_a_circle_swap_and_say_so(tmp_path: Path) -> None:
    x = batch()
    ref = record(tmp_path / "ref", net(), x)
    target = net()
    target.blocks[0], target.blocks[1] = target.blocks[1], target.blocks[0]  # type: ignore[index,operator]
    found = dt.align(
        ref,
        record(tmp_path / "target", target, x),
        rename={"blocks.0": "blocks.1", "blocks.1": "blocks.0"},
    )
    assert any("circle, 'blocks.0' -> 'blocks.1' -> 'blocks.0'" in notice for notice in found.notices)
    assert found.verdict == "diverged", "the blocks run in the other order, with the same weights"


def test_random_ops_take_their_recorded_draws(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Drawn("random")
    paths = []
    for name in ("ref", "target"):
        torch.manual_seed(1)
        paths.append(record(tmp_path / name, model, batch()))
    same = dt.align(*paths)
    stand_in = "recorded results stand in: aten.bernoulli.default (random)"
    assert same.verdict == "match" and any(stand_in in notice for notice in same.notices)
    torch.manual_seed(2)
    other = dt.align(paths[0], record(tmp_path / "other", model, batch()))
    assert [f.label for f in other.findings if f.op == "aten.bernoulli"] and other.verdict != "match"


def test_stateful_ops_run_from_the_state_that_was_recorded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Drawn("stateful").train()
    twice = copy.deepcopy(model)
    ref = record(tmp_path / "ref", model, batch())
    assert dt.align(ref, record(tmp_path / "target", twice, batch())).verdict == "match"
    # The second run of one model starts from other running statistics, which training does not read.
    again = dt.align(ref, record(tmp_path / "again", model, batch()))
    assert again.verdict == "match" or again.findings


def test_custom_ops_whose_library_is_gone_take_their_recorded_results(tmp_path: Path) -> None:
    with torch.library._scoped_library("dispatch_trace_bad_input", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        torch.manual_seed(0)
        model = Drawn("custom")
        paths = [record(tmp_path / name, model, batch()) for name in ("ref", "target")]
        with torch.no_grad():
            model.fc.weight.mul_(1.01)
        wrong = record(tmp_path / "wrong", model, batch())
    said = "dispatch_trace_bad_input.twice.default (the op's library is not loaded here)"
    assert dt.align(*paths).verdict == "match"  # known without running either: nothing took what was recorded
    found = dt.align(paths[0], wrong)
    assert any(said in notice for notice in found.notices)
    first = found.first
    assert first is not None and (first.module, first.label) == ("fc", "parameter")


def test_a_flip_of_a_decision_says_how_narrowly_it_fell(tmp_path: Path) -> None:
    class Chooses(nn.Module):
        def __init__(self, noise: float) -> None:
            super().__init__()
            self.noise = noise

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            scores = torch.softmax(x, -1)
            return scores.argmax(-1), scores

    x = batch(rows=64)
    x[:, 1] = x[:, 0] = 5.0  # ties, which rounding breaks
    x[:, 1] += 1e-3 * torch.randn(64, generator=torch.Generator().manual_seed(2))
    ref = record(tmp_path / "ref", Chooses(0.0), x)
    target = record(tmp_path / "target", Chooses(0.0), x.bfloat16())
    flips = [f for f in dt.align(ref, target, twins=False).findings if f.label == "flip"]
    assert [f.op for f in flips] == ["aten.argmax"] and not flips[0].fatal
    assert 0.0 <= flips[0].evidence["margin"] < 0.01
