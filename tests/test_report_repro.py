"""Repros run by themselves, in a process of their own, and show the fault that the alignment named."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aligning import align_models, batch, changed, net, record
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dispatch_trace as dt
from dispatch_trace import cli
from dispatch_trace.report.repro import Repro

# No import of this package, nor of the tests: `-I` leaves the directory and the environment's paths out.
ISOLATED = [sys.executable, "-I", "-W", "error"]


# Imports what a repro may import, once, then runs each script that is named to it in a process forked off
# before anything was computed: importing torch takes longer than all that a script does.
FORKING = """
import os, runpy, sys
import safetensors.torch, torch
for line in sys.stdin:
    script, out = line.rstrip("\\n").split("\\t")
    if not os.fork():
        file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1), os.dup2(file, 2)
        sys.argv = [script]
        runpy.run_path(script, run_name="__main__")  # leaves by sys.exit
        sys.exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""
RunScript = Callable[[Path], tuple[int, str]]


@pytest.fixture(scope="module")
def run_script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunScript]:
    """Runs a script in a process of its own: its exit status and what it printed."""
    out = tmp_path_factory.mktemp("printed") / "out.txt"
    with subprocess.Popen(
        [*ISOLATED, "-c", FORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as forking:
        assert forking.stdin is not None and forking.stdout is not None
        asked, answers = forking.stdin, forking.stdout

        def run(script: Path) -> tuple[int, str]:
            print(script, out, sep="\t", file=asked, flush=True)
            status, printed = answers.readline(), out.read_text()
            assert status in ("0\n", "1\n") and "Traceback" not in printed and "Warning" not in printed, (
                printed
            )
            return int(status), printed

        yield run
        asked.close()


def errors(printed: str) -> dict[tuple[str, str], float]:
    rows = re.findall(r"^(\w+) +against (\w+) +relative L2 +(\S+)", printed, re.MULTILINE)
    return {(a, b): float(value) for a, b, value in rows}


def forward_of(body: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        block = model.blocks[1]
        block.forward = lambda x: body(block, x)

    return change


def scale_weight(model: Any) -> None:
    model.blocks[1].down.weight.mul_(1.01)


def change_eps(model: Any) -> None:
    model.blocks[1].norm.eps = 1e-3


GELU = nn.functional.gelu
without_gelu = forward_of(lambda b, x: x + b.down(b.up(b.norm(x))) * b.scale)
with_relu = forward_of(lambda b, x: x + b.down(torch.relu(GELU(b.up(b.norm(x))))) * b.scale)
residual_of_norm = forward_of(lambda b, x: b.norm(x) + b.down(GELU(b.up(b.norm(x)))) * b.scale)


class FaultyKernel(TorchDispatchMode):
    """The third `addmm` of a run returns something else."""

    def __init__(self, fault: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self._fault = fault
        self._left = 3

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.addmm.default:
            self._left -= 1
            if not self._left:
                self._fault(out)
        return out


@pytest.mark.parametrize(
    ("change", "label", "op", "save"),
    [
        (scale_weight, "parameter", "aten.addmm", "tensors"),
        (change_eps, "argument", "aten.native_layer_norm", "leaves"),
        (without_gelu, "structure", "aten.gelu", "tensors"),
        (with_relu, "structure", "aten.relu", "leaves"),
        (residual_of_norm, "wiring", "aten.add", "tensors"),
    ],
    ids=["parameter", "argument", "missing-op", "extra-op", "wiring"],
)
def test_another_program_shows_against_the_reference_only(
    tmp_path: Path, run_script: RunScript, change: Callable[[Any], Any], label: str, op: str, save: str
) -> None:
    alignment = align_models(tmp_path, net(), changed(change), batch(), save=save)
    assert alignment.first is not None and (alignment.first.label, alignment.first.op) == (label, op)
    repro = alignment.repro(tmp_path / "repro")
    assert sorted(p.name for p in (tmp_path / "repro").iterdir()) == ["repro.py", "tensors.safetensors"]
    text = repro.script.read_text()
    assert len(text.splitlines()) < 40
    assert not re.search(r"import .*dispatch_trace", text)
    status, printed = run_script(repro.script)
    found = errors(printed)
    assert status == 1, printed
    assert found["recorded", "rerun"] == 0.0  # the same kernels, on the same inputs
    assert found["recorded", "float64"] < 1e-6
    assert found["recorded", "reference"] > 1e-4
    assert "not what the reference has" in printed


@pytest.mark.parametrize(
    "fault",
    [lambda out: out.mul_(1.001), lambda out: out[0, 0].add_(1.0), lambda out: out[2, 1].fill_(torch.nan)],
    ids=["scaled", "one-element", "nan"],
)
def test_a_faulty_kernel_shows_against_its_own_rerun(
    tmp_path: Path, run_script: RunScript, fault: Callable[[torch.Tensor], object]
) -> None:
    ref = record(tmp_path / "ref", net(), batch())
    with FaultyKernel(fault):
        target = record(tmp_path / "target", net(), batch())
    alignment = dt.align(ref, target)
    assert alignment.first is not None and alignment.first.op == "aten.addmm"
    status, printed = run_script(alignment.repro(tmp_path / "repro").script)
    found = errors(printed)
    assert status == 1 and "badly computed" in printed
    assert found["recorded", "float64"] > 1e-4
    assert found["rerun", "float64"] < 1e-6
    assert found["rerun", "reference"] < 1e-6


def test_a_value_within_noise_exits_with_0(tmp_path: Path, run_script: RunScript) -> None:
    alignment = align_models(tmp_path, net(), changed(scale_weight), batch())
    repro = alignment.repro(tmp_path / "repro")
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(repro.tensors, "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        metadata = file.metadata()
    save_file({**stored, "reference": stored["recorded"].clone()}, repro.tensors, metadata=metadata)
    status, printed = run_script(repro.script)
    assert status == 0 and "no fault above noise" in printed


def test_in_place_ops_and_views_are_replayed_as_they_alias(tmp_path: Path, run_script: RunScript) -> None:
    class InPlace(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2.0
            y[:, :4].mul_(self.factor)
            return y.t().contiguous() + 1.0

    alignment = align_models(tmp_path, InPlace(3.0), InPlace(3.5), batch())
    assert alignment.first is not None and alignment.first.op == "aten.mul"
    status, printed = run_script(alignment.repro(tmp_path / "repro").script)
    assert status == 1 and errors(printed)["recorded", "rerun"] == 0.0


def test_ops_that_cannot_run_again_take_their_recorded_results_and_this_is_said(
    tmp_path: Path, run_script: RunScript
) -> None:
    class Noisy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.bernoulli(torch.sigmoid(x)) * x

    torch.manual_seed(0)
    ref = record(tmp_path / "ref", Noisy(), batch())
    target = record(tmp_path / "target", Noisy(), batch())
    alignment = dt.align(ref, target)
    assert alignment.findings
    repro = alignment.repro(tmp_path / "repro")
    assert repro.taken == {"aten.bernoulli.default": "random"}
    assert alignment.findings[0].evidence["taken"] == repro.taken
    assert "recorded results stand in for aten.bernoulli.default: random" in str(repro)
    assert "Recorded results stand in for aten.bernoulli.default" in repro.script.read_text()
    assert run_script(repro.script)[0] == 1


def test_without_a_finding_nothing_is_written(tmp_path: Path) -> None:
    alignment = align_models(tmp_path, net(), net(), batch())
    with pytest.raises(dt.NotExecutableError, match="no finding: there is nothing to replay"):
        alignment.repro(tmp_path / "repro")
    assert not (tmp_path / "repro").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"save": "stats"}, "the trace does not hold"), ({"level": "module"}, "holds no ops of this module")],
)
def test_a_trace_that_holds_too_little_says_so(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    ref = record(tmp_path / "ref", net(), batch(), **options)
    target = record(tmp_path / "target", changed(scale_weight), batch(), **options)
    alignment = dt.align(ref, target)
    with pytest.raises(dt.NotExecutableError, match=message):
        alignment.repro(tmp_path / "repro")
    assert not (tmp_path / "repro").exists()


def test_the_command_line_writes_a_repro_and_keeps_the_status_of_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    align_models(tmp_path, net(), changed(change_eps), batch())
    paths = [str(tmp_path / "ref-tensors"), str(tmp_path / "target-tensors")]
    repro, facts, none = (str(tmp_path / name) for name in ("repro", "out.json", "none"))
    assert cli.main(["align", *paths, "--repro", repro, "--json", facts]) == 1
    assert "replays aten.native_layer_norm.default" in capsys.readouterr().out
    # As whoever it was sent to does: a fresh interpreter, nothing imported for it.
    done = subprocess.run([*ISOLATED, f"{repro}/repro.py"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and not done.stderr, done.stderr
    assert json.loads((tmp_path / "out.json").read_text())["verdict"] == "diverged"
    assert cli.main(["align", paths[0], paths[0], "--repro", none]) == 0
    assert "not written: the alignment has no finding" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


def test_the_summary_of_a_repro_names_file_and_ops() -> None:
    repro = Repro(
        script=Path("d/repro.py"), tensors=Path("d/t"), ops=["aten.mm.default"], taken={}, compared=[]
    )
    assert str(repro) == f"{Path('d/repro.py')}: replays aten.mm.default"
