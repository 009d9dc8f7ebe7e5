"""One way of compiling a tapped graph for each kind of backend.

`eager` runs Dynamo's graph under the recording's mode; `aot_eager` runs AOT graphs op by op; `inductor` gets
taps after AOTAutograd and its own decompositions; any other backend is given AOT graphs with taps in them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeAlias

import torch

from dispatch_trace.capture.graph_eager import run_under_modes
from dispatch_trace.capture.graph_inductor import (
    Materialised,
    add_taps,
    find_results,
    marking_decompositions,
    overwritten_inputs,
    sequence_offset,
)
from dispatch_trace.capture.graph_plan import Entry, Plan, entries_of, plan_of
from dispatch_trace.capture.graph_run import CompiledFrame, InterpretedGraph, TappedGraph, placeholders_of
from dispatch_trace.capture.ops import OpInfo
from dispatch_trace.capture.tapop import tap_op
from dispatch_trace.errors import CaptureError

Wanted: TypeAlias = Callable[[tuple[Entry, ...]], bool]


def eager(frame: CompiledFrame, module: torch.fx.GraphModule, wanted: Wanted) -> Callable[..., Any]:
    """The backend "eager"."""
    frame.num_tapped += 1
    return run_under_modes(frame, module, lambda node: wanted(entries_of(node)))


def aot_eager(
    frame: CompiledFrame, module: torch.fx.GraphModule, inputs: Sequence[Any], wanted: Wanted
) -> Callable[..., Any]:
    """The backend "aot_eager"."""

    def compiler(backward: bool) -> Callable[..., Any]:
        def compile_graph(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            frame.num_tapped += 1
            plan = _selected(plan_of(graph, backward=backward), wanted)
            return InterpretedGraph(frame, plan, overwritten=overwritten_inputs(graph.graph))

        return compile_graph

    return _aot(module, inputs, compiler(False), compiler(True))


def through_aot(
    frame: CompiledFrame,
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    wanted: Wanted,
    backend: Callable[..., Any],
    options: dict[str, Any],
    *,
    opaque: bool,
) -> Callable[..., Any]:
    """Any other backend.

    Args:
      opaque: the backend runs operators that it does not know; another gets plain clones as taps.
    """

    def compiler(backward: bool) -> Callable[..., Any]:
        def compile_graph(graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
            frame.num_tapped += 1
            plan = _selected(plan_of(copy.deepcopy(graph), backward=backward), wanted)
            nodes = {node.name: node for node in graph.graph.nodes}
            names = [name for name in _computed(plan) if name in nodes]
            op = tap_op() if opaque else torch.ops.aten.clone.default
            num_outputs = add_taps(graph.graph, [nodes[name] for name in names], op)
            graph.recompile()
            return TappedGraph(
                frame,
                plan,
                # Dynamo calls what a backend returns with plain arguments; a mark that says otherwise was
                # inherited (`aot_module_simplified` copies it from the boxed function it wraps).
                _listed(backend(graph, examples, **options)),
                num_outputs=num_outputs,
                taps=names,
                placeholders=placeholders_of(graph.graph),
                overwritten=overwritten_inputs(graph.graph),
                num_returned=_num_returned(num_outputs, backward=backward),
            )

        return compile_graph

    return _aot(module, inputs, compiler(False), compiler(True))


def inductor(
    frame: CompiledFrame,
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    wanted: Wanted,
    options: dict[str, Any],
    *,
    only_materialised: bool,
) -> Callable[..., Any]:
    """The backend "inductor"."""
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    plans = undecomposed(module, inputs, wanted, sparse=only_materialised)

    def inner_compile(
        graph: torch.fx.GraphModule, examples: Sequence[Any], **kwargs: Any
    ) -> Callable[..., Any]:
        frame.num_tapped += 1
        kwargs["get_decomp_fn"] = select_decomp_table  # ours are for tracing; this one is a key of caches
        plan = plans.get(bool(kwargs.get("is_backward", False)))
        if plan is None:
            raise CaptureError(
                "inductor compiles a backward graph that the trace without decompositions does not have. "
                "Record this model with dt.tap('aot_eager')."
            )
        offset = sequence_offset(plan, graph.graph) if plan.backward else 0
        results = find_results(plan, graph.graph, offset)
        results = {name: results[name] for name in _computed(plan) if name in results}
        if only_materialised:
            kept = _materialised(graph, examples, kwargs)
            results = {name: node for name, node in results.items() if node.name in kept}
        num_outputs = add_taps(graph.graph, list(results.values()), tap_op())
        graph.recompile()
        with _strides_of(num_outputs):
            code = compile_fx_inner(graph, examples, **kwargs)
        return TappedGraph(
            frame,
            plan,
            code,
            num_outputs=num_outputs,
            taps=list(results),
            placeholders=placeholders_of(graph.graph),
            overwritten=overwritten_inputs(graph.graph),
            num_returned=_num_returned(num_outputs, backward=plan.backward),
        )

    # A cached result would be code without taps: neither the graph nor the options tell the two apart.
    with functorch_config.patch(enable_autograd_cache=False):
        compiled: Any = compile_fx(
            module,
            inputs,
            inner_compile=inner_compile,  # type: ignore[arg-type]
            config_patches=_inductor_options(options),
            decompositions=marking_decompositions(),
        )
    if not frame.num_tapped and any(plan.sites for plan in plans.values()):
        raise CaptureError(
            "inductor compiled the graph without handing it to dt.tap. Record this model with "
            "dt.tap('aot_eager')."
        )
    return compiled  # type: ignore[no-any-return]


def undecomposed(
    module: torch.fx.GraphModule, inputs: Sequence[Any], wanted: Wanted, *, sparse: bool
) -> dict[bool, Plan]:
    """The ops of a Dynamo graph as eager recording shows them: plans of its forward and backward graphs."""
    from torch._functorch import config as functorch_config
    from torch._guards import TracingContext

    plans: dict[bool, Plan] = {}

    def keep(backward: bool) -> Callable[..., Any]:
        def compile_graph(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            plan = _selected(plan_of(graph, backward=backward), wanted)
            plans[backward] = dataclasses.replace(plan, sparse=sparse)
            return _boxed(graph.forward)

        return compile_graph

    context = TracingContext.try_get()
    before = dict(vars(context)) if context is not None else {}
    try:
        with functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True):
            _aot_graphs(copy.deepcopy(module), inputs, keep(False), keep(True))
    finally:
        if context is not None:
            vars(context).update(before)
    return plans


def _aot_graphs(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    forward: Callable[..., Any],
    backward: Callable[..., Any],
) -> Callable[..., Any]:
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._functorch.partitioners import default_partition

    compiled: Callable[..., Any] = aot_module_simplified(
        module,
        inputs,
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=forward,
        partition_fn=default_partition,
        decompositions={},
        keep_inference_input_mutations=True,
    )
    return compiled


def _aot(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    forward: Callable[..., Any],
    backward: Callable[..., Any],
) -> Callable[..., Any]:
    """AOTAutograd without decompositions, each op once: no value is computed again in backward."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config as functorch_config
    from torch._functorch.partitioners import default_partition

    with functorch_config.patch(enable_autograd_cache=False):
        compiled: Callable[..., Any] = aot_autograd(
            fw_compiler=forward,
            bw_compiler=backward,
            partition_fn=default_partition,
            keep_inference_input_mutations=True,
        )(module, inputs)
    return compiled


