"""Several runs: a measured floor, what does not repeat is said first, and a golden run has its say or not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from aligning import batch, changed, net, record
from torch.utils._python_dispatch import TorchDispatchMode

import dispatch_trace as dt
from dispatch_trace import cli


class Unsteady(TorchDispatchMode):
    """Every `addmm` of a run has an element one unit off, as where sums are taken in any order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.addmm.default:
            out[0, 0] = torch.nextafter(out[0, 0], out[0, 1])
        return out


def unsteady(path: Path) -> Path:
    with Unsteady():
        return record(path, net(), batch())


def varied(path: Path, noise: float, model: Any = None) -> Path:
    """A run on inputs that are off by this share."""
    signs = torch.randn(batch().shape, generator=torch.Generator().manual_seed(3)).sign()
    return record(path, net() if model is None else model, batch() * (1 + noise * signs))


def test_what_runs_of_the_reference_differ_by_is_a_floor_of_every_band(tmp_path: Path) -> None:
    runs = [varied(tmp_path / f"run{i}", i * 1e-5) for i in range(3)]
    target = varied(tmp_path / "target", 1.5e-5)
    alone = dt.align(runs[0], target)
    assert alone.first is not None and alone.first.label == "argument"  # it got other inputs
    together = dt.align(runs[0], target, refs=runs[1:])
    assert together.verdict == "match"
    assert dt.align(runs, target).verdict == "match"
    assert any(n.startswith("3 runs of the reference: a measured floor at") for n in together.notices)


def test_the_floor_is_no_excuse_for_more_and_stands_in_the_evidence(tmp_path: Path) -> None:
    runs = [varied(tmp_path / f"run{i}", i * 1e-5) for i in range(3)]
    target = varied(tmp_path / "target", 0.5e-5, changed(lambda m: setattr(m.blocks[1].norm, "eps", 1e-2)))
    for twins in (None, False):
        first = dt.align(runs[0], target, refs=runs[1:], twins=twins).first
        assert first is not None and (first.module, first.op) == ("blocks.1.norm", "aten.native_layer_norm")
    assert first is not None and first.evidence["error"] > 10 * first.evidence["floor"]
    # A quantile of the two errors, not the maximum.
    theirs = [
        next(
            p.error
            for p in dt.align(runs[0], run, twins=False).pairs
            if p.target and p.target.seq == first.seq
        )
        for run in runs[1:]
    ]
    assert min(theirs) < first.evidence["floor"] < max(theirs)


def test_one_unit_of_noise_in_the_input_measures_how_noise_grows(tmp_path: Path) -> None:
    x = batch()
    ref = record(tmp_path / "ref", net(), x)
    noisy = record(tmp_path / "noisy", net(), torch.nextafter(x, torch.full_like(x, torch.inf)))
    target = record(tmp_path / "target", net(), torch.nextafter(x, torch.full_like(x, -torch.inf)))
    assert dt.align(ref, target, refs=[noisy]).verdict == "match"


def test_runs_of_one_program_that_differ_are_named_before_anything_else(tmp_path: Path) -> None:
    runs = [record(tmp_path / "run0", net(), batch()), unsteady(tmp_path / "run1")]
    same = record(tmp_path / "same", net(), batch())
    found = dt.align(runs[0], same, refs=[runs[1]])
    assert found.notices[0] == (
        "nondeterministic: run 2 of the reference is the same program on the same leaves, and aten.addmm in "
        "blocks.0.up (step 0) gives another result"
    )
    assert found.verdict == "match" and not found.findings
    two = dt.align(runs[0], runs[1])
    assert two.notices[0].startswith("nondeterministic: the target is the same program on the same leaves")
    finding = two.findings[0]
    assert (finding.label, finding.module, finding.op) == ("nondeterministic", "blocks.0.up", "aten.addmm")
    assert two.verdict == "match" and not finding.fatal


def test_other_weights_inputs_or_threads_are_no_nondeterminism(tmp_path: Path) -> None:
    ref = record(tmp_path / "ref", net(), batch())
    others = [
        record(tmp_path / "weights", changed(lambda m: m.head.weight.mul_(1.01)), batch()),
        record(tmp_path / "inputs", net(), batch() + 1),
        record(tmp_path / "eps", changed(lambda m: setattr(m.blocks[0].norm, "eps", 1e-3)), batch()),
        record(tmp_path / "again", net(), batch()),
    ]
    for other in others:
        alignment = dt.align(ref, other)
        assert not any("nondeterministic" in notice for notice in alignment.notices)
        assert not any(finding.label == "nondeterministic" for finding in alignment.findings)


def test_a_golden_run_in_lower_precision_than_the_reference_is_left_out(tmp_path: Path) -> None:
    ref = record(tmp_path / "ref", net(), batch())
    target = record(tmp_path / "target", changed(lambda m: m.head.weight.mul_(1.01)), batch())
    half = copy.deepcopy(net()).bfloat16()
    golden = record(tmp_path / "golden", half, batch().bfloat16())
    alignment = dt.align(ref, target, golden=golden)
    assert alignment.verdict == "diverged"  # by bfloat16's own error the target would be near enough
    assert any(
        n.startswith("the golden run is in bfloat16, coarser than the reference's float32")
        and n.endswith("it says nothing about the target and was left out")
        for n in alignment.notices
    )
    wide = record(tmp_path / "wide", copy.deepcopy(net()).double(), batch().double())
    assert not any("left out" in n for n in dt.align(ref, target, golden=wide).notices)


def test_more_reference_runs_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [varied(tmp_path / f"run{i}", i * 1e-5) for i in range(2)]
    target = varied(tmp_path / "target", 0.5e-5)
    assert cli.main(["align", str(runs[0]), str(target)]) == 1
    assert "runs of the reference" not in capsys.readouterr().out
    assert cli.main(["align", str(runs[0]), str(target), "--ref-run", str(runs[1])]) == 0
    assert "2 runs of the reference" in capsys.readouterr().out


def test_no_reference_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(dt.ConfigError, match="expected a trace or several, got none"):
        dt.align([], tmp_path / "none")
