"""Module capture below `torch.compile`: forward hooks that Dynamo traces into the compiled graph.

A *region* is a module whose call runs compiled code: `torch.compile(module)`, or a module on which
`.compile()` was called. Its submodules get hooks that hand copies of what they see to a registry; traced,
these become outputs of the graph, and the registry is emptied before each call, so that the graph stays one
and every call's values are its own.

Guarantees: the copy is what the compiled code computed (an opaque operator makes it, because inductor may
hand back a wrong clone); compiled code of the program's own is left as it is, because a region compiles
into a cache of its own while it is watched; what was compiled before is noticed. Leaves to `modules` when a
region is entered and left, and to the registry's reader what becomes of the values.
"""

from __future__ import annotations

import copy
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from dispatch_trace import neuron
from dispatch_trace.capture.header import device_of
from dispatch_trace.capture.tapop import tap_op
from dispatch_trace.registry import Entry, TensorRegistry, clone

# Backends that run operators they do not know; every other gets the plain clone (NEURON.md, rule 3).
_OPEN_BACKENDS = frozenset({"eager", "aot_eager", "aot_eager_decomp_partition", "inductor", "cudagraphs"})
_is_compiling = torch.compiler.is_compiling


class TracedHooks:
    """Forward hooks on modules of one region, which hand what they see to a registry.

    Args:
      modules: (name under which the values are registered, module); a module may come once only.
      registry: takes the values.
      inputs: hand over what the modules are called with, too.

    Attributes:
      num_eager: how often a hook has run outside compiled code.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, torch.nn.Module]],
        registry: TensorRegistry,
        *,
        inputs: bool,
    ) -> None:
        self._modules = list(modules)
        self._registry = registry
        self._inputs = inputs
        self._handles: list[Any] = []
        self.num_eager = 0

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self._modules]

    def install(self) -> None:
        """Puts the hooks on, behind those that are there: they see what the caller gets."""
        for name, module in self._modules:
            enter, leave = self._hooks(name)
            self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(leave))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def ids(self) -> frozenset[int]:
        """Numbers of the hooks, by which a copy of the model can be freed of them."""
        return frozenset(handle.id for handle in self._handles)

    def _hooks(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        registry, inputs = self._registry, self._inputs

        def enter(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            if not _is_compiling():  # a constant to the tracer: no guard comes of it
                self.num_eager += 1
            registry.register_module_inputs(name, (args, kwargs) if inputs else None)

        def leave(module: torch.nn.Module, args: Any, out: Any) -> None:
            registry.register_module_tensor(name, out)

        return enter, leave


class Isolation:
    """While it lasts, a compiled module compiles anew, apart from what the program has compiled.

    What the program had compiled is neither used nor thrown away: hooks that are put on after a
    compilation would be ignored in silence, and code compiled with hooks must not outlive them. Dynamo
    keeps compiled code by the code object of the frame, so the frame is one of our own, and by region.
    """

    def __init__(self, module: torch.nn.Module, context: Any) -> None:
        self._module = module
        self._context = context
        self._region: Any = None
        self._compiled: Any = None

    def begin(self) -> None:
        from torch._dynamo import eval_frame

        self._region = getattr(self._context, "_isolate_recompiles_id", None)
        if self._region is not None:
            self._context._isolate_recompiles_id = next(eval_frame._next_isolate_recompiles_id)
        body = getattr(self._module, "_orig_mod", None)
        if body is not None:
            self._compiled = self._module.forward
            self._module.forward = self._context(_own_frame(body))
        else:
            self._compiled = self._module._compiled_call_impl
            self._module._compiled_call_impl = self._context(_own_frame(self._module._call_impl))

    def end(self) -> None:
        if self._compiled is None:
            return
        if self._region is not None:
            self._context._isolate_recompiles_id = self._region
        if hasattr(self._module, "_orig_mod"):
            self._module.forward = self._compiled
        else:
            self._module._compiled_call_impl = self._compiled
        self._compiled = None


def _own_frame(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` behind a frame whose code object is new."""

    def compiled_region(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return types.FunctionType(
        compiled_region.__code__.replace(),
        compiled_region.__globals__,
        compiled_region.__name__,
        compiled_region.__defaults__,
        compiled_region.__closure__,
    )


class Region:
    """One module whose call runs compiled code.

    Args:
      module: what the program calls: an `OptimizedModule`, or a module with `.compile()` called.

    Attributes:
      body: the module whose code was compiled.
      context: Dynamo's, which knows the backend.
      backend: name of the backend.
      tap: makes the copies inside its graphs.
      registry: takes what the hooks see.
      modules: the hooked modules; their hooks name them by their place here.
      lane: the Neuron lane it runs on, None elsewhere; there only hooks are touched (NEURON.md, rule 2).
      tracked, graphs_before: what the lane and Dynamo had counted before the first call.
      num_calls, num_captures: calls of the region that were recorded, and values that came out of them.
      seen: places of the modules that have returned something.
      num_entered, num_eager: calls of hooked modules, and of them those outside compiled code.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.body: torch.nn.Module = getattr(module, "_orig_mod", module)
        self.context = compile_context(module)
        self.backend = backend_name(self.context)
        self.lane = neuron.lane_of(device=device_of({"": self.body}), compile_backend=self.backend)
        self.tap = tap_for(self.context, lane=self.lane)
        self.registry = TensorRegistry(self.tap)
        self.modules: list[torch.nn.Module] = []
        self.hooks: TracedHooks | None = None
        self.num_calls = 0
        self.num_captures = 0
        self.seen: set[int] = set()
        self.num_entered = 0
        self.num_eager = 0
        self.tracked: neuron.OpTracking | None = None
        self.graphs_before = 0
        self._isolation = None if self.lane else Isolation(module, self.context)
        self._outside: TensorRegistry | None = None

    @property
    def has_compiled(self) -> bool:
        """Whether this module has been compiled and run already."""
        return has_compiled(self.module, self.context)

    def watch(self, modules: Sequence[torch.nn.Module], *, inputs: bool) -> None:
        """Hooks the modules; the next call compiles anew, with them."""
        self.modules = list(modules)
        numbered = [(str(i), module) for i, module in enumerate(self.modules)]
        self.hooks = TracedHooks(numbered, self.registry, inputs=inputs)
        self.hooks.install()
        self.isolate()

    def release(self) -> None:
        """Takes the hooks off; the program's own compiled code is in force again."""
        if self.hooks is not None:
            self.hooks.remove()
            self.hooks = None
        if self._isolation is not None:
            self._isolation.end()
        self.registry.clear()
        self.modules = []

    @property
    def tapped(self) -> bool:
        """Whether the backend records ops inside the graph by itself (`dt.tap`)."""
        return _wrapped_backend(self.context) is not None

    def isolate(self) -> None:
        """Has the region compile apart from what the program has compiled, where that may be asked."""
        if self._isolation is not None:
            self._isolation.begin()

    def enter(self) -> None:
        """Before each call: empties the registry, and has inline captures go there."""
        self.registry.clear()
        self._outside, TensorRegistry._instance = TensorRegistry._instance, self.registry

    def leave(self) -> list[Entry]:
        """After each call, also one that raised: what it captured."""
        TensorRegistry._instance, self._outside = self._outside, None
        entries = self.registry.take()
        self.num_calls += 1
        self.num_captures += sum(kind != "enter" for kind, _, _ in entries)
        self.seen.update(int(name) for kind, name, _ in entries if kind == "module")
        self.num_entered += sum(kind == "enter" for kind, _, _ in entries)
        return entries

    def plain_copy(self) -> Callable[..., Any]:
        """A copy of the body, compiled in the same way, without hooks and without taps.

        Raises:
          Exception: the model cannot be deep-copied.
        """
        hooks = frozenset() if self.hooks is None else self.hooks.ids
        body = copy.deepcopy(self.body)
        for module in body.modules():
            for table in (module._forward_hooks, module._forward_pre_hooks):
                for number in hooks & table.keys():
                    del table[number]
        call = body if self.body is not self.module else body._call_impl
        frame = _own_frame(call)
        wrapped = _wrapped_backend(self.context)
        if wrapped is not None:
            return torch.compile(frame, backend=wrapped, fullgraph=bool(self.context.fullgraph))
        compiled: Callable[..., Any] = self.context(frame)
        return compiled


def compile_context(module: torch.nn.Module) -> Any:
    """Dynamo's context of a module whose call runs compiled code, else None."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is None:  # nothing can have been compiled
        return None
    if isinstance(module, eval_frame.OptimizedModule):
        context = module.dynamo_ctx
    elif module._compiled_call_impl is not None:
        cells = getattr(module._compiled_call_impl, "__closure__", None) or ()
        found = [c.cell_contents for c in cells if _is_context(eval_frame, c)]
        context = found[0] if found else None
    else:
        return None
    # `torch.compiler.disable(module)` wraps too; what it wraps runs eagerly.
    return None if isinstance(context, eval_frame.DisableContext) else context


def _is_context(eval_frame: Any, cell: Any) -> bool:
    try:
        return isinstance(cell.cell_contents, eval_frame._TorchDynamoContext)
    except ValueError:  # an empty cell
        return False


def _backend(context: Any) -> Any:
    from torch._dynamo import eval_frame

    if hasattr(eval_frame, "innermost_backend"):
        return eval_frame.innermost_backend(context.callback)
    innermost: Any = eval_frame.innermost_fn  # torch before 2.13
    return innermost(context.callback, unaltered_fn_attr="_torchdynamo_orig_backend")


def _wrapped_backend(context: Any) -> Any:
    """The backend that a tap wraps; None of any other."""
    backend = _backend(context)
    return getattr(getattr(backend, "compiler_fn", backend), "wrapped", None)


def backend_name(context: Any) -> str:
    """Name of the backend of a compiled module: "inductor", "aot_eager", or that of a function."""
    backend = _backend(context)
    name = getattr(backend, "compiler_name", None)
    if not isinstance(name, str):
        inner = getattr(backend, "compiler_fn", backend)
        name = str(getattr(inner, "__name__", type(inner).__name__))
    return name


def tap_for(context: Any, *, lane: neuron.Lane | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """What makes copies inside the graphs of this backend.

    An operator that the backend cannot see through, where it runs operators that it does not know; else a
    clone, which every backend can compile and inductor is known to get wrong.
    """
    name = backend_name(context)
    if name == "openxla":
        return neuron.distinct_copy
    return tap_op() if lane is None and name in _OPEN_BACKENDS else clone


def num_graphs() -> int:
    """Graphs that Dynamo has handed to backends in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def _entry_codes(module: torch.nn.Module, body: torch.nn.Module) -> list[Any]:
    """The code objects that Dynamo may compile for a call of this module."""
    found = [getattr(body.forward, "__func__", body.forward)]
    if body is not module:
        # For the classes of torch.nn there is a frame around the call (`wrap_inline`).
        found.append(getattr(module.forward, "_torchdynamo_orig_callable", None))
    return [f.__code__ for f in found if hasattr(f, "__code__")]


def has_compiled(module: torch.nn.Module, context: Any) -> bool:
    """Whether a compiled module has run before.

    Dynamo keeps what it compiled by code object, which the instances of a class share. An entry is this
    module's if it was made for its backend object, or if the module's own tensors carry the mark
    that tracing leaves on them.
    """
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    body = getattr(module, "_orig_mod", module)
    backend = _backend(context)
    entries: list[Any] = []
    for code in _entry_codes(module, body):
        entries += _debug_get_cache_entry_list(code)
        try:
            from torch._dynamo.eval_frame import _get_cache_entries_for_region

            entries += _get_cache_entries_for_region(code, context._isolate_recompiles_id)
        except (ImportError, AttributeError):  # torch before 2.13
            pass
    traced = any(
        hasattr(tensor, "_dynamo_static_input_type")
        for tensor in itertools.chain(body.parameters(), body.buffers())
    )
    return any(e.backend is backend or (traced and e.backend == backend) for e in entries)
