"""Modules below `torch.compile`: one graph, every call's own values, and loud where there are none."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers.modeling_outputs import BaseModelOutput

import dispatch_trace as dt
from dispatch_trace import CaptureError, HookAfterCompileError, NoMatchError


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def num_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


@dataclasses.dataclass
class Parts:
    left: torch.Tensor
    rest: tuple[torch.Tensor, None]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return x + scale * torch.tanh(self.fc(x))


class Structures(nn.Module):
    def forward(self, x: torch.Tensor, kind: str) -> Any:
        if kind == "dataclass":
            return Parts(x + 1, (x + 2, None))
        if kind == "model output":
            return BaseModelOutput(last_hidden_state=x + 1, hidden_states=(x + 2, x + 3))
        return [x + 1, {"a": x + 2, "b b": (3, None)}]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.structures = Structures()
        self.head = nn.Linear(8, 2)
        self.unused = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        x = self.layers[0](x, scale=0.5)
        for kind in ("dataclass", "model output", "list"):
            self.structures(x, kind)
        dt.capture_tensor("last", x)
        return self.head(x)


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().eval()


def x(seed: int = 1, batch: int = 3) -> torch.Tensor:
    return torch.randn(batch, 8, generator=torch.Generator().manual_seed(seed))


def compiled(module: nn.Module, backend: str = "eager", **options: Any) -> Any:
    return torch.compile(module, backend=backend, **{"fullgraph": True, **options})


def site(record: dt.Record) -> tuple[Any, ...]:
    return record.step, record.kind, record.module, record.call, record.name, record.n


def record_both(
    folder: Path, backend: str, num_calls: int = 20, **options: Any
) -> tuple[dt.Trace, dt.Trace, int]:
    reference, target = net(), compiled(net(), backend)
    with torch.no_grad():
        with dt.record(folder / "ref", reference, level="module", save="tensors"):
            for seed in range(num_calls):
                reference(x(seed))
        before = num_graphs()
        with dt.record(
            folder / "target", target, level="module", save="tensors", check_outputs=False, **options
        ):
            for seed in range(num_calls):
                target(x(seed))
    return dt.open(folder / "ref"), dt.open(folder / "target"), num_graphs() - before


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_every_leaf_of_every_call_is_there_and_the_graph_is_one(tmp_path: Path, backend: str) -> None:
    ref, target, graphs = record_both(tmp_path, backend)
    assert graphs == 1
    theirs, ours = ({site(r): r for r in trace.records if r.kind != "param"} for trace in (ref, target))
    assert set(theirs) == set(ours) and len(ours) == 20 * 12
    for key, record in theirs.items():
        twin = ours[key]
        assert [s.name for s in record.slots] == [s.name for s in twin.slots], key
        for slot in record.slots:
            if slot.is_tensor:
                assert torch.equal(record.tensor(slot.name), twin.tensor(slot.name)), (key, slot.name)
    (second,) = target.find(module="layers.0", call=1, step=7)
    assert second.slots[1].name == "in.scale" and second.slots[1].value == 0.5
    assert target.header["compile_backend"] == backend and target.complete


def test_inductor_records_what_its_code_computed(tmp_path: Path) -> None:
    """A clone of `stage` would be zeros: inductor hands back the buffer that is cleared later
    (https://github.com/pytorch/pytorch/issues/198094)."""

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scratch", torch.arange(24.0).view(4, 6))

        def forward(self, row: torch.Tensor) -> torch.Tensor:
            y = torch.slice_scatter(self.scratch, row, dim=0, start=1, end=2)
            self.scratch.zero_()
            return y

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stage, self.post = Stage(), nn.Linear(6, 2)

        def forward(self, row: torch.Tensor) -> torch.Tensor:
            return self.post(self.stage(row))

    row = torch.full((1, 6), 7.0)
    expected = torch.arange(24.0).view(4, 6)
    expected[1] = 7.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # inductor's own imports
        target = compiled(Whole(), "inductor")
        with torch.no_grad(), dt.record(tmp_path / "t", target, save="tensors"):
            target(row)
    trace = dt.open(tmp_path / "t")
    (record,) = trace.find(module="stage", kind="module")
    assert torch.equal(record.tensor(), expected)
    observed = trace.header["observer"][""]
    assert observed["outputs"] == "equal bit for bit" and observed["kernels"]["without"] >= 1


def test_what_ran_before_is_refused_or_compiled_once_more(tmp_path: Path) -> None:
    target = compiled(net())
    with torch.no_grad():
        plain = target(x())
        assert num_graphs() == 1
        with pytest.raises(HookAfterCompileError, match=r"Net \(backend 'eager'\).*recompile=True"):
            dt.record(tmp_path / "t", target).__enter__()
        assert not (tmp_path / "t").exists()
        with dt.record(tmp_path / "t", target, recompile=True, check_outputs=False) as recording:
            for _ in range(3):
                assert torch.equal(target(x()), plain)
        assert num_graphs() == 2 and recording.num_records > 0
        assert torch.equal(target(x()), plain)  # its own code is still there, without hooks
    assert num_graphs() == 2
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in target._orig_mod.modules())
    assert len(list(dt.open(tmp_path / "t").find(module="head", kind="module"))) == 3


