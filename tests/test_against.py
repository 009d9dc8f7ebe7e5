"""Live comparison: rounding and rewrites never stop a program; a mistake does, tensors at hand."""

from __future__ import annotations

import io
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from aligning import batch, changed, net
from command_line import ROOT
from torch import nn

import dispatch_trace as dt
from dispatch_trace.errors import ConfigError, DivergenceError
from dispatch_trace.live_stop import Divergence, _Debugger


def recorded(path: Path, model: nn.Module, x: torch.Tensor | None = None, **options: Any) -> dt.record:
    with torch.no_grad(), dt.record(path, model, **options) as recording:
        model(batch() if x is None else x)
    return recording


@pytest.fixture(params=["stats", "tensors"])
def ref(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    recorded(tmp_path / "ref.trace", net(), save=request.param)
    return tmp_path / "ref.trace"


def scaled(model: nn.Module) -> None:
    model.blocks[1].scale = 1.05  # type: ignore[index,union-attr]


def widened(model: nn.Module) -> None:
    model.blocks[2].down.weight[3] *= 1.5  # type: ignore[index,union-attr]


def rewritten(model: nn.Module) -> None:
    """Norms folded into the layers behind them: other weights, the same function."""
    for block in model.blocks:  # type: ignore[union-attr]
        block.up.bias += block.up.weight @ block.norm.bias
        block.up.weight *= block.norm.weight
        block.norm.weight.fill_(1)
        block.norm.bias.zero_()


def replaced(model: nn.Module) -> None:
    """Another activation in one block."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(torch.nn.functional.silu(self.up(self.norm(x)))) * self.scale
        return result

    model.blocks[1].forward = types.MethodType(forward, model.blocks[1])  # type: ignore


@pytest.mark.parametrize("level", ["op", "module"])
def test_rounding_never_stops_a_program(tmp_path: Path, ref: Path, level: str) -> None:
    recorded(tmp_path / "same", net(), level=level, against=ref, on_divergence="raise")
    low = net().to(torch.bfloat16)
    recording = recorded(
        tmp_path / "bf16", low, batch().to(torch.bfloat16), level=level, against=ref, on_divergence="raise"
    )
    assert recording.divergences == []
    counts = dt.open(tmp_path / "bf16").header["against"]["counts"]
    assert set(counts) == {"equal", "within noise"}, counts


@pytest.mark.parametrize("level", ["op", "module"])
def test_a_rewrite_that_heals_never_stops_a_program(tmp_path: Path, level: str) -> None:
    def uneven(model: nn.Module) -> None:
        for block in model.blocks:  # type: ignore[union-attr]
            block.norm.weight.copy_(torch.linspace(0.5, 2, 32))
            block.norm.bias.copy_(torch.linspace(-0.5, 0.5, 32))

    model = changed(uneven)
    recorded(tmp_path / "ref", model)
    recording = recorded(
        tmp_path / "target", changed(rewritten, model), level=level, against=tmp_path / "ref",
        on_divergence="raise",
    )  # fmt: skip
    assert recording.divergences == []
    assert dt.open(tmp_path / "target").header["against"]["counts"]["wrong"] > 3


def test_the_program_is_stopped_at_the_op(tmp_path: Path, ref: Path) -> None:
    with pytest.raises(
        DivergenceError, match=r"argument: blocks\.1 aten\.mul \(step 0\) is off by 0\.05"
    ) as raised:
        recorded(tmp_path / "target", changed(scaled), against=ref, on_divergence="raise")
    names = [entry.name for entry in raised.traceback]
    assert "forward" in names and str(raised.traceback[-1].path) not in names
    assert any(entry.path.name == "aligning.py" for entry in raised.traceback)  # the user's own line
    found = raised.value.divergence
    assert found.finding.evidence["arguments"] == {"other": [1.0, 1.05]}
    assert torch.equal(found.operands["self"] * 1.05, found.output)
    trace = dt.open(tmp_path / "target")
    ops = [(record.module, record.op) for record in trace.records if record.kind == "op"]
    assert ops[-1] == ("blocks.1", "aten.mul")  # nothing ran after it


def test_a_wrong_weight_stops_the_program_once_it_is_no_rewrite(tmp_path: Path, ref: Path) -> None:
    with pytest.raises(DivergenceError, match=r"certain since blocks\.2 returned") as raised:
        recorded(tmp_path / "target", changed(widened), against=ref, on_divergence="raise")
    finding = raised.value.divergence.finding
    assert (finding.label, finding.module, finding.op) == ("parameter", "blocks.2.down", "aten.addmm")


def test_other_ops_stop_the_program_where_they_are_read(tmp_path: Path, ref: Path) -> None:
    recording = recorded(tmp_path / "target", changed(replaced), against=ref)
    (found,) = recording.divergences
    assert (found.finding.label, found.finding.module, found.finding.op) == (
        "structure", "blocks.1", "aten.silu",
    )  # fmt: skip
    assert found.late == "blocks.1.down aten.addmm"


def test_other_inputs_are_said(tmp_path: Path, ref: Path) -> None:
    for level in ("op", "module"):
        recording = recorded(tmp_path / level, net(), batch() * 1.1, level=level, against=ref)
        assert recording.divergences, level
        assert recording.divergences[0].finding.label in ("argument", "wiring")


def test_tensors_are_kept_where_values_differ_and_around(tmp_path: Path, ref: Path) -> None:
    recorded(tmp_path / "target", changed(scaled), against=ref)
    kept = {}
    for record in dt.open(tmp_path / "target").find(kind="op"):
        for slot in record.slots:
            if slot.role == "out" and slot.content >= 0 and not record.light:
                has = record._reader.content(slot.content).has_data
                kept[record.module, record.op, record.n] = has
    assert (
        kept["blocks.1", "aten.mul", 0] and kept["blocks.1", "aten.add", 0] and kept["head", "aten.addmm", 0]
    )
    assert kept["blocks.1.down", "aten.addmm", 0]  # just before it
    assert not any(has for (module, _, _), has in kept.items() if module.startswith("blocks.0."))
    aligned = dt.align(ref, tmp_path / "target")
    assert aligned.first is not None and aligned.first.module == "blocks.1"


def test_a_callable_is_handed_what_was_found_and_its_errors_pass(tmp_path: Path, ref: Path) -> None:
    seen: list[Divergence] = []
    recorded(tmp_path / "a", changed(scaled), against=ref, on_divergence=seen.append)
    assert [d.finding.op for d in seen] == ["aten.mul"]
    assert seen[0].output is not None

    def refuse(divergence: Divergence) -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        recorded(tmp_path / "b", changed(scaled), against=ref, on_divergence=refuse)


def test_what_a_callable_computes_is_not_recorded(tmp_path: Path, ref: Path) -> None:
    recording = recorded(
        tmp_path / "a", changed(scaled), against=ref, on_divergence=lambda d: d.output.exp().sum()
    )
    assert len(recording.divergences) == 1
    assert not list(dt.open(tmp_path / "a").find(op="aten.exp"))


def test_the_debugger_stands_in_the_users_frame(
    tmp_path: Path, ref: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = "p self.scale\np divergence.output.shape\nup\np type(self).__name__\nc\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(commands))
    monkeypatch.setattr(sys, "breakpointhook", sys.__breakpointhook__)
    monkeypatch.setattr(_Debugger, "use_rawinput", 0, raising=False)
    recording = recorded(tmp_path / "target", changed(scaled), against=ref, on_divergence="break")
    said = capsys.readouterr().out
    assert "dispatch_trace: argument: blocks.1 aten.mul" in said
    assert re.search(r"aligning\.py\(\d+\)forward\(\)", said)
    assert "1.05" in said and "torch.Size([6, 32])" in said
    assert len(recording.divergences) == 1
    complete = dt.open(tmp_path / "target")
    assert complete.complete  # the program went on
    assert "divergence" not in vars(sys.modules["aligning"])


def test_options_that_cannot_be(tmp_path: Path, ref: Path) -> None:
    with pytest.raises(
        ConfigError, match="on_divergence='stop': expected 'note', 'raise', 'break' or a callable"
    ):
        dt.record(tmp_path / "a", net(), against=ref, on_divergence="stop")
    with pytest.raises(ConfigError, match="against: values are compared"):
        dt.record(tmp_path / "a", net(), against=ref, save="meta")


def test_the_python_of_live_md_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"dt": dt, "torch": torch, "reference": net(), "port": changed(scaled), "x": batch()}
    for block in re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "live.md").read_text(), re.M | re.S):
        exec(block, names)
    assert capsys.readouterr().out.startswith("argument: blocks.1 aten.mul (step 0) is off by 0.05")
