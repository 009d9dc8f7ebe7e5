"""Attention as models write it: masks that are but large, keys put together in place, no mask at all."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dispatch_trace as dt

SIZE, SEQ, HALF = 32, 8, 16


class Attention(nn.Module):
    """One head over padded tokens.

    Args:
      masked: what a masked score is given besides.
    """

    def __init__(self, masked: float) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(SIZE, SIZE) for _ in range(3))
        self.masked = masked
        self.seen = True

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        key = self.key(x)
        joined = key.new_empty(key.shape)
        joined[..., :HALF] = key[..., :HALF]
        joined[..., HALF:] = key[..., HALF:] * 0.7
        scores = self.query(x) @ joined.transpose(-1, -2) * SIZE**-0.5
        if not self.seen:
            mask = torch.zeros_like(mask)
        return (scores + mask).softmax(-1) @ self.value(x)


class Model(nn.Module):
    def __init__(self, masked: float) -> None:
        super().__init__()
        self.first, self.second = Attention(masked), Attention(masked)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = (torch.arange(SEQ) >= SEQ - 3).expand(x.shape[0], SEQ, SEQ)
        mask = torch.where(
            hidden, torch.tensor(self.first.masked, dtype=x.dtype), torch.zeros((), dtype=x.dtype)
        )
        x = x + self.first(x, mask)
        return x + self.second(x, mask)


def pair(masked: float, target: torch.dtype) -> tuple[Model, Model]:
    torch.manual_seed(0)
    ref = Model(masked)
    with torch.no_grad():
        for parameter in ref.parameters():
            parameter.mul_(3.0)
    return ref, copy.deepcopy(ref).to(target)


def align(tmp_path: Path, ref: nn.Module, target: nn.Module, save: str) -> Any:
    x = torch.randn(2, SEQ, SIZE, generator=torch.Generator().manual_seed(1))
    for name, model in (("ref", ref), ("target", target)):
        with torch.no_grad(), dt.record(tmp_path / name, model, save=save):
            model(x.to(next(model.parameters()).dtype))
    return dt.align(tmp_path / "ref", tmp_path / "target")


@pytest.mark.parametrize("save", ["tensors", "leaves"])
def test_what_was_written_of_unwritten_memory_is_not_rounded(tmp_path: Path, save: str) -> None:
    found = align(tmp_path, *pair(-1e10, torch.bfloat16), save)
    assert found.verdict == "match", (found.reasons, found.first)


@pytest.mark.parametrize("masked", [-65504.0, -1e6, -1e10])
def test_a_mask_hides_no_wrong_score(tmp_path: Path, masked: float) -> None:
    """Beside a norm of 1e10 a score that is off by 3 % differs by nothing."""
    ref, target = pair(masked, torch.bfloat16)
    right = target.first.query.forward
    target.first.query.forward = lambda x: right(x) * 0.97  # type: ignore[method-assign]
    found = align(tmp_path, ref, target, "leaves")
    assert found.verdict == "diverged"
    assert (found.first.module, found.first.op) == ("first.query", "aten.mul")


@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16])
def test_a_constant_in_place_of_a_value_is_named_where_it_is_made(
    tmp_path: Path, target: torch.dtype
) -> None:
    ref, other = pair(-1e30, target)
    other.second.seen = False
    found = align(tmp_path, ref, other, "tensors")
    assert found.verdict == "diverged"
    assert (found.first.module, found.first.op) == ("second", "aten.zeros_like")
    assert found.first.label == "structure"