def test_another_instance_that_ran_compiled_does_not_count(tmp_path: Path) -> None:
    with torch.no_grad():
        compiled(net(1))(x())
        target = compiled(net())
        with dt.record(tmp_path / "t", target):
            target(x())
    assert len(list(dt.open(tmp_path / "t").find(module="layers.0.fc", kind="module"))) == 2


def test_a_second_recording_of_one_model_has_its_own_hooks(tmp_path: Path) -> None:
    target = compiled(net())
    for number in range(2):
        with torch.no_grad(), dt.record(tmp_path / str(number), target, check_outputs=False):
            target(x())
        assert len(list(dt.open(tmp_path / str(number)).find(module="layers.0.fc", kind="module"))) == 2
    assert num_graphs() == 2


def test_compiled_parts_of_an_eager_model_keep_their_paths(tmp_path: Path) -> None:
    reference, model = net(), net()
    model.layers[1] = compiled(model.layers[1])
    model.head.compile(backend="eager")
    with torch.no_grad():
        expected = reference(x())
        with dt.record(tmp_path / "t", model, save="tensors"):
            assert torch.equal(model(x()), expected)
    trace = dt.open(tmp_path / "t")
    with torch.no_grad():
        before = reference.layers[0](x())
        (record,) = trace.find(module="layers.1.fc", kind="module")
        assert torch.equal(record.tensor(), reference.layers[1].fc(before))
    for path in ("layers.1", "head"):
        (record,) = trace.find(module=path, kind="module")
        assert record.note == "opaque: compiled region (eager)"
    assert not list(trace.find(module="layers.1.fc", kind="op"))
    assert list(trace.find(module="layers.0.fc", kind="op"))
    assert dt.align(tmp_path / "t", tmp_path / "t").verdict == "match"


def test_what_is_compiled_during_the_run_is_a_region_with_the_path_of_its_module(tmp_path: Path) -> None:
    reference, model = net(), net()
    with torch.no_grad():
        with dt.record(tmp_path / "ref", reference, save="tensors"):
            expected = reference(x()), reference(x(2))
        with dt.record(tmp_path / "t", model, save="tensors"):
            model.layers[1] = compiled(model.layers[1], "aot_eager")
            model.head.compile(backend="eager")
            assert torch.equal(model(x()), expected[0])
            assert torch.equal(compiled(model, fullgraph=False)(x(2)), expected[1])
    trace = dt.open(tmp_path / "t")
    first = {r.module: r.note for r in trace.find(kind="module", step=0) if r.note}
    assert first == {
        "layers.1": "opaque: compiled region (aot_eager)",
        "head": "opaque: compiled region (eager)",
    }
    assert not list(trace.find(kind="module", module="layers.1.fc", step=0)), "its modules have no hooks"
    ((whole,),) = ([r for r in trace.find(kind="module", step=1)],)
    assert (whole.module, whole.note) == ("", "opaque: compiled region (eager)")
    assert torch.equal(whole.tensor(), expected[1])
    assert dt.align(tmp_path / "ref", tmp_path / "t").verdict == "match"


