"""Twins: both programs in float64, and what is said where estimates see only noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from aligning import batch, changed, net, record
from torch import nn

import dispatch_trace as dt
from dispatch_trace.judge.twin_values import distance, fingerprint, permutations, similar


def aligned(
    tmp_path: Path, ref: nn.Module, target: nn.Module, *, save: str = "leaves", **options: Any
) -> Any:
    x = batch()
    y = x.to(next(target.parameters()).dtype)
    record(tmp_path / "ref", ref, x, save=save, overwrite=True)
    record(tmp_path / "target", target, y, save=save, overwrite=True)
    return dt.align(tmp_path / "ref", tmp_path / "target", **options)


def in_bfloat16(change: Callable[[Any], Any] = lambda model: None) -> nn.Module:
    return changed(change).to(torch.bfloat16)


def one_percent(model: Any) -> None:
    model.blocks[1].up.weight *= 1.01


def one_element(model: Any) -> None:
    model.blocks[1].up.weight[3, 5] *= 1.5


def other_eps(model: Any) -> None:
    model.blocks[2].norm.eps = 1e-4


def tanh_gelu(model: Any) -> None:
    block = model.blocks[0]
    block.forward = lambda x: (
        x + block.down(F.gelu(block.up(block.norm(x)), approximate="tanh")) * block.scale
    )


# What estimates cannot see ---------------------------------------------------------------------------


def test_a_bfloat16_target_is_the_float32_program(tmp_path: Path) -> None:
    found = aligned(tmp_path, net(), in_bfloat16())
    assert found.verdict == "match", found.reasons
    assert found.first is None


@pytest.mark.parametrize(
    ("change", "label", "module", "op"),
    [
        (one_percent, "parameter", "blocks.1.up", "aten.addmm"),
        (one_element, "parameter", "blocks.1.up", "aten.addmm"),
        (other_eps, "argument", "blocks.2.norm", "aten.native_layer_norm"),
        (tanh_gelu, "argument", "blocks.0", "aten.gelu"),
    ],
)
def test_a_change_below_bfloat16_noise_is_named(
    tmp_path: Path, change: Callable[[Any], Any], label: str, module: str, op: str
) -> None:
    found = aligned(tmp_path, net(), in_bfloat16(change))
    assert found.verdict == "diverged"
    assert (found.first.label, found.first.module, found.first.op) == (label, module, op)
    assert found.first.judge == found.first.evidence["judge"] == "twins"
    without = dt.align(tmp_path / "ref", tmp_path / "target", twins=False)
    assert without.verdict != "diverged" or label == "parameter", "the estimates see it: no test of twins"
    assert all(f.judge == "estimates" for f in without.findings)


def test_an_argument_that_changed_is_named_with_both_values(tmp_path: Path) -> None:
    found = aligned(tmp_path, net(), in_bfloat16(other_eps))
    assert found.first.evidence["arguments"] == {"eps": [1e-5, 1e-4]}


def test_a_weight_that_changed_in_one_element_differs_only_there(tmp_path: Path) -> None:
    found = aligned(tmp_path, net(), in_bfloat16(one_element))
    weight = net().blocks[1].up.weight.detach()
    expected = 0.5 * abs(float(weight[3, 5])) / float(weight.norm())
    assert found.first.evidence["path"] == "blocks.1.up.weight"
    assert found.first.evidence["error"] == pytest.approx(expected, rel=0.2)


# What is the estimates' to say -------------------------------------------------------------------------


def test_a_precision_fault_stands_though_the_program_is_the_same(tmp_path: Path) -> None:
    def coarse(model: Any) -> None:
        block = model.blocks[1]

        def forward(x: torch.Tensor) -> torch.Tensor:
            total = torch.zeros(x.shape[0], dtype=torch.bfloat16)
            for column in x.unbind(-1):  # a sum that loses its small terms
                total = total + column.to(torch.bfloat16)
            return x + total.float()[:, None]

        block.forward = forward

    def fine(model: Any) -> None:
        block = model.blocks[1]

        def forward(x: torch.Tensor) -> torch.Tensor:
            total = torch.zeros(x.shape[0])
            for column in x.unbind(-1):
                total = total + column
            return x + total[:, None]

        block.forward = forward

    found = aligned(tmp_path, changed(fine), changed(coarse))
    assert found.verdict != "match"
    assert not any(f.judge == "twins" for f in found.findings if f.fatal)


def test_a_faulty_kernel_is_no_other_program(tmp_path: Path) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Faulty(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            return result * 1.01 if func is torch.ops.aten.gelu.default else result

    x = batch()
    record(tmp_path / "ref", net(), x, save="leaves")
    with Faulty():
        record(tmp_path / "target", net(), x, save="leaves")
    found = dt.align(tmp_path / "ref", tmp_path / "target")
    assert found.verdict == "diverged"
    assert (found.first.label, found.first.op) == ("introduced", "aten.gelu")
    assert found.first.judge == "local replay"


# Where twins keep out ----------------------------------------------------------------------------------


def test_traces_without_data_are_judged_by_estimates_and_say_so_when_asked(tmp_path: Path) -> None:
    found = aligned(tmp_path, net(), changed(one_percent), save="stats", twins=True)
    assert all(f.judge == "estimates" for f in found.findings)
    assert any("estimates alone" in n and "save" in n for n in found.notices), found.notices


def test_exact_mode_is_not_for_twins(tmp_path: Path) -> None:
    found = aligned(tmp_path, net(), changed(one_percent), exact=True)
    assert found.first.judge == "estimates"


def test_what_had_to_come_from_the_recording_is_held_against_nobody(tmp_path: Path) -> None:
    class Sorted(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.fc = nn.Linear(32, 8).to(dtype)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(torch.ops.twins_test.halve(x))

    with torch.library._scoped_library("twins_test", "DEF") as library:
        library.define("halve(Tensor x) -> Tensor")
        library.impl("halve", lambda x: x * 0.5, "CompositeExplicitAutograd")
        for name, dtype in (("ref", torch.float32), ("target", torch.bfloat16)):
            record(tmp_path / name, Sorted(dtype), batch().to(dtype), save="leaves")
    found = dt.align(tmp_path / "ref", tmp_path / "target")  # the op is gone
    assert found.verdict != "diverged", found.first
    assert any("estimates alone" in notice for notice in found.notices)


# Leaves ------------------------------------------------------------------------------------------------


class Table(nn.Module):
    """Angles by position: computed where they are used, or looked up in a table."""

    def __init__(self, kept: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(32, 8)
        if kept:
            self.register_buffer("table", self.angles().cos())

    def angles(self) -> torch.Tensor:
        frequency = 10000.0 ** (-torch.arange(0, 32).float() / 32)
        return torch.arange(1000, 1006).float()[:, None] * frequency

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = self.table if hasattr(self, "table") else self.angles().cos()
        return self.fc(x * table)


@pytest.mark.parametrize("kept", [(False, True), (True, False)])
def test_a_table_may_stand_for_what_the_other_side_computes(tmp_path: Path, kept: tuple[bool, bool]) -> None:
    found = aligned(tmp_path, Table(kept[0]), Table(kept[1]))
    assert found.verdict == "match", (found.first, found.reasons)


# Fingerprints ------------------------------------------------------------------------------------------


def test_fingerprints_tell_differences_of_any_size() -> None:
    a = torch.randn(300, 700, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for size in (1e-12, 1e-6, 1e-2):
        noise = torch.randn(300, 700, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        b = a + size * noise
        assert distance(fingerprint(a), fingerprint(b)) == pytest.approx(size, rel=0.2)
    assert distance(fingerprint(a), fingerprint(a.clone())) == 0.0


def test_fingerprints_compare_masks_by_place() -> None:
    a = torch.zeros(64, 64, dtype=torch.float64)
    a[0, 3] = -math.inf
    b, c = a.clone(), a.clone()
    b[0, 3] = torch.finfo(torch.float32).min  # a mask, written otherwise
    c[0, 4], c[0, 3] = -math.inf, 0.0
    assert distance(fingerprint(a), fingerprint(b)) == 0.0
    assert distance(fingerprint(a), fingerprint(c)) == math.inf


def test_a_permuted_value_is_recognised() -> None:
    a = torch.randn(6, 20, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    b = a.permute(2, 0, 1).contiguous()
    mine, theirs = fingerprint(b), fingerprint(a)
    assert distance(theirs, mine) > 0.1 and similar(theirs, mine, 1e-9)
    assert [how for how, turned in permutations(b) if distance(theirs, turned) < 1e-9] == [
        "permuted (1, 2, 0)"
    ]


# Casts -------------------------------------------------------------------------------------------------


def cast_inputs(*blocks: int) -> Callable[[Any], Any]:
    """The inputs of these blocks' projections pass through bfloat16, though everything around is float32."""

    def change(model: Any) -> None:
        for number in blocks:
            for linear in (model.blocks[number].up, model.blocks[number].down):
                forward = linear.forward
                linear.forward = lambda x, forward=forward: forward(x.bfloat16().float())

    return change


