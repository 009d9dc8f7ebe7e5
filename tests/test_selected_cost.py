"""What is not recorded costs nothing: modules not selected, steps that are not wanted, no recorder at all."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dispatch_trace as dt
from dispatch_trace.store.reader import open_ranks

depth = torch._C._len_torch_dispatch_stack


class Stack(nn.Module):
    """Many small blocks, each of which says how many dispatch modes it ran under."""

    def __init__(self, num: int = 60) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(num))
        self.depths: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.depths.append(depth())
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("save", ["meta", "stats", "tensors"])
@pytest.mark.parametrize("level", ["op", "module"])
def test_only_calls_around_the_selected_module_are_followed(tmp_path: Path, level: str, save: str) -> None:
    model = Stack()
    with (
        torch.no_grad(),
        dt.record(tmp_path / "t", model, level=level, save=save, select="blocks.3.0") as rec,
    ):
        modules = rec._modules
        assert modules is not None
        assert len(modules._skipped) == 59 * 3 + 1  # 59 blocks of three, and one Tanh
        for _ in range(2):
            model(torch.ones(2, 4))
        assert rec._tracer is not None and rec._tracer.num_calls <= 2 * 3
    (rank,) = open_ranks(tmp_path / "t")
    assert {r.module for r in rank.records() if r.kind != "param"} == {"blocks.3.0"}
    assert [r.call for r in rank.records() if r.kind == "module"] == [0, 0]


def test_the_gradient_of_what_was_not_selected_belongs_to_nobody(tmp_path: Path) -> None:
    model = Stack(4)
    with dt.record(tmp_path / "t", model, save="meta", select="blocks.1"):
        model(torch.ones(2, 4)).sum().backward()
    (rank,) = open_ranks(tmp_path / "t")
    assert {r.module for r in rank.records()} == {"blocks.1", "blocks.1.0", "blocks.1.1"}
    assert {r.grad_phase for r in rank.records()} == {"fwd", "bwd"}


@pytest.mark.parametrize("save", ["meta", "stats"])
def test_steps_that_are_not_wanted_run_without_the_mode(tmp_path: Path, save: str) -> None:
    model = Stack(2)
    with torch.no_grad(), dt.record(tmp_path / "t", model, save=save, steps={1, 3}):
        outside = depth()
        for _ in range(5):
            model(torch.ones(1, 4))
        assert depth() == outside == 1
    assert depth() == 0
    assert model.depths == [0, 1, 0, 1, 0]
    (rank,) = open_ranks(tmp_path / "t")
    assert {r.step for r in rank.records()} == {1, 3}
    assert [r.call for r in rank.records() if r.module == "blocks.0.0" and r.kind == "module"] == [0, 0]


def test_a_mode_of_somebody_else_above_ours_is_left_in_place(tmp_path: Path) -> None:
    class Other(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    model = Stack(1)
    with torch.no_grad(), dt.record(tmp_path / "t", model, save="stats", steps={1}), Other():  # type: ignore[no-untyped-call]
        for _ in range(3):
            model(torch.ones(1, 4))
    assert model.depths == [2, 2, 2]
    assert depth() == 0


def test_an_exception_in_a_step_that_is_not_wanted_puts_the_mode_back(tmp_path: Path) -> None:
    model = Stack(1)
    with torch.no_grad(), dt.record(tmp_path / "t", model, steps={1}):
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 5))
        assert depth() == 1
        model(torch.ones(1, 4))
    (rank,) = open_ranks(tmp_path / "t")
    assert {r.step for r in rank.records()} == {1}


class Cache(nn.Module):
    """Writes into a buffer that outlives its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.register_buffer("total", torch.zeros(2))
        self.state = torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(1)
        self.state.add_(x)
        return self.lin(self.state) + self.total


@pytest.mark.parametrize("inference", [False, True])
def test_what_was_written_meanwhile_is_known_again(tmp_path: Path, inference: bool) -> None:
    with torch.inference_mode(inference):
        model = Cache()
        values = []
        with torch.no_grad(), dt.record(tmp_path / "t", model, save="tensors", steps={0, 3}):
            for _ in range(4):
                values.append((model.state.clone(), model.total.clone()))
                model(torch.ones(2))
    (rank,) = open_ranks(tmp_path / "t")
    adds = [r for r in rank.records() if r.overload == "aten.add_.Tensor"]
    assert [r.step for r in adds] == [0, 0, 3, 3]
    for record, expected in zip(adds, (values[0][1], values[0][0], values[3][1], values[3][0]), strict=True):
        before, after = record.slots[0], record.slots[-1]
        assert torch.equal(rank.tensor(before.content), expected)
        assert torch.equal(rank.tensor(after.content), expected + 1)
    assert dt.open(tmp_path / "t").verify() == []


def test_without_a_recording_there_is_nothing() -> None:
    program = """
        import sys
        import torch
        call = torch.nn.Module.__call__
        import dispatch_trace as dt
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        forward = torch.nn.Linear.forward
        x = dt.capture_tensor("x", torch.ones(1, 2))
        dt.record  # loaded, not used
        model(x)
        assert torch.nn.Module.__call__ is call
        assert torch.nn.Linear.forward is forward
        assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
        assert not torch.nn.modules.module._has_any_global_hook()
        assert torch._C._len_torch_dispatch_stack() == 0 == torch._C._len_torch_function_stack()
        loaded = [name for name in sys.modules if name.startswith("torch._dynamo")]
        assert not loaded, loaded[:5]
        import threading
        assert threading.active_count() == 1
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_recording_of_modules_enters_no_mode_and_leaves_nothing(tmp_path: Path) -> None:
    call, forward = nn.Module.__call__, nn.Linear.forward
    model = Stack(1)
    with dt.record(tmp_path / "t", model, level="module"):
        model(torch.ones(1, 4))
    assert model.depths == [0]
    assert nn.Module.__call__ is call and nn.Linear.forward is forward