def test_a_wrong_region_within_an_eager_model_is_blamed_itself(tmp_path: Path) -> None:
    """Also where a region returns the same values twice, and nothing but elementwise ops reads them."""

    def wrong_backend(graph: Any, example_inputs: Any) -> Any:
        for node in graph.graph.nodes:
            node.target = torch.sigmoid if node.target is torch.tanh else node.target
        graph.recompile()
        return graph.forward

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(self.fc(x))

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = Part(), Part(), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            return self.head(torch.relu(self.b(x)) + torch.relu(self.b(x)))

    torch.manual_seed(0)
    model = Whole().eval()
    with torch.no_grad():
        with dt.record(tmp_path / "ref", model, save="tensors"):
            model(x())
        model.b = compiled(model.b, wrong_backend)
        with dt.record(tmp_path / "target", model, save="tensors"):
            model(x())
    found = dt.align(tmp_path / "ref", tmp_path / "target")
    assert found.verdict == "diverged" and found.first is not None
    assert (found.first.module, found.first.call, found.first.label) == ("b", 0, "introduced")


def test_a_trace_of_a_compiled_run_lines_up_with_an_eager_one(tmp_path: Path) -> None:
    reference, target = net(), compiled(net())
    with torch.no_grad():
        with dt.record(tmp_path / "ref", reference, save="tensors"):
            reference(x())
        with dt.record(tmp_path / "target", target, save="tensors"):
            target(x())
    assert dt.align(tmp_path / "ref", tmp_path / "target").verdict == "match"
    faulty = net()
    with torch.no_grad():
        faulty.layers[1].fc.weight.mul_(1.1)
    target = compiled(faulty)
    with torch.no_grad(), dt.record(tmp_path / "faulty", target, save="tensors"):
        target(x())
    found = dt.align(tmp_path / "ref", tmp_path / "faulty")
    assert found.verdict == "diverged" and found.first is not None
    assert (found.first.module, found.first.label) == ("layers.1.fc", "parameter")


def test_selected_modules_only(tmp_path: Path) -> None:
    target = compiled(net())
    with torch.no_grad(), dt.record(tmp_path / "t", target, level="module", select=["layers.0-1"]):
        target(x())
    found = [(r.module, r.call) for r in dt.open(tmp_path / "t").find(kind="module")]
    assert found == [("layers.0", 0), ("layers.1", 0), ("layers.0", 1)]
    with pytest.raises(NoMatchError, match=r"layers\.7"):
        dt.record(tmp_path / "u", target, select=["layers.7"]).__enter__()


def test_selected_modules_that_never_run_are_named(tmp_path: Path) -> None:
    target = compiled(net())
    with (
        torch.no_grad(),
        pytest.warns(RuntimeWarning, match=r"1 of the modules that select=.*never ran.*: unused"),
        dt.record(tmp_path / "t", target, level="module", select=["head", "unused"], check_outputs=False),
    ):
        target(x())
    assert [r.module for r in dt.open(tmp_path / "t").find(kind="module")] == ["head"]


def test_training_and_new_shapes(tmp_path: Path) -> None:
    reference, target = net().train(), compiled(net().train())
    with dt.record(tmp_path / "t", target, save="tensors"):
        for batch in (3, 5, 6):
            target(x(batch=batch)).sum().backward()
    reference_steps = [reference(x(batch=batch)).sum() for batch in (3, 5, 6)]
    for loss in reference_steps:
        loss.backward()
    for a, b in zip(reference.parameters(), target.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None and b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad)
    sizes = [r.tensor().shape[0] for r in dt.open(tmp_path / "t").find(module="head", kind="module")]
    assert sizes == [3, 5, 6]


