"""Lanes are told by features, headers say what matters, faults are loud; all without a Neuron package."""

from __future__ import annotations

import importlib.machinery
import json
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aligning import Net, batch, changed, net, record
from torch import nn

import dispatch_trace as dt
from dispatch_trace import neuron
from dispatch_trace.neuron_trace import CaptureLayout, TracedCapture
from dispatch_trace.registry import TensorRegistry

PACKAGES = ("torch_neuronx", "libtorch_neuronx_lite")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes packages that can be found and imported: packages(torch_neuronx="def trace(): ...")."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(**sources: str) -> None:
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(source)

    yield make
    for name in PACKAGES:
        sys.modules.pop(name, None)


def name_private_device(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    """As if a package had renamed PrivateUse1 and registered its module; undone after the test."""
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: name)
    module = types.ModuleType(f"torch.{name}")
    module.__dict__.update(functions)
    monkeypatch.setattr(torch, name, module, raising=False)


# -- lanes -----------------------------------------------------------------------------------------------


def test_a_machine_without_neuron_is_on_no_lane() -> None:
    assert neuron.lane() is None


def test_a_private_device_called_neuron_is_the_native_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    name_private_device(monkeypatch, "neuron")
    assert neuron.lane() == "native"


def test_a_private_device_of_another_name_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    name_private_device(monkeypatch, "npu")
    assert neuron.lane() is None


def test_a_device_that_says_so_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    name_private_device(monkeypatch, "neuron", is_simulated=True)
    assert neuron.lane() == "simulated"


def test_the_lite_runtime_is_asked_first_because_it_renames_the_device_too(
    packages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages(libtorch_neuronx_lite="raise AssertionError('must not be imported')")
    name_private_device(monkeypatch, "neuron")
    assert neuron.lane() == "lite"


def test_a_package_that_can_trace_is_the_xla_lane(packages: Any) -> None:
    packages(torch_neuronx="def trace(model, inputs): ...")
    assert neuron.lane() == "xla"


@pytest.mark.parametrize("source", ["", "raise RuntimeError('no driver')"], ids=["placeholder", "broken"])
def test_a_package_that_cannot_trace_is_no_lane(packages: Any, source: str) -> None:
    packages(torch_neuronx=source)
    assert neuron.lane() is None


def test_recording_never_imports_a_neuron_package(packages: Any, tmp_path: Path) -> None:
    packages(torch_neuronx="raise AssertionError('must not be imported')")
    assert neuron.lane(importing=False) is None
    assert neuron.manifest()["lane"] is None
    record(tmp_path / "trace", net(), batch())
    assert "torch_neuronx" not in sys.modules


def test_a_package_without_a_spec_counts_as_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """importlib.util.find_spec raises ValueError for such a module."""
    module = types.ModuleType("torch_neuronx")
    module.trace = lambda model, inputs: None  # type: ignore[attr-defined]
    assert module.__spec__ is None
    monkeypatch.setitem(sys.modules, "torch_neuronx", module)
    assert neuron.lane(importing=False) == "xla"


def test_a_cpu_reference_in_a_process_with_a_lane_is_on_none(monkeypatch: pytest.MonkeyPatch) -> None:
    name_private_device(monkeypatch, "neuron")
    assert neuron.lane_of(device="cpu") is None
    assert neuron.lane_of(device="cpu", compile_backend="inductor") is None
    assert neuron.lane_of(device="neuron") == "native"
    assert neuron.lane_of(device="cpu", compile_backend="neuron") == "native"


def test_importing_the_package_touches_no_neuron_package(packages: Any, tmp_path: Path) -> None:
    packages(torch_neuronx="raise AssertionError", libtorch_neuronx_lite="raise AssertionError")
    code = (
        "import dispatch_trace, dispatch_trace.neuron, dispatch_trace.neuron_trace, dispatch_trace.recorder"
    )
    path = [str(tmp_path), str(Path(dt.__file__).parents[1])]
    subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import sys; sys.path[:0] = {path!r}; {code}"], check=True
    )


