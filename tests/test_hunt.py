"""A hunt narrows by itself, stays in its budget, and says plainly what kept it from an answer."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from aligning import batch, changed, net
from command_line import ROOT, environment
from torch import nn

import dispatch_trace as dt
from dispatch_trace.errors import ConfigError, TraceExistsError
from dispatch_trace.programs import size_on_disk


def forward(model: nn.Module, x: torch.Tensor | None = None, *, times: int = 1) -> Callable[[], None]:
    def call() -> None:
        with torch.no_grad():
            for step in range(times):
                model((batch() if x is None else x) + step)

    return call


def scaled(model: nn.Module) -> None:
    model.blocks[1].scale = 1.05  # type: ignore[index,union-attr]


def widened(model: nn.Module) -> None:
    with torch.no_grad():
        model.blocks[2].down.weight[3] *= 1.5  # type: ignore[index,union-attr]


def test_a_hunt_ends_with_the_op_its_page_and_its_script(tmp_path: Path) -> None:
    lines: list[str] = []
    found = dt.hunt(forward(net()), forward(changed(scaled)), folder=tmp_path / "hunt", progress=lines.append)
    assert found.verdict == "diverged"
    assert found.first is not None
    assert (found.first.module, found.first.op) == ("blocks.1", "aten.mul")
    assert found.first.evidence["arguments"] == {"other": [1.0, 1.05]}
    assert [each.looked_at for each in found.rounds] == ["modules", "ops", "tensors"]
    assert found.rounds[1].modules == ("blocks.1",)
    assert found.num_runs == 6
    assert found.report is not None and "blocks.1" in found.report.read_text()
    assert found.repro is not None and (found.repro / "repro.py").exists()
    assert "round 2: ops of blocks.1: running the target" in lines
    first, *_ = found.table().splitlines()
    assert first.startswith("HUNT  diverged after 3 rounds, 6 runs")
    written = json.loads(json.dumps(found.to_json(tmp_path / "hunt.json")))
    assert written["rounds"][2]["looked_at"] == "tensors"
    assert written["alignment"]["verdict"] == "diverged"


def test_tensors_are_kept_of_the_suspicious_module_alone(tmp_path: Path) -> None:
    found = dt.hunt(forward(net()), forward(changed(widened)), folder=tmp_path / "hunt")
    assert found.first is not None
    assert (found.first.label, found.first.module) == ("parameter", "blocks.2.down")
    last = dt.open(found.rounds[-1].runs[1].path)
    assert {record.module for record in last.records if record.kind == "op"} <= {
        "blocks.2",
        "blocks.2.norm",
        "blocks.2.up",
        "blocks.2.down",
    }


def test_noise_of_another_precision_is_no_difference(tmp_path: Path) -> None:
    target = net().to(torch.bfloat16)
    found = dt.hunt(forward(net()), forward(target, batch().to(torch.bfloat16)), folder=tmp_path / "hunt")
    assert found.verdict == "match", found.table()
    assert found.rounds[-1].looked_at == "leaves"  # both programs were run again in float64


def test_a_mistake_behind_noise_is_found_in_the_module_alone(tmp_path: Path) -> None:
    target = changed(scaled).to(torch.bfloat16)
    found = dt.hunt(forward(net()), forward(target, batch().to(torch.bfloat16)), folder=tmp_path / "hunt")
    assert found.first is not None, found.table()
    assert (found.first.module, found.first.op) == ("blocks.1", "aten.mul")


def test_equal_programs_end_the_hunt_after_one_round(tmp_path: Path) -> None:
    found = dt.hunt(forward(net()), forward(net()), folder=tmp_path / "hunt")
    assert (found.verdict, found.num_runs) == ("match", 2)
    assert "equal bit for bit: there is nothing to narrow down" in found.table()


def test_only_the_step_that_is_wrong_is_looked_into(tmp_path: Path) -> None:
    model = changed(scaled)
    sound, calls = net(), []

    def target() -> None:
        calls.append(0)
        with torch.no_grad():
            for step in range(3):
                (model if step == 2 else sound)(batch() + step)

    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.at = net(), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.net.blocks[1].scale = 1.05 if self.at == 2 else 1.0  # type: ignore[index,union-attr]
            self.at = (self.at + 1) % 3
            result: torch.Tensor = self.net(x)
            return result

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.net(x)
            return result

    found = dt.hunt(
        forward(Plain().eval(), times=3), forward(Switch().eval(), times=3), folder=tmp_path / "hunt"
    )
    assert found.first is not None
    assert (found.first.module, found.first.step) == ("net.blocks.1", 2)
    for run in found.rounds[-1].runs:
        assert {record.step for record in dt.open(run.path).records if record.kind != "param"} == {2}


def test_a_program_that_differs_from_run_to_run_is_named_before_anything_else(tmp_path: Path) -> None:
    model, number = net(), [0]

    def target() -> None:
        number[0] += 1
        with torch.no_grad():
            model(batch() * (1 + 0.1 * number[0]))

    found = dt.hunt(forward(net()), target, folder=tmp_path / "hunt")
    assert found.verdict == "inconclusive"
    assert "two runs of the target differ, first in in[0] of blocks.0" in found.reasons[0]
    assert "cannot be narrowed down. Seed it" in found.reasons[0]


def test_dropout_draws_the_same_in_every_run(tmp_path: Path) -> None:
    def noisy(scale: float) -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 8))
        with torch.no_grad():
            layers[2].weight *= scale
        return layers

    state = torch.get_rng_state()
    found = dt.hunt(forward(noisy(1.0)), forward(noisy(1.0)), folder=tmp_path / "same")
    assert found.verdict == "match"
    other = dt.hunt(forward(noisy(1.0)), forward(noisy(1.2)), folder=tmp_path / "other")
    assert other.first is not None and other.first.module == "2"
    torch.manual_seed(0)
    assert not torch.equal(state, torch.get_rng_state())


def test_a_target_that_crashes_is_compared_as_far_as_it_came(tmp_path: Path) -> None:
    target = changed(scaled)

    class Crash(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no such token")

    target.head = Crash()
    found = dt.hunt(forward(net()), forward(target), folder=tmp_path / "hunt")
    assert "the target ended with ValueError: no such token" in found.table()
    assert found.first is not None and found.first.module == "blocks.1", found.table()


def test_a_reference_that_crashes_ends_the_hunt(tmp_path: Path) -> None:
    def ref() -> None:
        raise ValueError("no weights")

    found = dt.hunt(ref, forward(net()), folder=tmp_path / "hunt")
    assert (found.verdict, found.alignment) == ("inconclusive", None)
    assert found.reasons == ["the reference ended with ValueError: no weights"]


def test_a_budget_that_is_too_small_is_said(tmp_path: Path) -> None:
    found = dt.hunt(forward(net()), forward(changed(scaled)), folder=tmp_path / "hunt", budget=4000)
    assert found.verdict == "inconclusive"
    assert "the budget of 3.9 KB is too small: recording the reference had written" in found.reasons[0]


def test_without_room_for_tensors_the_statistics_decide(tmp_path: Path) -> None:
    whole = dt.hunt(forward(net()), forward(changed(scaled)), folder=tmp_path / "whole")
    budget = sum(each.num_bytes for each in whole.rounds[:2]) + 8000
    found = dt.hunt(forward(net()), forward(changed(scaled)), folder=tmp_path / "hunt", budget=budget)
    assert found.first is not None and found.first.module == "blocks.1"
    assert [each.looked_at for each in found.rounds] == ["modules", "ops"]
    assert "no data was kept" in found.table()
    assert found.peak_bytes <= budget
    assert sum(size_on_disk(run.path) for each in found.rounds for run in each.runs) <= budget


@pytest.mark.parametrize("budget", [0, -1, True, 1.5])
def test_a_budget_is_a_number_of_bytes(tmp_path: Path, budget: int) -> None:
    with pytest.raises(ConfigError, match="expected a number of bytes above 0"):
        dt.hunt(forward(net()), forward(net()), folder=tmp_path, budget=budget)


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(TraceExistsError, match="is not empty; choose another"):
        dt.hunt(forward(net()), forward(net()), folder=tmp_path, overwrite=True)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


SCRIPT = """
import sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh()).eval()
if "wrong" in sys.argv:
    with torch.no_grad():
        model[2].bias += 0.1
