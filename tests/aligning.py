"""Records two models and hands the traces to the aligner: what the tests of alignment and judgement share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dispatch_trace as dt
from dispatch_trace.align.lineup import pair_traces
from dispatch_trace.align.pairs import Pairing
from dispatch_trace.store.reader import open_ranks


class Block(nn.Module):
    """A residual block with a scale that a test may change."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x)))) * self.scale


class Net(nn.Module):
    """Three blocks and a head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


def batch(rows: int = 6, width: int = 32) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1))


def record(path: Path, model: nn.Module, *inputs: Any, **options: Any) -> Path:
    with torch.no_grad(), dt.record(path, model, **{"save": "tensors", **options}):
        model(*inputs)
    return path


def changed(change: Callable[[Any], Any], model: nn.Module | None = None) -> nn.Module:
    """A copy of the model with something done to it."""
    target = copy.deepcopy(net() if model is None else model)
    with torch.no_grad():
        result = change(target)
    return result if isinstance(result, nn.Module) else target


def align_models(
    folder: Path, reference: nn.Module, target: nn.Module, *inputs: Any, save: str = "tensors", **options: Any
) -> dt.Alignment:
    """Records both on the same inputs (cast to the dtype of the target's parameters), and aligns."""
    dtypes = {p.dtype for p in target.parameters() if p.is_floating_point()}
    cast = [
        x.to(next(iter(dtypes))) if len(dtypes) == 1 and torch.is_floating_point(x) else x for x in inputs
    ]
    ref = record(folder / f"ref-{save}", reference, *inputs, save=save, overwrite=True)
    other = record(folder / f"target-{save}", target, *cast, save=save, overwrite=True)
    return dt.align(ref, other, **options)


def pair_models(
    folder: Path, reference: nn.Module, target: nn.Module, *inputs: Any, save: str = "tensors", **options: Any
) -> Pairing:
    ref = record(folder / f"pair-ref-{save}", reference, *inputs, save=save, overwrite=True)
    other = record(folder / f"pair-target-{save}", target, *inputs, save=save, overwrite=True)
    return pair_traces(open_ranks(ref)[0], open_ranks(other)[0], **options)