# -- the manifest ----------------------------------------------------------------------------------------


def test_a_manifest_is_plain_and_says_what_is_not_known() -> None:
    found = json.loads(json.dumps(neuron.manifest()))
    assert found.keys() == {
        "lane",
        "versions",
        "backend",
        "num_graphs",
        "fallback_ops",
        "rank_map",
        "environment",
    }
    assert found["lane"] is None and found["num_graphs"] is None and found["fallback_ops"] is None
    assert found["versions"] == {"torch": torch.__version__}


def test_a_manifest_holds_what_the_device_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    name_private_device(
        monkeypatch,
        "neuron",
        is_available=lambda: True,
        current_device=lambda: 3,
        get_fallback_ops=lambda: ["aten::sort", "aten::topk", "aten::sort"],
        get_dynamo_metrics=lambda: ["one", "two"],
    )
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "1")
    found = neuron.manifest(compile_backend="neuron")
    assert (found["lane"], found["backend"], found["num_graphs"]) == ("native", "neuron", 2)
    assert found["fallback_ops"] == {"aten::sort": 2, "aten::topk": 1}
    assert found["rank_map"] == {"rank": 5, "world_size": 8, "local_rank": 1, "device": 3}
    assert neuron.manifest(num_graphs=7)["num_graphs"] == 7


