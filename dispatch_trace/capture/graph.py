"""`tap`: a Dynamo backend that wraps another and records op-level values inside the compiled graph.

Guarantees: a graph is compiled once, with its taps, and runs as it is whether something records or not; a
recorded value is the one that the compiled code computed; a graph that cannot be tapped is an error, never
silence. What it costs: the tapped values are outputs of the graph, and a compiler that would have fused them
away no longer does (`only_materialised`, docs/compiled.md).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from dispatch_trace.capture import graph_compile
from dispatch_trace.capture.frames import walk_modules
from dispatch_trace.capture.graph_code import code_of
from dispatch_trace.capture.graph_plan import Entry, is_own
from dispatch_trace.capture.graph_run import CompiledFrame
from dispatch_trace.capture.inline import ACTIVE
from dispatch_trace.errors import CaptureError, ConfigError, DispatchTraceError
from dispatch_trace.patterns import Selector, compile_select, select_modules

_INTERPRETED = ("eager", "aot_eager")


def tap(
    backend: str | Callable[..., Any] = "inductor",
    *,
    select: str | Iterable[str] | None = None,
    only_materialised: bool = False,
) -> Tap:
    """A backend for `torch.compile` that records the ops inside compiled graphs.

        compiled = torch.compile(model, backend=dt.tap("inductor"))
        with dt.record("compiled.trace", compiled, save="tensors"):
            compiled(x)

    Args:
      backend: "eager", "aot_eager", "inductor", any other registered name, or a callable that takes
        (graph module, example inputs) and returns a function. Backends other than the first three are given
        AOTAutograd's graphs (aten ops, forward and backward apart, no decompositions).
      select: one pattern or several over module paths, below the compiled model or below the root of the
        recording that is on when it compiles; ops of these modules and all beneath them are tapped.
      only_materialised: with inductor, tap only what it keeps in buffers anyway, so that fusion and results
        stay as they are; it compiles every graph twice. Other backends fuse nothing that we know of, and
        every op is tapped.
    Returns: the backend.
    Raises:
      ConfigError: no such backend; names the closest.
      PatternError: as `dt.record`.
    """
    name, function = _resolve(backend)
    return Tap(name, function, select=select, only_materialised=only_materialised)


def _resolve(backend: Any) -> tuple[str, Callable[..., Any]]:
    from torch._dynamo.backends.registry import list_backends, lookup_backend
    from torch._dynamo.exc import InvalidBackend

    if isinstance(backend, Tap):
        raise ConfigError("backend: dt.tap(...) wraps a backend, not another dt.tap(...).")
    if isinstance(backend, str):
        try:
            return backend, lookup_backend(backend)
        except InvalidBackend:
            from rapidfuzz import process

            names = list_backends(exclude_tags=())
            closest = [name for name, _, _ in process.extract(backend, names, limit=3)]
            raise ConfigError(
                f"backend={backend!r}: torch.compile knows no backend of that name. "
                f"Closest: {', '.join(map(repr, closest))}."
            ) from None
    if not callable(backend):
        raise ConfigError(
            f"backend: expected a name or a callable (graph module, example inputs), got "
            f"{type(backend).__name__}."
        )
    return getattr(backend, "__name__", type(backend).__name__), backend


class Tap:
    """The backend that `tap` returns.

    Attributes:
      name: of the wrapped backend, by which torch and hooks on the model treat the whole.
      runs_unknown_ops: operators that only this package knows may stand in its graphs.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        *,
        select: str | Iterable[str] | None,
        only_materialised: bool,
    ) -> None:
        self.name = name
        self.compiler_name = self.__name__ = name
        self.only_materialised = only_materialised
        self.runs_unknown_ops = name in (*_INTERPRETED, "inductor") or bool(
            getattr(function, "runs_unknown_ops", False)
        )
        self._function = function
        self._selector: Selector | None = None if select is None else compile_select(select)
        # Paths below what was compiled; the backend outlives many a model.
        self._paths: weakref.WeakKeyDictionary[torch.nn.Module, set[str]] = weakref.WeakKeyDictionary()

    @property
    def wrapped(self) -> Callable[..., Any]:
        """The backend without taps."""
        return self._function

    def __call__(
        self, module: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any
    ) -> Callable[..., Any]:
        """Compiles one graph of Dynamo's."""
        from torch._dynamo.exc import TorchDynamoException

        if all(is_own(node) for node in module.graph.nodes if node.op.startswith("call")):
            return module  # a hook of ours, by itself after a graph break
        code, root = code_of(module, inputs)
        frame = CompiledFrame(code, f"compiled: {self.name}")
        try:
            wanted = self._wanted(root)
            frame.run = self._compile(frame, module, inputs, wanted, options)
        except DispatchTraceError as error:
            return _raise(error)
        except TorchDynamoException:
            raise  # how Dynamo asks for another attempt
        except Exception as error:
            return _raise(self._rejected(error))
        return frame

    def _compile(
        self,
        frame: CompiledFrame,
        module: torch.fx.GraphModule,
        inputs: Sequence[Any],
        wanted: graph_compile.Wanted,
        options: dict[str, Any],
    ) -> Callable[..., Any]:
        if self.name == "eager":
            return graph_compile.eager(frame, module, wanted)
        if self.name == "aot_eager":
            return graph_compile.aot_eager(frame, module, inputs, wanted)
        if self.name == "inductor":
            return graph_compile.inductor(
                frame, module, inputs, wanted, options, only_materialised=self.only_materialised
            )
        return graph_compile.through_aot(
            frame, module, inputs, wanted, self._function, options, opaque=self.runs_unknown_ops
        )

    def _rejected(self, error: Exception) -> CaptureError:
        found = CaptureError(
            f"backend {self.name!r} rejected the tapped graph: {type(error).__name__}: {error}\n"
            "Compile without dt.tap to see whether the program itself compiles. If it does, tap less: "
            "select=..., or only_materialised=True with inductor."
        )
        found.__cause__ = error
        return found

    # -- selection -----------------------------------------------------------------------------------

    def _wanted(self, root: torch.nn.Module | None) -> graph_compile.Wanted:
        """Whether the ops of a module call are to be tapped."""
        selector = self._selector
        if selector is None:
            return lambda entries: True
        if root is not None and root not in self._paths:
            for path, each, _ in walk_modules(root):
                self._paths.setdefault(each, set()).add(path)
        paths = {id(each): set(known) for each, known in self._paths.items()}
        for tracer in ACTIVE:
            for _, path, each in tracer.table.items():
                paths.setdefault(id(each), set()).add(path)
        if not paths:
            raise ConfigError(
                "dt.tap(select=...) needs a compiled module; a bare function has no module paths."
            )
        everything = sorted(set().union(*paths.values()))
        for pattern in selector.patterns:
            select_modules([pattern], everything)
        top = id(root)

        def wanted(entries: tuple[Entry, ...]) -> bool:
            innermost = next((e.module for e in reversed(entries) if e.module in paths), top)
            return any(selector.covers(path) for path in paths.get(innermost, ()))

        return wanted


def _raise(error: DispatchTraceError) -> Callable[..., Any]:
    """Code that says what is wrong: an error raised while compiling would come out as Dynamo's own."""

    def refuse(*args: Any) -> Any:
        raise error

    return refuse


__all__ = ["Tap", "tap"]
