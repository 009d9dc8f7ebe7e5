"""Verdicts and labels: what is said of each kind of difference, and what is never said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from aligning import align_models, batch, changed, net, record
from torch import nn

import dispatch_trace as dt

SAVES = pytest.mark.parametrize("save", ["tensors", "stats"])


def double_row(model: Any) -> None:
    model.blocks[1].up.weight[3] *= 2


def other_eps(model: Any) -> None:
    model.blocks[2].norm.eps = 1e-2


def no_residual(model: Any) -> None:
    block = model.blocks[1]
    block.forward = lambda x: block.down(F.gelu(block.up(block.norm(x)))) * block.scale


def twice_residual(model: Any) -> None:
    block = model.blocks[1]
    block.forward = lambda x: x + x + block.down(F.gelu(block.up(block.norm(x)))) * block.scale


def relu(model: Any) -> None:
    block = model.blocks[0]
    block.forward = lambda x: x + block.down(F.relu(block.up(block.norm(x)))) * block.scale


def norm_bypassed(model: Any) -> None:
    block = model.blocks[1]
    block.forward = lambda x: x + block.down(F.gelu(block.up(x))) * block.scale


def block_skipped(model: Any) -> None:
    del model.blocks[1:2]
    model.blocks = nn.ModuleDict({"0": model.blocks[0], "2": model.blocks[1]})
    model.forward = lambda x: model.head(model.blocks["2"](model.blocks["0"](x)))


def dropout(model: Any) -> None:
    block = model.blocks[1]
    block.forward = lambda x: x + block.down(F.dropout(F.gelu(block.up(block.norm(x))), 0.3)) * block.scale


def nan(model: Any) -> None:
    block = model.blocks[1]
    block.forward = lambda x: x + torch.sqrt(block.down(F.gelu(block.up(block.norm(x))))) * block.scale


def unwritten(model: Any) -> None:
    block = model.blocks[1]

    def forward(x: torch.Tensor) -> torch.Tensor:
        old = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)  # empty memory is filled with NaN
        start = torch.empty_like(x)
        torch.use_deterministic_algorithms(old)
        return x + (block.down(F.gelu(block.up(block.norm(x)))) + start) * block.scale

    block.forward = forward


def swapped_operands(model: Any) -> None:
    block = model.blocks[1]
    block.forward = lambda x: block.norm(x) + block.down(F.gelu(block.up(block.norm(x)))) * block.scale


PLANTED: list[tuple[Callable[[Any], None], str, str, str | None]] = [
    (double_row, "parameter", "blocks.1.up", "aten.addmm"),
    (other_eps, "argument", "blocks.2.norm", "aten.native_layer_norm"),
    (no_residual, "structure", "blocks.1", "aten.add"),
    (twice_residual, "structure", "blocks.1", "aten.add"),
    (relu, "structure", "blocks.0", "aten.relu"),
    (norm_bypassed, "structure", "blocks.1.norm", None),
    (block_skipped, "structure", "blocks.1", None),
    (dropout, "structure", "blocks.1", "aten.bernoulli"),
    (nan, "nonfinite", "blocks.1", "aten.sqrt"),
    (unwritten, "uninitialised", "blocks.1", "aten.add"),
]


@SAVES
@pytest.mark.parametrize(("plant", "label", "module", "op"), PLANTED, ids=[p[0].__name__ for p in PLANTED])
def test_a_planted_defect_is_named(
    plant: Callable[[Any], None], label: str, module: str, op: str | None, save: str, tmp_path: Path
) -> None:
    alignment = align_models(tmp_path, net(), changed(plant), batch(), save=save)
    first = alignment.first
    assert alignment.verdict == "diverged" and first is not None, alignment.reasons
    assert (first.label, first.module) == (label, module), first
    if op is not None:
        assert first.op == op, first
    assert first.fatal and first.step == 0
    assert first.judge == ("estimates" if save == "stats" else "twins")


def test_a_wrong_weight_is_named_by_path_and_the_rest_is_inherited(tmp_path: Path) -> None:
    alignment = align_models(tmp_path, net(), changed(double_row), batch())
    first = alignment.first
    assert first is not None and first.evidence["path"] == "blocks.1.up.weight"
    assert first.source is not None and first.source.rpartition(":")[0].endswith("linear.py") is False
    labels = [p.label for p in alignment.pairs if p.target is not None and p.target.kind == "op"]
    assert "inherited" in labels and labels.index("parameter") < labels.index("inherited")
    assert [f.label for f in alignment.findings if f.fatal] == ["parameter"]


def test_a_transposed_weight_gets_a_hint(tmp_path: Path) -> None:
    def square() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)).eval()

    def transpose(model: Any) -> None:
        model[0].weight.copy_(model[0].weight.t().clone())

    first = align_models(tmp_path, square(), changed(transpose, square()), batch()).first
    assert first is not None and first.label == "parameter" and "permuted (1, 0)" in (first.hint or "")


# No alarm ---------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.qkv, self.out = form, nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (z.view(6, 4, 8).transpose(0, 1) for z in self.qkv(x).chunk(3, -1))
        if self.form == "fused":
            y = F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        else:
            y = (q @ k.transpose(-1, -2) * 8**-0.5).softmax(-1) @ v
        return self.out(y.transpose(0, 1).reshape(6, 32))


@SAVES
def test_attention_written_out_is_a_match(tmp_path: Path, save: str) -> None:
    alignment = align_models(tmp_path, Attention("fused"), Attention("explicit"), batch(), save=save)
    assert alignment.verdict == "match", (alignment.findings, alignment.reasons)
    assert alignment.coverage["records"]["absorbed"] > 0
    assert alignment.coverage["compute_bytes"]["share"] == 1.0


@SAVES
def test_permuted_hidden_units_heal(tmp_path: Path, save: str) -> None:
    def permute(model: Any) -> None:
        block, order = model.blocks[1], torch.randperm(64, generator=torch.Generator().manual_seed(2))
        block.up.weight.copy_(block.up.weight[order])
        block.up.bias.copy_(block.up.bias[order])
        block.down.weight.copy_(block.down.weight[:, order])

    alignment = align_models(tmp_path, net(), changed(permute), batch(), save=save)
    assert alignment.verdict == "match", alignment.findings
    assert {f.label for f in alignment.findings} <= {"suspect"}


@SAVES
def test_a_folded_scale_heals(tmp_path: Path, save: str) -> None:
    def fold(model: Any) -> None:
        block, scale = model.blocks[1], torch.rand(32, generator=torch.Generator().manual_seed(2)) + 0.5
        block.norm.weight.div_(scale)
        block.norm.bias.div_(scale)
        block.up.weight.mul_(scale)

    assert align_models(tmp_path, net(), changed(fold), batch(), save=save).verdict == "match"


def test_a_weight_that_nobody_reads_is_no_defect(tmp_path: Path) -> None:
    def spare(value: float) -> Callable[[Any], None]:
        def change(model: Any) -> None:
            model.register_buffer("spare", torch.full((4,), value))

        return change

    alignment = align_models(tmp_path, changed(spare(0.0)), changed(spare(1.0)), batch())
    assert (alignment.verdict, alignment.first) == ("match", None)


def test_a_decision_that_flips_within_noise_is_no_defect(tmp_path: Path) -> None:
    class Route(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = x.float() * 3.0
            return y.argmax(-1), y

    x = torch.randn(200, 32, generator=torch.Generator().manual_seed(5))
    x[:, 1] = x[:, 0]  # ties in bfloat16
    ref = record(tmp_path / "ref", Route(), x + torch.linspace(0, 1e-3, 32))
    target = record(tmp_path / "target", Route(), (x + torch.linspace(0, 1e-3, 32)).bfloat16())
    alignment = dt.align(ref, target)
    assert alignment.verdict != "diverged", alignment.first
    assert "flip" in [f.label for f in alignment.findings]


# What the verdict needs -------------------------------------------------------------------------------


def test_two_traces_with_nothing_in_common_are_no_match(tmp_path: Path) -> None:
    ref = record(tmp_path / "ref", nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4))
    target = record(tmp_path / "target", nn.Sequential(nn.Conv1d(1, 2, 3)), torch.ones(1, 1, 9))
    alignment = dt.align(ref, target)
    assert alignment.verdict == "inconclusive" and alignment.reasons


def test_shapes_without_values_are_no_match(tmp_path: Path) -> None:
    ref = record(tmp_path / "ref", net(), batch(), save="meta")
    assert dt.align(ref, record(tmp_path / "target", net(), batch(), save="meta")).verdict == "inconclusive"


def test_what_the_other_trace_left_out_by_choice_costs_no_coverage(tmp_path: Path) -> None:
    ref = record(tmp_path / "ref", net(), batch())
    modules = record(tmp_path / "modules", net(), batch(), level="module")
    alignment = dt.align(ref, modules)
    assert alignment.verdict == "match"
    assert alignment.coverage["records"]["deselected"] > 10
    assert alignment.coverage["compute_bytes"]["share"] == 1.0


@SAVES
@pytest.mark.parametrize(
    ("plant", "label", "module"),
    [
        (double_row, "parameter", "blocks.1.up"),
        (other_eps, "introduced", "blocks.2.norm"),
        (no_residual, "introduced", "blocks.1"),
    ],
    ids=["double_row", "other_eps", "no_residual"],
)
def test_modules_alone_suffice_to_name_the_module(
    plant: Callable[[Any], None], label: str, module: str, save: str, tmp_path: Path
) -> None:
    ref = record(tmp_path / "ref", net(), batch(), save=save, level="module")
    target = record(tmp_path / "target", changed(plant), batch(), save=save, level="module")
    first = dt.align(ref, target).first
    assert first is not None and (first.label, first.module, first.op) == (label, module, None)


def test_another_number_of_steps_is_no_match(tmp_path: Path) -> None:
    model = net()
    for name, steps in (("ref", 2), ("target", 1)):
        with torch.no_grad(), dt.record(tmp_path / name, model):
            for _ in range(steps):
                model(batch())
    alignment = dt.align(tmp_path / "ref", tmp_path / "target")
    assert alignment.verdict == "inconclusive"
    assert any("steps that only the reference has: 1" in reason for reason in alignment.reasons)
    assert dt.align(tmp_path / "ref", tmp_path / "target", steps=0).verdict == "match"


def test_the_step_of_a_finding_is_named(tmp_path: Path) -> None:
    model, other = net(), net()
    with torch.no_grad(), dt.record(tmp_path / "ref", model):
        for _ in range(3):
            model(batch())
    with torch.no_grad(), dt.record(tmp_path / "target", other):
        for step in range(3):
            other.blocks[1].scale = 1.0 if step < 2 else 1.25
            other(batch())
    first = dt.align(tmp_path / "ref", tmp_path / "target").first
    assert first is not None and (first.step, first.module, first.op) == (2, "blocks.1", "aten.mul")


def test_exact_mode_sees_one_rounding(tmp_path: Path) -> None:
    class Order(nn.Module):
        def __init__(self, late: bool) -> None:
            super().__init__()
            self.late = late

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.float() * 1.7).to(x.dtype) * 1.3 if self.late else (x * 1.7) * 1.3

    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(1)).bfloat16() * 1.01
    ref, target = record(tmp_path / "ref", Order(True), x), record(tmp_path / "target", Order(False), x * 1)
    assert dt.align(ref, target).verdict == "match"
    same = dt.align(ref, ref, exact=True)
    assert same.verdict == "match" and same.findings == []


def test_exact_mode_names_the_first_op_with_other_bits(tmp_path: Path) -> None:
    class Sum(nn.Module):
        def __init__(self, split: bool) -> None:
            super().__init__()
            self.split = split

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.sin(x)
            total = y[:, :500].sum(1) + y[:, 500:].sum(1) if self.split else y.sum(1)
            return torch.cos(total)

    x = torch.randn(6, 1000, generator=torch.Generator().manual_seed(1))
    ref, target = record(tmp_path / "ref", Sum(False), x), record(tmp_path / "target", Sum(True), x)
    assert dt.align(ref, target).verdict == "match"
    exact = dt.align(ref, target, exact=True)
    assert exact.verdict == "diverged"
    assert exact.first is not None and exact.first.op in ("aten.slice", "aten.sum", "aten.add")


def test_a_tolerance_is_granted_everywhere(tmp_path: Path) -> None:
    def nudge(model: Any) -> None:
        model.head.weight.mul_(1.001)

    reference, target = net(), changed(nudge)
    assert align_models(tmp_path, reference, target, batch()).verdict == "diverged"
    assert align_models(tmp_path, reference, target, batch(), tolerance=1e-2).verdict == "match"


def test_different_inputs_are_named_as_such(tmp_path: Path) -> None:
    ref = record(tmp_path / "ref", net(), batch())
    first = dt.align(ref, record(tmp_path / "target", net(), batch() * 1.1)).first
    assert first is not None
    assert (first.label, first.module, first.op, first.evidence["input"]) == ("argument", "", None, "in[0]")


def test_a_golden_run_excuses_what_is_no_worse_than_the_reference(tmp_path: Path) -> None:
    golden = record(tmp_path / "golden", net().double(), batch().double())
    ref = record(tmp_path / "ref", net().bfloat16(), batch().bfloat16())
    target = record(tmp_path / "target", net(), batch())
    assert dt.align(ref, target, golden=golden).verdict == "match"

    wrong = record(tmp_path / "wrong", changed(no_residual), batch())
    judged = dt.align(ref, wrong, golden=golden)
    assert judged.verdict == "diverged"
    assert judged.first is not None and judged.first.evidence["golden_errors"]


# Backward ---------------------------------------------------------------------------------------------


class ScaleGradient(torch.autograd.Function):
    """The identity, whose gradient is off by a tenth."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * 1.1