def test_trackers_are_found_in_the_package_too(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("torch_neuronx")
    module.__spec__ = importlib.machinery.ModuleSpec("torch_neuronx", None)
    module.get_fallback_ops = lambda: ["aten::sort"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_neuronx", module)
    assert neuron.op_tracking() == neuron.OpTracking(fallback={"aten::sort": 1})


def test_only_variables_that_change_numerics_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {
        "NEURON_CC_FLAGS": "--auto-cast=none",
        "NEURON_RT_STOCHASTIC_ROUNDING_EN": "1",
        "TORCH_NEURONX_ANYTHING": "x",
        "XLA_FLAGS": "--a",
        "VLLM_NEURON_CPU_MODE": "0",
    }
    for name, value in wanted.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NEURON_SECRET", "not for a header")
    assert neuron.environment() == wanted


# -- loud errors -----------------------------------------------------------------------------------------


def test_an_op_that_fell_back_to_the_host_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = ["aten::sort"]
    name_private_device(monkeypatch, "neuron", get_fallback_ops=lambda: ops)
    before = neuron.op_tracking()
    neuron.check_compiled(before, num_graphs=1, where="m")  # what fell back earlier is not this run's
    ops += ["aten::topk", "aten::topk", "aten::sort"]
    message = r"m: .* must not fall back, but aten::topk \(2 calls\), aten::sort ran on the host"
    with pytest.raises(dt.CaptureError, match=message):
        neuron.check_compiled(before, num_graphs=1, where="m")


def test_a_graph_that_was_never_compiled_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, ops = ["earlier"], ["aten::mm"]
    name_private_device(
        monkeypatch, "neuron", get_dynamo_metrics=lambda: graphs, get_executed_ops=lambda: ops
    )
    before = neuron.op_tracking()
    ops += ["aten::mm", "aten::add"]
    message = (
        "expected 1 compiled Neuron graphs, the backend compiled 0: .* in silence.*: aten::add, aten::mm"
    )
    with pytest.raises(dt.CaptureError, match=message):
        neuron.check_compiled(before, num_graphs=1, where="m")
    graphs.append("this one")
    neuron.check_compiled(before, num_graphs=1, where="m")


def test_a_dispatch_recorder_around_compiled_neuron_code_is_refused() -> None:
    with pytest.raises(dt.ConfigError, match=r"level='op' around a compiled Neuron model \(layers.0\)"):
        neuron.refuse_dispatch_recorder(["layers.0"], device="neuron")
    neuron.refuse_dispatch_recorder([], device="neuron")
    neuron.refuse_dispatch_recorder(["layers.0"], device="cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_distinct_copy_has_the_same_bits_and_memory_of_its_own(dtype: torch.dtype) -> None:
    """That it is distinct to XLA is shown in tests/xla."""
    for tensor in (torch.ones(2, 3, 4).permute(2, 0, 1), torch.ones(()), torch.ones(0, 3)):
        tensor = tensor.to(dtype)
        copy = neuron.distinct_copy(tensor)
        assert copy.shape == tensor.shape and torch.equal(copy, tensor)
        assert tensor.numel() == 0 or copy.data_ptr() != tensor.data_ptr()


# -- the wrapper for tracing compilers -------------------------------------------------------------------


def jit(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    return torch.jit.trace(model, inputs)


def export(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    return torch.export.export(model, inputs).module()


def eager(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    return model


TRACERS = pytest.mark.parametrize("tracer", [jit, export, eager])
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")


@TRACERS
def test_captures_are_outputs_of_the_traced_program(tracer: Any) -> None:
    model, x, y = net(), batch(), batch() + 1
    seen: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        wrapper = TracedCapture(model, "blocks.0-2", example_inputs=(x,))
        traced = tracer(wrapper, (x,))
        for inputs in (x, y, x):
            out, captures = wrapper.layout.unpack(traced(inputs))
            if tracer is not eager:
                wrapper.remove()
            handles = [
                block.register_forward_hook(lambda m, a, o, path=f"blocks.{i}": seen.update({path: o}))
                for i, block in enumerate(model.blocks)
            ]
            assert torch.equal(out, model(inputs))
            for handle in handles:
                handle.remove()
            assert list(captures) == ["blocks.0", "blocks.1", "blocks.2"]
            assert all(torch.equal(captures[name], seen[name]) for name in captures)


class Odd(nn.Module):
    """Calls one module twice, one not at all, one by a flag; one returns a structure."""

    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return -x, {"double": 2 * x, "none": None}

    def __init__(self, *, extra: bool = True) -> None:
        super().__init__()
        self.twice, self.never, self.maybe = nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh()
        self.pair, self.norm = Odd.Pair(), nn.BatchNorm1d(4)
        self.extra = extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.twice(self.twice(x)))
        left, right = self.pair(x)
        return self.maybe(left + right["double"]) if self.extra else left


@TRACERS
def test_every_call_and_leaf_has_a_name_and_what_is_missing_is_said_to_be(tracer: Any) -> None:
    model, x = Odd().eval(), torch.ones(3, 4)
    with torch.no_grad():
        wrapper = TracedCapture(model, "twice|never|pair", example_inputs=(x,))
        assert wrapper.layout.names == ("twice", "twice@1", "pair[0]", "pair[1].double", "never")
        assert wrapper.layout.valid == (True, True, True, True, False)
        outputs = tracer(wrapper, (x,))(x)
        assert len(outputs) == 5  # the model's own, and no stand-in for what never ran
        _, captures = wrapper.layout.unpack(outputs)
        assert "never" not in captures
        assert torch.equal(captures["twice@1"], model.twice(captures["twice"]))
        assert torch.equal(captures["pair[1].double"], -2 * captures["pair[0]"])


def test_names_stay_the_same_for_another_bucket() -> None:
    model, x = Odd(), torch.ones(3, 4)
    model.eval()
    with torch.no_grad():
        first = TracedCapture(model, "twice|maybe", example_inputs=(x,))
        first.remove()
        model.extra = False
        second = TracedCapture(model, "twice|maybe", example_inputs=(x[:1],), names=first.layout)
        assert second.layout.names == first.layout.names == ("twice", "twice@1", "maybe")
        assert second.layout.valid == (True, True, False)
        assert list(second.layout.unpack(second(x[:1]))[1]) == ["twice", "twice@1"]
        second.remove()
        model.extra = True
        with pytest.raises(dt.CaptureError, match=r"names= lacks \['norm'\]"):
            TracedCapture(model, "twice|norm", example_inputs=(x,), names=first.layout)


def test_the_dry_run_leaves_buffers_and_random_state_alone() -> None:
    model, x = Odd().train(), torch.randn(3, 4)
    state, mean = torch.get_rng_state(), model.norm.running_mean.clone()
    TracedCapture(model, "twice", example_inputs=(x,))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model.norm.running_mean, mean) and int(model.norm.num_batches_tracked) == 0


def test_a_program_that_takes_another_way_is_an_error() -> None:
    model = Odd().eval()
    with torch.no_grad():
        wrapper = TracedCapture(model, "maybe|twice", example_inputs=(torch.ones(3, 4),))
        model.extra = False
        with pytest.raises(dt.CaptureError, match=r"captured 2 values where its layout has 3 .*\['maybe'\]"):
            wrapper(torch.ones(3, 4))


def test_nothing_to_capture_is_an_error_and_leaves_no_hook() -> None:
    model = Odd().eval()
    with pytest.raises(dt.CaptureError, match="none of the 1 selected modules returned a tensor"):
        TracedCapture(model, "never", example_inputs=(torch.ones(3, 4),))
    with pytest.raises(dt.NoMatchError, match="Closest: 'twice'"):
        TracedCapture(model, "twce", example_inputs=(torch.ones(3, 4),))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_layout_survives_json_and_refuses_other_outputs() -> None:
    wrapper = TracedCapture(net(), "blocks.*", example_inputs=(batch(),))
    layout = CaptureLayout.from_dict(json.loads(json.dumps(wrapper.layout.to_dict())))
    assert layout == wrapper.layout
    with pytest.raises(dt.CaptureError, match="returned 1 captures, its layout has 12"):
        layout.unpack((batch(), batch()))
    with pytest.raises(dt.ConfigError, match="no capture layout"):
        CaptureLayout.from_dict({"values": [1]})


def test_captures_go_to_a_registry_call_by_call() -> None:
    model, x, registry = Odd().eval(), torch.ones(3, 4), TensorRegistry()
    with torch.no_grad():
        wrapper = TracedCapture(model, "twice|pair", example_inputs=(x,))
        outputs = wrapper(x)
    assert wrapper.layout.register(outputs, registry) is outputs[0]
    kinds = [(kind, name) for kind, name, _ in registry.take()]
    assert kinds == [("module", "twice"), ("module", "twice"), ("module", "pair")]


def traced_trace(path: Path, model: Net, x: torch.Tensor) -> Path:
    """A recording of what a traced model returned, with nothing but the artefact running."""
    with torch.no_grad():
        wrapper = TracedCapture(model, ".+", example_inputs=(x,))
        traced = torch.jit.trace(wrapper, (x,))
        wrapper.remove()
        with dt.record(path, model, level="module", save="tensors"):
            wrapper.layout.record(traced(x), (x,))
    return path


def test_a_traced_run_lines_up_with_an_eager_reference(tmp_path: Path) -> None:
    model, x = net(), batch()
    assert isinstance(model, Net)
    reference = record(tmp_path / "ref", model, x)
    path = traced_trace(tmp_path / "target", model, x)
    trace = dt.open(path)
    assert trace.complete and trace.verify() == []
    assert (trace.header["lane"], trace.header["compile_backend"]) == ("traced", "traced")
    eager = {(r.module, r.call) for r in dt.open(reference).find(kind="module")}
    assert {(r.module, r.call) for r in trace.find(kind="module")} == eager
    aligned = dt.align(reference, path)
    assert aligned.verdict == "match", aligned


def test_a_fault_in_a_traced_run_is_named(tmp_path: Path) -> None:
    model, x = net(), batch()
    wrong = changed(lambda m: setattr(m.blocks[1], "scale", 1.3), model)
    assert isinstance(wrong, Net)
    aligned = dt.align(record(tmp_path / "ref", model, x), traced_trace(tmp_path / "target", wrong, x))
    assert aligned.verdict == "diverged"
    assert aligned.first is not None and aligned.first.module == "blocks.1"


def test_recording_outside_a_block_is_an_error() -> None:
    wrapper = TracedCapture(net(), "blocks.*", example_inputs=(batch(),))
    with pytest.raises(dt.CaptureError, match="outside every recording"):
        wrapper.layout.record(wrapper(batch()))
