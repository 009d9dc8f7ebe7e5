"""A trace as a program: where the values of a slot come from, which call an op belongs to."""

from __future__ import annotations

from pathlib import Path

import torch
from aligning import batch, net, record
from torch import nn

from dispatch_trace.align.graph import Program
from dispatch_trace.store.reader import open_ranks


def program(path: Path, model: nn.Module, *inputs: torch.Tensor) -> Program:
    return Program(open_ranks(record(path, model, *inputs))[0])


def op(found: Program, name: str, n: int = 0) -> object:
    return next(r for r in found.records.values() if r.op == name and r.n == n)


def made_by(found: Program, name: str, slot: int = 0) -> list[str]:
    record = op(found, name)
    origins = found.origins(record, found.inputs(record)[slot])  # type: ignore[arg-type]
    return [found.records[o.value[0]].op or found.records[o.value[0]].kind for o in origins]


class Views(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x)
        return torch.exp(y.t().contiguous().double().float().unsqueeze(0).squeeze(0))


def test_views_clones_and_casts_are_edges(tmp_path: Path) -> None:
    found = program(tmp_path / "t", Views(), torch.ones(2, 3))
    assert made_by(found, "aten.exp") == ["aten.sin"]
    exp = op(found, "aten.exp")
    (origin,) = found.origins(exp, found.inputs(exp)[0])  # type: ignore[arg-type]
    assert origin.whole and not origin.same_order and origin.casts == ("float64", "float32")


class Pieces(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(4, 6)
        y[:, :3] = torch.sin(x)
        torch.cos(x, out=y[:, 3:])
        return torch.exp(y)


def test_a_tensor_written_in_pieces_comes_from_all_its_writers(tmp_path: Path) -> None:
    found = program(tmp_path / "t", Pieces(), torch.ones(4, 3))
    assert sorted(made_by(found, "aten.exp")) == ["aten.cos", "aten.sin"]


class InPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x)
        view = y[0]
        y.add_(1)
        return torch.exp(view)


def test_a_view_read_after_a_write_comes_from_the_writer_too(tmp_path: Path) -> None:
    found = program(tmp_path / "t", InPlace(), torch.ones(2, 3))
    assert made_by(found, "aten.exp")[-1] == "aten.add"


class Codes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin((x * 3).to(torch.int8).float())


def test_a_cast_to_integers_computes(tmp_path: Path) -> None:
    found = program(tmp_path / "t", Codes(), torch.ones(3))
    assert made_by(found, "aten.sin") == ["aten._to_copy"]


def test_ops_belong_to_the_innermost_call_and_calls_nest(tmp_path: Path) -> None:
    found = program(tmp_path / "t", net(), batch())
    gelu = op(found, "aten.gelu")
    call = found.call_of(gelu)  # type: ignore[arg-type]
    assert call.path == "blocks.0"
    assert [c.path for c in call.enclosing()] == ["blocks.0", ""]
    assert [c.path for c in call.children] == ["blocks.0.norm", "blocks.0.up", "blocks.0.down"]


def test_a_weight_read_through_a_view_is_a_leaf(tmp_path: Path) -> None:
    found = program(tmp_path / "t", net(), batch())
    addmm = op(found, "aten.addmm")
    weight = next(s for s in found.inputs(addmm) if s.name == "in.mat2")  # type: ignore[arg-type]
    (origin,) = found.origins(addmm, weight)  # type: ignore[arg-type]
    owner = found.records[origin.value[0]]
    assert (owner.kind, owner.module, owner.name) == ("param", "blocks.0.up", "weight")
    assert found.is_leaf(origin.value)