def train(path: Path, model: nn.Module, x: torch.Tensor, save: str) -> Path:
    with dt.record(path, model, save=save, overwrite=True) as rec, rec.step():
        model(x).float().pow(2).mean().backward()
    return path


@SAVES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_wrong_gradient_is_found_though_the_output_is_right(
    tmp_path: Path, save: str, dtype: torch.dtype
) -> None:
    def plant(model: Any) -> None:
        norm = model.blocks[1].norm
        forward = norm.forward
        norm.forward = lambda x: ScaleGradient.apply(forward(x))

    ref = train(tmp_path / "ref", net(), batch(), save)
    clean = train(tmp_path / "clean", net().to(dtype), batch().to(dtype), save)
    wrong = train(tmp_path / "wrong", changed(plant).to(dtype), batch().to(dtype), save)
    assert dt.align(ref, clean).verdict == "match"
    alignment = dt.align(ref, wrong)
    assert alignment.verdict == "diverged" and alignment.first is not None
    assert (alignment.first.module, alignment.first.op) == ("blocks.1.norm", "aten.mul")


def test_a_gradient_that_is_zero_but_for_rounding_is_no_defect(tmp_path: Path) -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + self.bias).softmax(-1) * x  # a shift changes no softmax: its gradient cancels

    ref = train(tmp_path / "ref", Shift().double(), batch().double(), "tensors")
    target = train(tmp_path / "target", Shift(), batch(), "tensors")
    assert dt.align(ref, target).verdict == "match"