def test_one_undeclared_cast_is_a_fault_of_its_op(tmp_path: Path) -> None:
    def change(model: Any) -> None:
        up = model.blocks[1].up
        forward = up.forward
        up.forward = lambda x: forward(x.bfloat16().float())

    found = aligned(tmp_path, net(), changed(change))
    assert found.verdict == "diverged"
    assert (found.first.label, found.first.module, found.first.op) == (
        "introduced",
        "blocks.1.up",
        "aten._to_copy",
    )
    assert found.first.judge == "estimates" and found.first.evidence["output_error"] > 1e-5


def test_casting_most_products_is_how_the_target_computes(tmp_path: Path) -> None:
    found = aligned(tmp_path, net(), changed(cast_inputs(0, 1, 2)))
    assert found.verdict == "inconclusive"
    assert "undeclared cast" in " ".join(found.reasons)


def test_a_constant_rounded_through_a_lower_precision_stays_on_the_list(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.fc = nn.Linear(32, 8)
            self.register_buffer("scale", torch.full((32,), 1.2345).to(dtype))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x * self.scale)

    found = aligned(tmp_path, Scaled(torch.float32), Scaled(torch.bfloat16))
    listed = [f for f in found.findings if "rounded to bfloat16" in str(f.evidence.get("healed"))]
    named = [f.op for f in found.findings]
    assert listed or "aten.mul" in named, found.findings
    assert not any(f.fatal and f.judge == "twins" for f in found.findings)
