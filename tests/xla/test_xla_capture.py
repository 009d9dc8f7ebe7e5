"""Captures below `torch.compile(backend="openxla")` on torch-xla's CPU client, kin to Neuron's XLA lane.

    make test-xla

makes an environment of its own for it (torch 2.9.0, torch-xla 2.9.0, 7 GB) and sets PJRT_DEVICE=CPU.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_xla
from aligning import net
from torch_xla.debug import metrics

import dispatch_trace as dt
from dispatch_trace import neuron
from dispatch_trace.capture.compiled import TracedHooks
from dispatch_trace.neuron_trace import TracedCapture
from dispatch_trace.registry import TensorRegistry

NUM_CALLS = 4
# torch 2.9 says this of its own getter.
pytestmark = pytest.mark.filterwarnings("ignore:Please use the new API settings to control TF32:UserWarning")


def num_compilations() -> int:
    found = metrics.metric_data("CompileTime")
    return int(found[0]) if found else 0


def batches(rows: int = 6) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 32, generator=generator) for _ in range(NUM_CALLS)]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    """The eager CPU reference, and four calls of the compiled model on the XLA device."""
    folder = tmp_path_factory.mktemp("xla")
    model, inputs = net(), batches()
    with torch.no_grad(), dt.record(folder / "reference", model, save="tensors"):
        expected = [model(x) for x in inputs]
    there = [x.to("xla") for x in inputs]
    compiled = torch.compile(copy.deepcopy(model).to("xla"), backend="openxla", fullgraph=True)
    torch_xla.sync()
    torch._dynamo.utils.counters.clear()
    before = num_compilations()
    after, errors = [], []
    with (
        torch.no_grad(),
        dt.record(
            folder / "target", compiled, level="module", save="tensors", check_outputs=False, on_error="raise"
        ),
    ):
        for x, y in zip(there, expected, strict=True):
            out = compiled(x)
            after.append(num_compilations() - before)
            errors.append(float((out.cpu() - y).abs().max()))
    counters = dict(torch._dynamo.utils.counters["stats"])
    return folder, {"compilations": after, "graphs": counters["unique_graphs"], "errors": errors}


def test_hooks_and_clear_make_one_graph_and_one_compilation(traces: tuple[Path, dict[str, object]]) -> None:
    facts = traces[1]
    assert facts["graphs"] == 1
    assert facts["compilations"] == [1] * NUM_CALLS


def test_the_program_still_returns_what_it_computed(traces: tuple[Path, dict[str, list[float]]]) -> None:
    assert len(traces[1]["errors"]) == NUM_CALLS and max(traces[1]["errors"]) < 2e-6


def test_captures_are_those_of_the_cpu(traces: tuple[Path, dict[str, object]]) -> None:
    reference, target = (dt.open(traces[0] / name) for name in ("reference", "target"))
    assert target.complete and target.verify() == []
    eager = {(r.step, r.module): r.tensor("out") for r in reference.find(kind="module")}
    captured = {(r.step, r.module): r.tensor("out") for r in target.find(kind="module")}
    assert captured.keys() <= eager.keys() and len(captured) == NUM_CALLS * 14
    assert max(float((captured[key] - eager[key]).abs().max()) for key in captured) < 2e-6


def test_the_traces_line_up(traces: tuple[Path, dict[str, object]]) -> None:
    aligned = dt.align(traces[0] / "reference", traces[0] / "target")
    assert aligned.verdict == "match", aligned.table()


@pytest.mark.parametrize("copied", [torch.clone, neuron.distinct_copy])
def test_outputs_of_one_value_need_distinct_copies(copied: Any) -> None:
    """torch-xla returns outputs of one value once, and what follows moves up: a fault that is not ours."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = 2 * x
        return copied(x), copied(x), copied(y), copied(y), y, 3 * y

    torch._dynamo.reset()
    compiled = torch.compile(program, backend="openxla", fullgraph=True)
    x = torch.arange(6.0).reshape(2, 3)
    with torch.no_grad():
        pairs = zip(compiled(x.to("xla")), program(x), strict=True)
        right = all(torch.equal(there.cpu(), here) for there, here in pairs)
    assert right == (copied is neuron.distinct_copy)  # once clones are right, distinct_copy can go


def test_hooks_that_copy_distinctly_capture_everything_on_every_call() -> None:
    """The mechanism alone: traced hooks, a registry, and a pre-forward hook on the wrapper that clears it."""
    model, registry = net(), TensorRegistry(tap=neuron.distinct_copy)
    there = copy.deepcopy(model).to("xla")
    paths = [path for path, _ in there.named_modules() if path]
    hooks = TracedHooks([(path, there.get_submodule(path)) for path in paths], registry, inputs=True)
    hooks.install()
    torch._dynamo.reset()
    compiled = torch.compile(there, backend="openxla", fullgraph=True)
    compiled.register_forward_pre_hook(lambda module, args: registry.clear())
    seen: dict[str, torch.Tensor] = {}
    for path in paths:
        module = model.get_submodule(path)
        module.register_forward_hook(lambda module, args, out, path=path: seen.update({path: out}))
    inputs = [(x, x.to("xla")) for x in batches(rows=5)]  # a program that is in no cache yet
    torch_xla.sync()
    before = num_compilations()
    after, compared = [], 0
    with torch.no_grad():
        for here, x in inputs:
            out, expected = compiled(x), model(here)
            after.append(num_compilations() - before)
            assert torch.allclose(out.cpu(), expected, atol=2e-6)
            for kind, path, value in registry.take():
                if kind == "module":
                    assert torch.allclose(value.cpu(), seen[path], atol=2e-6)
                    compared += 1
    assert after == [1] * NUM_CALLS
    assert compared == NUM_CALLS * 13
    hooks.remove()


def test_captures_are_outputs_of_what_the_lazy_tensors_trace() -> None:
    """What `torch_neuronx.trace` does: the wrapper's outputs, and nothing else, become the program's."""
    model, (x, *_) = net(), batches()
    with torch.no_grad():
        expected = model(x)
        there = copy.deepcopy(model).to("xla")
        wrapper = TracedCapture(there, r"blocks.0-2|head", example_inputs=(x.to("xla"),))
        torch_xla.sync()
        before = num_compilations()
        out, captures = wrapper.layout.unpack(wrapper(x.to("xla")))
        torch_xla.sync()
        assert num_compilations() - before == 1
        assert torch.allclose(out.cpu(), expected, atol=2e-6)
        assert list(captures) == ["blocks.0", "blocks.1", "blocks.2", "head"]
        assert torch.equal(captures["head"].cpu(), out.cpu())


def test_torch_xla_alone_is_no_neuron_lane() -> None:
    assert neuron.lane() is None