def _selected(plan: Plan, wanted: Wanted) -> Plan:
    sites = {node: site for node, site in plan.sites.items() if wanted(site.entries)}
    return dataclasses.replace(plan, sites=sites)


def _computed(plan: Plan) -> list[str]:
    """Names of the plan's nodes that hold a computed tensor: an op, or a part of what it returns."""
    names: list[str] = []
    infos: dict[Any, OpInfo] = {}
    for node in plan.sites:
        info = infos.get(node.target) or infos.setdefault(node.target, OpInfo(node.target, lambda base: True))
        if info.light or info.dropped:
            continue
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            names.append(node.name)
        elif isinstance(value, (tuple, list)):
            names += [u.name for u in node.users if isinstance(u.meta.get("val"), torch.Tensor)]
    return names


def _materialised(graph: torch.fx.GraphModule, examples: Sequence[Any], kwargs: dict[str, Any]) -> set[str]:
    """Names of the nodes that inductor keeps in buffers when nothing is tapped."""
    from torch._guards import TracingContext
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    found = Materialised()
    strides = TracingContext.report_output_strides() if TracingContext.try_get() else nullcontext()
    with strides, found.watching(), config.patch(fx_graph_cache=False, fx_graph_remote_cache=False):
        compile_fx_inner(copy.deepcopy(graph), examples, **kwargs)
    return found.names


@contextmanager
def _strides_of(num_outputs: int) -> Iterator[None]:
    """Reports the strides of the first outputs of a graph only, to whoever compiles it.

    AOTAutograd lays what backward is given out anew by these strides, in order: those of taps, which stand
    behind all others, would be taken for the strides of the gradients that come in.
    """
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    known = None if context is None else context.output_strides
    before = len(known or ())
    yield
    if known is not None:
        del known[before + num_outputs :]


def _inductor_options(options: dict[str, Any]) -> dict[str, Any] | None:
    """What `torch.compile(mode=…, options=…)` asks of inductor."""
    patches: dict[str, Any] = {}
    if options.get("mode") not in (None, "default"):
        from torch._inductor import list_mode_options

        patches.update(list_mode_options(options["mode"]))
    patches.update(options.get("options") or {})
    return patches or None


def _num_returned(num_outputs: int, *, backward: bool) -> int:
    """How many outputs of the graph that is being compiled reach the program: forward also returns what
    backward needs."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if backward or context is None or context.fw_metadata is None:
        return num_outputs if backward else 0
    return min(num_outputs, int(context.fw_metadata.num_forward_returns))


def _boxed(function: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """`function` in the form that takes a list, which it may empty."""
    return function if getattr(function, "_boxed_call", False) else _listed(function)


def _listed(function: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """A function of plain arguments in that form."""

    def boxed(args: list[Any]) -> Any:
        given = list(args)
        args.clear()
        out = function(*given)
        return out if isinstance(out, (tuple, list)) else (out,)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


__all__ = ["Wanted", "aot_eager", "eager", "inductor", "through_aot", "undecomposed"]
