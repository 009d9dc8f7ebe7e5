"""A stand-in for the Dynamo backend `neuron`: AOT graphs, run in one piece outside the dispatcher.

Like the real one it takes static shapes only, makes one artefact of each graph, brings decompositions of
its own, and may fall back to running a graph eagerly without a word. Unlike the real one its artefact is
the graph itself, interpreted by the CPU on copies of the device's tensors.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._decomp import core_aten_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from neuron_sim import faults as passes
from neuron_sim.faults import Fault


@dataclass(frozen=True, slots=True)
class GraphMetrics:
    """What the compiler says of one graph, under the names that the real one uses."""

    graph_name: str
    graph_node_count: int
    torch_neuronx_compile_us: int


class NeuronBackend:
    """The backend, as `torch.compile(backend="neuron")` finds it.

    Attributes:
      graphs: what was compiled so far.
      faults: fault -> the module that it strikes ("" for all).
    """

    def __init__(self) -> None:
        self.graphs: list[GraphMetrics] = []
        self.faults: dict[Fault, str] = {}

    def __call__(self, gm: GraphModule, example_inputs: list[Any], **_: Any) -> Callable[..., Any]:
        if "eager_fallback" in self.faults:
            return gm.forward
        decompositions = core_aten_decompositions() if "decompositions" in self.faults else None
        compiler = aot_autograd(fw_compiler=self._compile, decompositions=decompositions)
        compiled: Callable[..., Any] = compiler(gm, example_inputs)
        return compiled

    @contextlib.contextmanager
    def with_faults(self, faults: dict[Fault, str]) -> Iterator[None]:
        """Graphs that are compiled inside have these faults."""
        before, self.faults = self.faults, faults
        try:
            yield
        finally:
            self.faults = before

    def _compile(self, gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        started = time.perf_counter()
        if any(isinstance(value, torch.SymInt) for value in example_inputs):
            raise NotImplementedError("neuron: dynamic shapes are not supported")
        passes.apply(gm, self.faults)
        devices = _output_devices(gm)
        _move_to_host(gm)
        took = int(1e6 * (time.perf_counter() - started))
        self.graphs.append(GraphMetrics(f"graph_{len(self.graphs)}", len(gm.graph.nodes), took))

        def artefact(*values: Any) -> list[Any]:
            out = gm(*(value.cpu() if isinstance(value, torch.Tensor) else value for value in values))
            return [v.to(d) if isinstance(v, torch.Tensor) else v for v, d in zip(out, devices, strict=True)]

        return make_boxed_func(artefact)


def _output_devices(gm: GraphModule) -> list[torch.device | None]:
    (outputs,) = gm.graph.output_node().args
    values = [getattr(node, "meta", {}).get("val") for node in outputs]
    return [value.device if isinstance(value, torch.Tensor) else None for value in values]


def _move_to_host(gm: GraphModule) -> None:
    """Rewrites a graph of the device's ops as one of the CPU's."""
    for node in gm.graph.nodes:
        if "device" in node.kwargs and node.kwargs["device"] is not None:
            node.update_kwarg("device", torch.device("cpu"))
        if node.op == "get_attr" and isinstance(value := getattr(gm, node.target, None), torch.Tensor):
            setattr(gm, node.target, value.cpu())
    gm.recompile()


def install(neuron: ModuleType) -> NeuronBackend:
    """Registers the backend under the name `neuron`, and its metrics in `torch.neuron`."""
    backend = NeuronBackend()
    torch._dynamo.register_backend(backend, name="neuron")
    neuron.get_dynamo_metrics = lambda: list(backend.graphs)
    return backend