class Keys(nn.Module):
    """Attention whose keys have a bias: softmax takes no notice of it, so that its gradient is zero."""

    def __init__(self, written: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.written = written

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q(x)[:, None], self.k(x)[:, None], self.v(x)[:, None]
        if self.written:
            return ((q * 8**-0.5) @ k.transpose(-1, -2)).softmax(-1) @ v
        return F.scaled_dot_product_attention(q, k, v)


@SAVES
def test_sums_that_are_rounding_alone_on_both_sides_are_equal(save: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    fused = Keys(False)
    written = Keys(True)
    written.load_state_dict(fused.state_dict())
    x = torch.randn(3, 12, 8, generator=torch.Generator().manual_seed(1))
    ref = train(tmp_path / "ref", fused, x, save)
    target = train(tmp_path / "target", written, x, save)
    assert dt.align(ref, target).verdict == "match"
    with torch.no_grad():
        written.v.bias[3] += 0.5
    wrong = train(tmp_path / "wrong", written, x, save)
    assert dt.align(ref, wrong).verdict == "diverged"


def test_one_op_in_the_place_of_many_modules_blames_what_is_around_them(tmp_path: Path) -> None:
    """torch runs a whole encoder layer as one op only where both norms have one epsilon."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    other = changed(lambda m: setattr(m.layers[1].norm2, "eps", 1e-2), model)
    found = align_models(tmp_path, model, other, torch.randn(2, 5, 32))
    assert found.first is not None and (found.first.module, found.first.op) == ("layers.1", None)
    assert "layers.1.norm1" in found.first.evidence["candidates"]
