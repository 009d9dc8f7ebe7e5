"""`ModelCapture`: what an engine keeps beside each of its models, to record forwards of compiled code.

An engine compiles once and serves for hours; it cannot wrap its forwards in a `with` block, and its target,
draft and vision models run in one process. So hooks go on before compilation and stay; enabling and
disabling touches the writer only; each forward is bracketed by `setup_tensor_capture` and
`save_tensor_captures`; every model has a registry and a trace of its own. Guarantees: nothing that is
captured is lost in silence, and a refused forward leaves what was recorded before it as it is.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from dispatch_trace import neuron
from dispatch_trace.capture.captures import CaptureRecords
from dispatch_trace.capture.compiled import Region, TracedHooks, compile_context, has_compiled
from dispatch_trace.capture.frames import Frame, walk_modules
from dispatch_trace.capture.header import current_rank, device_of, plain_meta, trace_header
from dispatch_trace.capture.tapop import tap_op
from dispatch_trace.capture.tracer import Tracer
from dispatch_trace.config import DEFAULT_MAX_PENDING_BYTES, record_options
from dispatch_trace.errors import CaptureError, ConfigError, HookAfterCompileError, NoMatchError
from dispatch_trace.patterns import closest_paths, compile_select, select_modules
from dispatch_trace.registry import MANUAL_PREFIX, Entry, TensorRegistry, clone, first_tensor
from dispatch_trace.schema import StepInfo
from dispatch_trace.store.writer import TraceWriter

PHASES = {True: "prefill", False: "decode"}


class ModelCapture:
    """Records what chosen modules of one model return, forward by forward.

        capture = dt.ModelCapture(model, ["layers.0-3", "lm_head"], "captures", subdirectory="target")
        dt.TensorRegistry._instance = capture._registry       # before warm-up, for inline captures
        compiled = torch.compile(model, fullgraph=True)
        capture.register_clear_hook(compiled)
        ...                                                   # warm-up
        capture.enable()
        capture.setup_tensor_capture()
        compiled(**inputs)
        capture.save_tensor_captures(positions, is_prefill=True, req_ids=["a"])

    Args:
      model: the model, compiled later or just now; not yet run if compiled.
      modules: patterns over module paths (full-match regular expressions, `layers.0-3` expands).
      capture_dir: directory of the traces.
      capture_filter: names or patterns of what is written, over module paths and `manual.NAME` for
        inline captures; None for all.
      subdirectory: below `capture_dir`, such as "target", "draft", "vision"; each is a trace of its own.
      save: "stats" or "tensors".
      inputs: keep what the modules are called with, too.
      rank: number of this process; None asks torch.distributed, then $RANK.
      overwrite: replace this process's `rank{N}/` if it is there.
      meta: plain values for the header.
      max_pending_bytes: bound on what waits to be written, in bytes.

    Attributes:
      path: the trace.

    Raises:
      ConfigError: the model is no `torch.nn.Module`, or an option has no such value.
      HookAfterCompileError: it has been compiled and run.
      PatternError, NoMatchError: a pattern is none, or matches no module.
      TraceExistsError: there is a capture in that directory already.
      CaptureError: the directory cannot be written.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        modules: str | Sequence[str],
        capture_dir: str | os.PathLike[str],
        *,
        capture_filter: str | Iterable[str] | None = None,
        subdirectory: str = "",
        save: str = "tensors",
        inputs: bool = False,
        rank: int | None = None,
        overwrite: bool = False,
        meta: dict[str, Any] | None = None,
        max_pending_bytes: int = DEFAULT_MAX_PENDING_BYTES,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
        _refuse_warm(model)
        body = getattr(model, "_orig_mod", model)
        options = record_options(level="module", save=save, select=modules, inputs=inputs, params="none")
        by_path = {path: module for path, module, compiled in walk_modules(body) if not compiled}
        paths = select_modules(options.select, sorted(by_path), option="modules")
        # One object has one hook, which goes by the first of its names.
        first = {id(by_path[path]): path for path in reversed(paths)}
        chosen = [(path, by_path[path]) for path in paths if first[id(by_path[path])] == path]
        self._filter = _filter(capture_filter, paths)
        lane = neuron.lane_of(device=device_of({"": body}))
        self._model = body
        self._registry = TensorRegistry(clone if lane else tap_op())
        self.path = Path(capture_dir, subdirectory)
        writer = TraceWriter(
            self.path,
            {**trace_header(options, {"": body}, plain_meta(meta)), "capture": "engine"},
            rank=current_rank() if rank is None else rank,
            overwrite=overwrite,
            stats=options.stats,
            sketch=options.sketch,
            max_pending_bytes=max_pending_bytes,
            on_fault=lambda error: self._tracer.fault(error),
        )
        self._tracer = Tracer(writer, options, {"": body})
        self._hooks = TracedHooks(chosen, self._registry, inputs=inputs)
        self._hooks.install()
        self._steps = itertools.count()
        self._region: Region | None = None
        self._handle: Any = None
        self._enabled = False
        self._open = False
        self._outside: TensorRegistry | None = None
        self._forwards: list[list[Entry]] = []
        self._checked = False

    # -- set-up --------------------------------------------------------------------------------------

    def register_clear_hook(self, compiled: torch.nn.Module) -> None:
        """Has the registry emptied before each forward of `compiled`; needed once, before warm-up.

        Without it compiled code is compiled again on every call.

        Args:
          compiled: `torch.compile(model)`, or the model itself where it runs eagerly.

        Raises:
          ConfigError: it is no module, or wraps another model.
          HookAfterCompileError: it has been compiled and run.
        """
        if not isinstance(compiled, torch.nn.Module):
            raise ConfigError(
                f"register_clear_hook: expected the compiled module, got {type(compiled).__name__}. "
                "Compile the module, not a function around it."
            )
        if getattr(compiled, "_orig_mod", compiled) is not self._model:
            raise ConfigError(
                f"register_clear_hook: this {type(compiled).__name__} wraps another model than the "
                f"{type(self._model).__name__} that is captured."
            )
        _refuse_warm(compiled)
        if self._handle is not None:
            self._handle.remove()
        if compile_context(compiled) is not None:
            self._region = Region(compiled)
            self._registry.use_tap(self._region.tap)
            self._region.isolate()
            self._tracer.writer.amend_header(
                {"compile_backend": self._region.backend, "lane": self._region.lane or "eager"}
            )
        self._handle = compiled.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def _before_forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self._collect()

    def _collect(self) -> None:
        """Takes what the last forward left: kept inside a bracket, which may hold several."""
        entries = self._registry.take()
        if entries and self._open and self._enabled:
            self._forwards.append(entries)

    def enable(self) -> None:
        """From here on brackets are written. Compiles nothing."""
        self._enabled = True

    def disable(self) -> None:
        """From here on nothing is written. Compiles nothing: compiled code goes on copying."""
        self._enabled = False

    @property
    def enabled(self) -> bool:
        return self._enabled

    # -- one bracket ---------------------------------------------------------------------------------

    def setup_tensor_capture(self) -> None:
        """Opens a bracket: inline captures go to this model until it is saved."""
        if not self._open:
            self._outside = TensorRegistry._instance
        # Left open by a forward that raised: what it captured belongs to no step.
        self._forwards.clear()
        self._registry.clear()
        self._open = True
        TensorRegistry._instance = self._registry

    def abandon_tensor_capture(self) -> None:
        """Closes a bracket without writing, after a forward that raised."""
        if self._open:
            TensorRegistry._instance, self._outside = self._outside, None
            self._open = False
        self._forwards.clear()
        self._registry.clear()

    def save_tensor_captures(
        self, positions: torch.Tensor, is_prefill: bool, req_ids: Sequence[str] | None = None, **meta: Any
    ) -> None:
        """Closes the bracket, and writes what its forwards captured as one step.

        Args:
          positions: [num_tokens] or [batch, num_tokens] of the tokens that went in, padding included.
          is_prefill: whether the step is prefill or decode.
          req_ids: the requests in the batch, in its order.
          **meta: further plain values for the step (`tokens`, `valid_lengths`).

        Raises:
          CaptureError: no bracket is open; nothing was captured; a hooked module has not run.
          ConfigError: fewer positions than requests.
        """
        if not self._open:
            raise CaptureError(
                "save_tensor_captures() without setup_tensor_capture(): bracket each forward with both."
            )
        self._collect()
        forwards = list(self._forwards)
        self.abandon_tensor_capture()
        if not self._enabled:
            return
        requests = list(req_ids or ())
        num = int(positions.shape[0]) if isinstance(positions, torch.Tensor) and positions.dim() else 0
        if num < len(requests):
            raise ConfigError(
                f"positions: {num} for {len(requests)} requests ({', '.join(map(str, requests[:4]))}); "
                "expected one for each at least. Nothing of this step was written."
            )
        if not forwards:
            raise CaptureError(
                f"{self.path}: a forward captured nothing, of {len(self._hooks.names)} hooked modules. "
                "Its compiled code was made without the hooks: by an earlier call, or by another instance "
                "of the class. Call torch._dynamo.reset(), or compile with isolate_recompiles=True, and set "
                "the capture up before the first call."
            )
        step = next(self._steps)
        facts = plain_meta({"phase": PHASES[bool(is_prefill)], "req_ids": requests, "positions": positions})
        self._tracer.writer.put_step(StepInfo(step=step, meta={**facts, **plain_meta(meta)}))
        self._write(step, forwards)
        if not self._checked:
            self._checked = True
            self._check(forwards)

    @contextlib.contextmanager
    def bracket(
        self, positions: torch.Tensor, is_prefill: bool, req_ids: Sequence[str] | None = None, **meta: Any
    ) -> Iterator[None]:
        """Both ends of a bracket as a context; a forward that raises writes nothing."""
        self.setup_tensor_capture()
        try:
            yield
        except BaseException:
            self.abandon_tensor_capture()
            raise
        self.save_tensor_captures(positions, is_prefill, req_ids, **meta)

    def _write(self, step: int, forwards: list[list[Entry]]) -> None:
        tracer = self._tracer
        note = "" if self._region is None else f"compiled: {self._region.backend}"
        records = CaptureRecords(tracer, lambda name: [("", name)], note=note, wants=self._wants)
        frame = Frame("", "", 0, "fwd", step, None, None, False, False)
        with tracer.own_ops(tracer.state):
            for entries in forwards:
                records.put(frame, entries)
        tracer.counters.forget("", step - 1)

    def _wants(self, name: str) -> bool:
        return self._filter is None or self._filter.matches(name)

    def _check(self, forwards: list[list[Entry]]) -> None:
        """After the first step: every hook has captured, every capture holds a tensor, nothing fell back."""
        seen = {name: value for entries in forwards for kind, name, value in entries if kind == "module"}
        absent = [name for name in self._hooks.names if name not in seen]
        if absent:
            raise CaptureError(
                f"{self.path}: {len(self._hooks.names)} modules are hooked and {len(seen)} were captured. "
                f"Not captured: {_listed(absent)}: the forward does not call them. What was captured is kept."
            )
        empty = [name for name, value in seen.items() if first_tensor(value) is None]
        if empty:
            raise CaptureError(
                f"{self.path}: no tensor in the output of {_listed(empty)}. Select the module inside that "
                "returns one. What was captured is kept."
            )
        if self._region is not None and self._hooks.num_eager:
            raise CaptureError(
                f"{self.path}: {self._hooks.num_eager} calls of hooked modules ran eagerly, outside the "
                "compiled graph: a graph break or a fallback. What was captured is kept; compiled code did "
                "not compute it."
            )

    def close(self) -> None:
        """Takes the hooks off and ends the trace. Without it the trace ends with the process."""
        self.abandon_tensor_capture()
        self._hooks.remove()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if self._region is not None:
            self._region.release()
            self._region = None
        self._tracer.close()
        self._tracer.writer.close()

    def flush(self) -> None:
        """Returns when everything saved so far is on disk."""
        self._tracer.writer.flush()

    def __enter__(self) -> ModelCapture:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _refuse_warm(module: torch.nn.Module) -> None:
    context = compile_context(module)
    if context is not None and has_compiled(module, context):
        raise HookAfterCompileError(
            f"{type(getattr(module, '_orig_mod', module)).__name__} has been compiled and run already; hooks "
            "that come now would be ignored in silence. Set the capture up before warm-up."
        )


def _filter(given: str | Iterable[str] | None, paths: Sequence[str]) -> Any:
    """The capture filter, checked: a name or pattern that nothing can match is an error."""
    if given is None:
        return None
    patterns = [given] if isinstance(given, str) else list(given)
    selector = compile_select(patterns, option="capture_filter")
    for pattern in patterns:
        if pattern.startswith(MANUAL_PREFIX) or pattern.startswith("manual\\."):
            continue  # inline captures have no names before they happen
        if not any(compile_select(pattern).matches(path) for path in paths):
            raise NoMatchError(
                f"capture_filter={pattern!r} matched 0 of {len(paths)} captured modules. "
                f"Closest: {', '.join(map(repr, closest_paths(pattern, paths)))}."
            )
    return selector


def _listed(names: Sequence[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more
