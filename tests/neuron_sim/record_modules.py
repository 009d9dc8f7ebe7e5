"""Records on the simulated device, eagerly and compiled, and notes what only this process can see.

    python tests/neuron_sim/record_modules.py FOLDER

leaves traces in FOLDER and `facts.json`. It is a program of its own because the device cannot be taken back.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import dispatch_trace as dt
from dispatch_trace import neuron as lanes
from neuron_sim import backend, device
from neuron_sim.models import hashed_llama, tokens
from neuron_sim.scenarios import FAULTS


def main(folder: Path) -> None:
    neuron = device.install()
    compiler = backend.install(neuron)
    model, ids = hashed_llama(), tokens()
    on_device, device_ids = copy.deepcopy(model).to("neuron"), ids.to("neuron")
    with torch.no_grad(), dt.record(folder / "reference", model, save="tensors"):
        expected = model(ids)
    facts: dict[str, Any] = {
        "basics": basics(),
        "eager": record_eagerly(folder, neuron, on_device, device_ids, expected),
        "compiled": record_compiled(folder, neuron, on_device, device_ids),
        "faults": record_faults(folder, compiler, on_device, device_ids),
        "manifest": lanes.manifest(compile_backend="neuron"),
        "refused": refused(folder, on_device),
        "guide": run_guide(folder, model, ids),
    }
    (folder / "facts.json").write_text(json.dumps(facts))


def run_guide(folder: Path, model: torch.nn.Module, ids: torch.Tensor) -> dict[str, Any]:
    """The Python of docs/neuron.md, with `torch.jit.trace` in the place of the tracing compiler."""
    guide = Path(__file__).parents[2] / "docs" / "neuron.md"
    compiled, traced = re.findall(r"^```python\n(.*?)^```$", guide.read_text(), re.MULTILINE | re.DOTALL)
    layers = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))})
    layers.forward = lambda x: layers["layers"][1](layers["layers"][0](x).relu())  # type: ignore[method-assign]
    names: dict[str, Any] = {"dt": dt, "torch": torch}
    with contextlib.chdir(folder), torch.no_grad():
        with dt.record("cpu.trace", model, save="tensors"):
            model(ids)
        exec(compiled, {**names, "model": copy.deepcopy(model).to("neuron"), "ids": ids.to("neuron")})
        names |= {
            "model": layers,
            "x": torch.randn(2, 8),
            "torch_neuronx": SimpleNamespace(trace=torch.jit.trace),
        }
        exec(traced, names)
        verdict = dt.align("cpu.trace", "neuron.trace").verdict
    return {"verdict": verdict, "captures": sorted(names["captures"])}


def basics() -> dict[str, Any]:
    """What the device is to torch."""
    x = torch.arange(12.0).reshape(3, 4)
    there = x.to("neuron")
    row = there[1]  # a view: what is written through it must show
    row.add_(100)
    after = x.clone()
    after[1] += 100
    try:
        (there + x).cpu()
        mixed = "allowed"
    except RuntimeError as error:
        mixed = str(error)
    return {
        "device": str(there.device),
        "accelerator": str(torch.accelerator.current_accelerator()),
        "round_trip": torch.equal(x.to("neuron").cpu(), x),
        "view_writes_through": torch.equal(there.cpu(), after),
        "mixing_devices": mixed,
        "lane": lanes.lane(),
        "lane_of_cpu": lanes.lane_of(device="cpu"),
    }


def record_eagerly(
    folder: Path, neuron: Any, model: torch.nn.Module, ids: torch.Tensor, expected: torch.Tensor
) -> dict[str, Any]:
    """The dispatch recorder on device tensors, and what it makes the device do besides."""
    with torch.no_grad():
        neuron.clear_op_tracking()
        plain = model(ids)
        alone = Counter(neuron.get_executed_ops())
        watched = {}
        for save in ("stats", "tensors"):
            neuron.clear_op_tracking()
            with dt.record(folder / f"eager-{save}", model, save=save, params="none"):
                out = model(ids)
            watched[save] = Counter(neuron.get_executed_ops())
    return {
        "device": str(out.device),
        "same_bits": torch.equal(out.cpu(), plain.cpu()),
        "near_the_cpu": float((out.cpu() - expected).abs().max() / expected.abs().max()),
        "num_ops": sum(alone.values()),
        "extra_ops": {save: dict(ops - alone) for save, ops in watched.items()},
    }


def record_compiled(folder: Path, neuron: Any, model: torch.nn.Module, ids: torch.Tensor) -> dict[str, Any]:
    """Hooks traced into one graph, right on every call."""
    torch._dynamo.reset()
    graphs = len(neuron.get_dynamo_metrics())
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend="neuron", fullgraph=True)
    inputs = [ids, (ids + 1) % 7, ids.flip(1)]
    with (
        torch.no_grad(),
        dt.record(folder / "compiled", compiled, level="module", save="tensors", check_outputs=False),
    ):
        captured = [compiled(x).cpu() for x in inputs]
    counters = {k: int(v) for k, v in torch._dynamo.utils.counters["stats"].items()}
    with torch.no_grad():
        eager = [model(x).cpu() for x in inputs]
    return {
        "graphs": len(neuron.get_dynamo_metrics()) - graphs,
        "unique_graphs": counters.get("unique_graphs"),
        "near_eager": max(
            float((a - b).abs().max() / b.abs().max()) for a, b in zip(captured, eager, strict=True)
        ),
    }


def record_faults(
    folder: Path, compiler: backend.NeuronBackend, model: torch.nn.Module, ids: torch.Tensor
) -> dict[str, Any]:
    """A trace for each fault; where the recording refuses it, what it says."""
    errors: dict[str, Any] = {}
    for name, faults in FAULTS.items():
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="neuron", fullgraph=True)
        try:
            with (
                torch.no_grad(),
                compiler.with_faults(faults),
                dt.record(
                    folder / name,
                    compiled,
                    level="module",
                    save="tensors",
                    check_outputs=False,
                    on_error="raise",
                ),
            ):
                compiled(ids)
        except dt.DispatchTraceError as error:
            errors[name] = [type(error).__name__, str(error)]
    return errors


def refused(folder: Path, model: torch.nn.Module) -> list[str]:
    """A dispatch recorder around compiled code of the device."""
    torch._dynamo.reset()
    try:
        with dt.record(folder / "refused", torch.compile(model, backend="neuron"), level="op"):
            raise AssertionError("not refused")
    except dt.DispatchTraceError as error:
        return [type(error).__name__, str(error)]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
