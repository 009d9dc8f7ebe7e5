"""Trainings: what rounding leaves of gradients, and what an optimiser makes of it, is no fault."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dispatch_trace as dt


class Normed(nn.Module):
    """A bias before a batch norm: its gradient is nothing but rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x: Any) -> Any:
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


class Attending(nn.Module):
    """A bias of keys: softmax takes it away again."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.head = nn.Linear(16, 8)

    def forward(self, x: Any) -> Any:
        x = x.flatten(2)[..., :192].reshape(len(x), -1, 16)
        return self.head(x + self.attention(x, x, x)[0])


def train(
    path: Path,
    model: nn.Module,
    save: str,
    *,
    autocast: bool = False,
    threads: int = 1,
    rate: float = 1e-2,
) -> Path:
    x = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    optimiser = torch.optim.AdamW(model.parameters(), rate)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with dt.record(path, model, save=save) as recording:
            for _ in range(3):
                with recording.step():
                    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                        out = model(x)
                    out.float().pow(2).mean().backward()
                    optimiser.step()
                    optimiser.zero_grad()
    finally:
        torch.set_num_threads(before)
    return path


def pair(tmp_path: Path, kind: Callable[[], nn.Module], save: str, **how: Any) -> dt.Alignment:
    torch.manual_seed(0)
    model = kind()
    target = copy.deepcopy(model)
    ref = train(tmp_path / "ref", model, save)
    return dt.align(ref, train(tmp_path / "target", target, save, **how))


@pytest.mark.parametrize("save", ["leaves", "stats"])
@pytest.mark.parametrize("kind", [Normed, Attending])
def test_other_threads_train_the_same_model(tmp_path: Path, kind: Any, save: str) -> None:
    found = pair(tmp_path, kind, save, threads=2)
    assert found.verdict == "match", (found.reasons, found.first)


@pytest.mark.parametrize("save", ["leaves", "stats"])
@pytest.mark.parametrize("kind", [Normed, Attending])
def test_autocast_is_how_a_model_is_trained(tmp_path: Path, kind: Any, save: str) -> None:
    found = pair(tmp_path, kind, save, autocast=True)
    assert found.verdict != "diverged", found.first


@pytest.mark.parametrize("kind", [Normed, Attending])
def test_another_learning_rate_is_named(tmp_path: Path, kind: Any) -> None:
    found = pair(tmp_path, kind, "leaves", threads=2, rate=1.1e-2)
    assert found.verdict == "diverged" and found.first is not None
    assert (found.first.label, found.first.op) in {("argument", "aten.addcdiv"), ("argument", "aten.mul")}


@pytest.mark.parametrize("save", ["leaves", "stats"])
def test_a_gradient_whose_effect_is_lost_in_the_weights_is_listed(tmp_path: Path, save: str) -> None:
    """One gradient of a step is off by 0.1 %, of which the optimiser takes no more than the sign."""

    class Faulty(TorchDispatchMode):
        num_products = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mm.default:
                self.num_products += 1
                return out * 1.001 if self.num_products == 4 else out
            return out

    def run(path: Path, beneath: Any) -> Path:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 16))
        with beneath, dt.record(path, model, save=save) as recording:
            for _ in range(3):
                with recording.step():
                    x = torch.randn(8, 16)
                    (model(x) - x).pow(2).mean().backward()
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter -= 1e-3 * parameter.grad.sign()
                            parameter.grad = None
        return path

    found = dt.align(run(tmp_path / "ref", nullcontext()), run(tmp_path / "target", Faulty()))
    assert found.verdict == "match", found.first
    named = [(f.label, f.op, f.module, f.step) for f in found.findings if f.label != "nondeterministic"]
    assert named == [("suspect", "aten.mm", "3", 1)]
