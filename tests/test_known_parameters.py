"""Every value that a parameter had while it was read has a record of its own, however it came to have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import dispatch_trace as dt


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.fc(x))


def versions(path: Path, module: str = "fc") -> list[tuple[int, torch.Tensor]]:
    return [(r.step, r.tensor()) for r in dt.open(path).find(kind="param", module=module, name="weight")]


def same(found: list[tuple[int, torch.Tensor]], expected: list[tuple[int, Any]]) -> bool:
    return [step for step, _ in found] == [step for step, _ in expected] and all(
        torch.equal(a, b) for (_, a), (_, b) in zip(found, expected, strict=True)
    )


def test_changes_between_steps_that_move_no_version(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Pair().eval(), torch.randn(2, 3)
    first = model.fc.weight.detach().clone()
    with torch.no_grad(), dt.record(tmp_path / "t", model, save="tensors"):
        model(x)
        model.fc.weight.data = torch.ones(3, 3)
        model(x)
        model.fc.weight.data.mul_(3)
        model(x)
        model.fc.weight = nn.Parameter(torch.eye(3))
        model(x)
        model(x)
    expected = [(0, first), (1, torch.ones(3, 3)), (2, torch.full((3, 3), 3.0)), (3, torch.eye(3))]
    assert same(versions(tmp_path / "t"), expected)
    assert len(versions(tmp_path / "t", "head")) == 1


def test_changes_within_a_step(tmp_path: Path) -> None:
    class Changing(Pair):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.fc(x)
            self.fc.weight.data.mul_(2)
            x = self.fc(x)
            self.fc.weight.data = torch.full((3, 3), 0.5)
            return self.head(self.fc(x))

    torch.manual_seed(0)
    model, x = Changing().eval(), torch.randn(2, 3)
    first = model.fc.weight.detach().clone()
    with torch.no_grad(), dt.record(tmp_path / "t", model, save="tensors"):
        model(x)
    assert same(versions(tmp_path / "t"), [(0, first), (0, 2 * first), (0, torch.full((3, 3), 0.5))])
    trace = dt.open(tmp_path / "t")
    weights = [r for r in trace.find(kind="param", module="fc", name="weight")]
    readers = [r for r in trace.find(kind="op", module="fc", op="aten.t")]
    for number, (weight, reader) in enumerate(zip(weights, readers, strict=True)):
        (slot,) = [s for s in reader.slots if s.name == "in.self"]
        assert weight.seq in [seq for seq, _ in slot.producers], f"call {number} reads that version"


def test_tied_weights_are_recorded_under_both_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).eval()
    model[1].weight = model[0].weight
    with torch.no_grad(), dt.record(tmp_path / "t", model, save="tensors"):
        model(torch.randn(2, 3))
        model[0].weight.data.zero_()
        model(torch.randn(2, 3))
    for module in ("0", "1"):
        assert [step for step, _ in versions(tmp_path / "t", module)] == [0, 1]
        assert not versions(tmp_path / "t", module)[1][1].any()
