"""Lower precision that the user declares is granted; what nobody declared is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from aligning import align_models, batch
from torch import nn

from dispatch_trace.errors import ConfigError
from dispatch_trace.judge.declared import Declaration


class Cast(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16().float() @ self.weight.bfloat16().float().t() + self.bias


def mlp(kind: type[nn.Linear]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(kind(32, 64), nn.GELU(), kind(64, 8)).eval()


@pytest.mark.parametrize("save", ["tensors", "stats"])
def test_a_declared_precision_is_a_match(tmp_path: Path, save: str) -> None:
    alignment = align_models(
        tmp_path, mlp(nn.Linear), mlp(Cast), batch(), save=save, declared="matmul operands bf16"
    )
    assert (alignment.verdict, alignment.findings) == ("match", [])


@pytest.mark.parametrize("save", ["tensors", "stats"])
def test_an_undeclared_cast_is_a_suspect_and_no_match(tmp_path: Path, save: str) -> None:
    alignment = align_models(tmp_path, mlp(nn.Linear), mlp(Cast), batch(), save=save)
    assert alignment.verdict == "inconclusive"
    assert {(f.label, f.op) for f in alignment.findings} == {("suspect", "aten._to_copy")}
    assert any("undeclared cast" in reason for reason in alignment.reasons)


def test_a_declaration_excuses_no_defect(tmp_path: Path) -> None:
    target = mlp(Cast)
    with torch.no_grad():
        target[2].weight.mul_(1.2)  # type: ignore[index]
    first = align_models(tmp_path, mlp(nn.Linear), target, batch(), declared="matmul operands bf16").first
    assert first is not None and (first.label, first.module) == ("parameter", "2")


@pytest.mark.parametrize(
    "text",
    ["matmul operands bf16", "linear bf16", "aten.mm inputs fp16", "all outputs tf32", "matmuls in bf16"],
)
def test_what_can_be_declared(text: str) -> None:
    (rule,) = Declaration.of(text).rules
    assert rule[2] > 2.0**-24


@pytest.mark.parametrize("text", ["matmul", "bf16", "matmul conv operands bf16", "matmul operands int3"])
def test_what_cannot_be_read_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read\. Write WHICH"):
        Declaration.of(text)