with torch.no_grad():
    model(torch.randn(4, 16))
if "crash" in sys.argv:
    raise SystemExit("out of luck")
"""


def run_hunt(folder: Path, ref: str, target: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    command = ["-m", "dispatch_trace", "hunt", "--ref", f"script.py {ref}", "--target", f"script.py {target}"]
    return subprocess.run(
        [sys.executable, *command, *options],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(OMP_NUM_THREADS="1"),
        timeout=300,
    )


def test_the_command_says_when_the_reference_crashes(tmp_path: Path) -> None:
    found = run_hunt(tmp_path, "right crash", "right")
    assert found.returncode == 3, found.stdout + found.stderr
    assert "because   the reference ended with exit status 1: out of luck (see hunt/1-modules/ref.log)" in (
        found.stdout
    )
    assert "round 1: all modules: running the reference" in found.stderr


@pytest.mark.slow
def test_the_command_hunts_in_scripts_that_nobody_edits(tmp_path: Path) -> None:
    found = run_hunt(tmp_path, "right", "wrong crash", "--budget", "20MB", "--json", "hunt.json")
    assert found.returncode == 1, found.stdout + found.stderr
    assert "parameter" in found.stdout and "bias" in found.stdout
    assert "the target ended with exit status 1: out of luck" in found.stdout
    assert "round 1: all modules: running the reference" in found.stderr
    assert json.loads((tmp_path / "hunt.json").read_text())["num_runs"] == 6
    assert (tmp_path / "hunt" / "report.html").exists()


def test_the_python_of_hunt_md_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"dt": dt, "reference": net(), "port": changed(scaled), "x": batch()}
    for block in re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "hunt.md").read_text(), re.M | re.S):
        exec(block, names)
    assert names["found"].verdict == "diverged"  # type: ignore[attr-defined]