def test_the_programs_random_state_and_exceptions_are_its_own(tmp_path: Path) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return self.drop(value)

    plain, watched = compiled(Noisy()), compiled(Noisy())
    torch.manual_seed(3)
    expected, state = plain(x()), torch.get_rng_state()
    torch.manual_seed(3)
    with dt.record(tmp_path / "t", watched):
        assert torch.equal(watched(x()), expected)
        assert torch.equal(torch.get_rng_state(), state)
        with pytest.raises(RuntimeError):
            watched(torch.ones(2, 3), torch.ones(1))
        watched(x())
    assert dt.TensorRegistry._instance is None
    assert len(list(dt.open(tmp_path / "t").find(module="drop"))) == 2


def test_a_run_that_was_eager_after_all_is_said_aloud(tmp_path: Path) -> None:
    target = compiled(net(), fullgraph=False)
    with (
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),
        pytest.warns(RuntimeWarning, match="modules of the compiled Net ran eagerly"),
        pytest.raises(CaptureError, match="was to run compiled and ran eagerly as a whole"),
        dt.record(tmp_path / "t", target, check_outputs=False),
    ):
        target(x())
    assert dt.open(tmp_path / "t").header["ran_eagerly"] is True


def test_graph_breaks_lose_nothing(tmp_path: Path) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            value = self.first(value)
            torch._dynamo.graph_break()
            return self.second(value)

    target = compiled(Broken(), fullgraph=False)
    with torch.no_grad(), dt.record(tmp_path / "t", target, check_outputs=False):
        for _ in range(3):
            target(x())
    found = [(r.step, r.module) for r in dt.open(tmp_path / "t").find(kind="module") if r.module]
    assert found == [(step, name) for step in range(3) for name in ("first", "second")]


def test_hooks_that_never_fired_are_an_error(tmp_path: Path) -> None:
    """Another tool puts code compiled without hooks in the model's place."""
    target = compiled(net())
    with (
        warnings.catch_warnings(),
        pytest.raises(CaptureError, match=r"ran 1 times .* none of its \d+ hooks captured"),
        dt.record(tmp_path / "t", target, check_outputs=False),
    ):
        warnings.simplefilter("ignore", RuntimeWarning)
        target.forward = lambda value: value
        target(x())


def test_an_observer_that_changes_the_result_is_marked(tmp_path: Path) -> None:
    """The hook's tap is a visible difference to this backend, as fusion is to a real one."""

    def fusing(graph: torch.fx.GraphModule, example: Any) -> Any:
        tapped = any("tap" in str(node.target) or node.target == "clone" for node in graph.graph.nodes)

        def run(*args: Any) -> Any:
            outputs = list(graph(*args))
            if tapped:
                outputs[0] = outputs[0] + 1e-3
            return outputs

        return run

    target = torch.compile(net(), backend=fusing)
    with torch.no_grad(), dt.record(tmp_path / "t", target):
        target(x())
    trace = dt.open(tmp_path / "t")
    assert trace.header["observer"][""]["outputs"] == "differ: out"
    reference = net()
    with torch.no_grad(), dt.record(tmp_path / "ref", reference):
        reference(x())
    assert any(
        "changed what the compiled Net returns" in n
        for n in dt.align(tmp_path / "ref", tmp_path / "t").notices
    )


def test_check_observer_runs_compiled_models_too() -> None:
    assert dt.check_observer(compiled(net()), x())


def test_check_observer_sees_what_taps_change() -> None:
    """A backend that computes otherwise where something is tapped, as a fusing compiler may."""

    def fusing(graph: torch.fx.GraphModule, example: Any) -> Any:
        tapped = any("clone" in str(node.target) for node in graph.graph.nodes)

        def run(*args: Any) -> Any:
            return [v + 1e-3 if tapped and v.is_floating_point() else v for v in graph(*args)]

        return run

    model = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), backend=dt.tap(fusing))
    with torch.no_grad():
        assert not dt.check_observer(model, x())
