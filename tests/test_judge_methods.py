"""A model of which only methods are called: blame holds without a call of its own around its parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from aligning import batch, changed
from torch import nn

import dispatch_trace as dt


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        self.dec = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 8))
        self.scale = 1.0

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        encoded: torch.Tensor = self.enc(x)
        return encoded * self.scale

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        decoded: torch.Tensor = self.dec(z)
        return decoded


def coder() -> Coder:
    torch.manual_seed(0)
    return Coder().eval()


def run(path: Path, model: nn.Module, level: str, shift: float = 0.0) -> Path:
    assert isinstance(model, Coder)
    with torch.no_grad(), dt.record(path, model, level=level) as recording, recording.step():
        model.decode(model.encode(batch(3, 8) + shift))
    return path


def widened(model: nn.Module) -> None:
    model.enc[2].weight[1] *= 1.5  # type: ignore[index,union-attr]


def scaled(model: nn.Module) -> None:
    model.scale = 1.3  # type: ignore[assignment]


@pytest.mark.parametrize("level", ["op", "module"])
@pytest.mark.parametrize(
    ("plant", "label", "module"),
    [(widened, "parameter", "enc.2"), (scaled, "wiring", "")],
)
def test_one_finding_names_what_is_wrong(
    tmp_path: Path, level: str, plant: Callable[[nn.Module], None], label: str, module: str
) -> None:
    ref = run(tmp_path / "ref", coder(), level)
    found = dt.align(ref, run(tmp_path / "target", changed(plant, coder()), level))
    (fatal,) = [finding for finding in found.findings if finding.fatal]
    assert fatal.module == module
    assert fatal.label == ("argument" if level == "op" and plant is scaled else label)


def test_other_inputs_are_said(tmp_path: Path) -> None:
    ref = run(tmp_path / "ref", coder(), "module")
    found = dt.align(ref, run(tmp_path / "target", coder(), "module", shift=0.5))
    assert found.first is not None and (found.first.label, found.first.module) == ("argument", "enc")
