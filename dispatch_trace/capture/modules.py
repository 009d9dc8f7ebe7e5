"""Module calls: entered and left, however the call was made, with everything that went in and came out.

Guarantees: each call of a module in the table is seen once, through `module(...)` and through
`module.forward(...)` alike; no hook is put on any module, because a hook on a child turns fused fast
paths off (`nn.TransformerEncoderLayer`); `nn.Module.__call__` and the `forward` of the classes in use are
wrapped while a recording lasts and put back in the end; what the call returns or raises passes unchanged.

Wrapping the class and not the object is deliberate: an object with its own `forward` attribute would
carry the recorder into copies and pickles of the model.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

import torch

from dispatch_trace.capture.frames import Frame, ThreadState, mark_sequence, resolve_path
from dispatch_trace.capture.ops import OpRecorder
from dispatch_trace.capture.tracer import Tracer
from dispatch_trace.schema import RawRecord, RawSlot

_MAX_DEPTH = 400
_MISSING = object()


def flatten(value: Any, name: str, depth: int = 0) -> list[tuple[str, Any]]:
    """The leaves of a nested structure with their slot names.

    Enters lists, tuples, mappings and dataclasses, registered with pytree or not. Anything else is a
    leaf: tensors, None and scalars keep their value, other objects their type.
    """
    if isinstance(value, torch.Tensor) or value is None or isinstance(value, (bool, int, float, str)):
        return [(name, value)]
    if depth >= _MAX_DEPTH:
        return [(name, value)]
    found: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        for key, item in list(value.items()):
            found += flatten(item, name + _key(key), depth + 1)
        return found or [(name, value)]
    if isinstance(value, (list, tuple)):
        fields = getattr(value, "_fields", None)
        for i, item in enumerate(value):
            found += flatten(item, f"{name}.{fields[i]}" if fields else f"{name}[{i}]", depth + 1)
        return found or [(name, value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                found += flatten(getattr(value, field.name), name + _key(field.name), depth + 1)
        return found or [(name, value)]
    return [(name, value)]


def _key(key: Any) -> str:
    if isinstance(key, str):
        return f".{key}" if key.isidentifier() else f"[{json.dumps(key)}]"
    if isinstance(key, int) and not isinstance(key, bool):
        return f"[{key}]"
    return f"[{json.dumps(str(key))}]"


class OpenCall:
    """One call between its entry and its end: where it stands, and what has to be undone."""

    __slots__ = ("frame", "is_root", "mode", "state")

    def __init__(self, state: ThreadState, frame: Frame, mode: OpRecorder | None, is_root: bool) -> None:
        self.state = state
        self.frame = frame
        self.mode = mode
        self.is_root = is_root


class ModuleRecorder:
    """Wraps calls and forwards for one recording.

    Args:
      tracer: the recording.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._original_call: Any = None
        self._wrapper: Any = None
        self._wrapped_forwards: dict[type, Any] = {}

    def install(self) -> None:
        """Wraps `nn.Module.__call__`, and `forward` of every class in the table."""
        original = self._original_call = torch.nn.Module.__call__
        begin, end, fail = self._begin, self._end, self._fail
        tracer = self._tracer
        # A wrapper costs the program stack depth, and deep models come close to the limit: where
        # nobody else has wrapped it, torch's own first frame is stepped over.
        plain = original.__name__ == "_wrapped_call_impl"

        @functools.wraps(original)
        def call(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not tracer.active:
                return original(module, *args, **kwargs)
            opened = begin(module, args, kwargs)
            if opened is None:
                return original(module, *args, **kwargs)
            try:
                if plain and module._compiled_call_impl is None:
                    out = module._call_impl(*args, **kwargs)
                else:
                    out = original(module, *args, **kwargs)
            except BaseException as error:
                fail(opened, error)
                raise
            end(opened, out)
            return out

        self._wrapper = call
        torch.nn.Module.__call__ = call  # type: ignore[method-assign]
        for module in list(tracer.table.modules()):
            self._wrap_forward(type(module))

    def remove(self) -> None:
        """Puts back what `install` replaced, where nobody has replaced it again."""
        if torch.nn.Module.__call__ is self._wrapper:
            torch.nn.Module.__call__ = self._original_call  # type: ignore[method-assign]
        for cls, (wrapper, own) in self._wrapped_forwards.items():
            if cls.__dict__.get("forward") is wrapper:
                if own is _MISSING:
                    del cls.forward  # type: ignore[attr-defined]
                else:
                    cls.forward = own  # type: ignore[attr-defined]
        self._wrapped_forwards.clear()

    def _wrap_forward(self, cls: type) -> None:
        if cls in self._wrapped_forwards or _is_compiled_class(cls):
            return
        own = cls.__dict__.get("forward", _MISSING)
        original = getattr(cls, "forward", None)
        if not callable(original) or isinstance(own, (staticmethod, classmethod, property)):
            return
        begin, end, fail = self._begin, self._end, self._fail
        tracer = self._tracer

        @functools.wraps(original)
        def forward(self: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not tracer.active:
                return original(self, *args, **kwargs)
            frame = tracer.state.frame
            if frame is not None and frame.module is self:
                return original(self, *args, **kwargs)  # the body of a call that is open already
            opened = begin(self, args, kwargs)
            if opened is None:
                return original(self, *args, **kwargs)
            try:
                out = original(self, *args, **kwargs)
            except BaseException as error:
                fail(opened, error)
                raise
            end(opened, out)
            return out

        try:
            cls.forward = forward  # type: ignore[attr-defined]
        except (AttributeError, TypeError):  # a class that forbids it: its calls are still seen
            return
        self._wrapped_forwards[cls] = (forward, own)

    # -- one call ------------------------------------------------------------------------------------

    def _begin(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> OpenCall | None:
        """Opens a call, or says that this one is not for us."""
        tracer = self._tracer
        state = tracer.state
        if state.busy:
            return None
        paths = tracer.table.get(module)
        if paths is None:
            if not (tracer.adopts_root and state.frame is None and not tracer.table.roots):
                return None
            tracer.table.add_root("", module)
            for each in list(tracer.table.modules()):
                self._wrap_forward(type(each))
            paths = tracer.table.get(module)
            assert paths is not None
        parent = state.frame
        if getattr(module, "_orig_mod", None) is not None and parent is not None:
            return None  # a compiled submodule: its region is its parent's
        frame = None
        try:
            frame = self._enter(state, module, paths, parent, args, kwargs)
        except Exception as error:
            tracer.fault(error)
        if frame is None:
            return None
        mode = self._mode_for_thread(state)
        state.frame = frame
        is_root = parent is None and frame.path == ""
        if is_root:
            tracer.root_entered(frame.model)
        if mode is not None:
            mode.start()
        return OpenCall(state, frame, mode, is_root)

    def _unwind(self, opened: OpenCall) -> None:
        state = opened.state
        if opened.mode is not None:
            opened.mode.stop()
        state.frame = opened.frame.parent
        if opened.is_root:
            self._tracer.root_left(opened.frame.model)

    def _end(self, opened: OpenCall, out: Any) -> None:
        self._unwind(opened)
        self._leave(opened.state, opened.frame, out, "")

    def _fail(self, opened: OpenCall, error: BaseException) -> None:
        self._unwind(opened)
        self._leave(opened.state, opened.frame, _MISSING, f"raised {type(error).__name__}")

    def _mode_for_thread(self, state: ThreadState) -> OpRecorder | None:
        """A dispatch mode for a thread that has none yet: modes are thread-local."""
        if state.modes or self._tracer.options.level != "op":
            return None
        self._tracer.number_thread(state)
        return OpRecorder(self._tracer)

    def _enter(
        self,
        state: ThreadState,
        module: torch.nn.Module,
        paths: list[tuple[str, str]],
        parent: Frame | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Frame | None:
        tracer = self._tracer
        model, path = resolve_path(paths, parent)
        if parent is not None:
            step = parent.step
        elif path == "" and torch._C._current_autograd_node() is None:
            step = tracer.step_of_root_call(model)
        elif tracer.is_running(model) or tracer.adopts_root or tracer.in_bracket() or tracer.recorded_steps:
            step = tracer.last_step[1]
            if torch._C._current_autograd_node() is None and not (
                tracer.is_running(model) or tracer.adopts_root or tracer.in_bracket()
            ):
                return None
        else:
            return None
        phase, call, step = tracer.phase_and_call(state, model, path, step)
        options = tracer.options
        wanted = options.wants_step(step)
        frame = Frame(
            model=model,
            path=path,
            call=call,
            phase=phase,
            step=step,
            module=module,
            parent=parent,
            records_ops=wanted and options.wants_ops_of(path),
            records_module=wanted and options.wants_module(path),
        )
        frame.opened = tracer.upcoming_seq
        if torch.is_grad_enabled() and phase == "fwd":
            mark_sequence(state, frame)
        if wanted and phase == "fwd":
            with tracer.own_ops(state):
                if parent is None and path == "":
                    tracer.record_parameters(state, model, step)
                tracer.record_written_parameters(state, step)
        if frame.records_module and options.inputs:
            with tracer.own_ops(state):
                tracer.set_save(options.save_of(path))
                for i, value in enumerate(args):
                    self._add_slots(frame.inputs, value, f"in[{i}]", "in")
                for name, value in kwargs.items():
                    self._add_slots(frame.inputs, value, f"in.{name}", "in")
        return frame

    def _add_slots(self, slots: list[RawSlot], value: Any, name: str, role: str) -> None:
        for leaf, item in flatten(value, name):
            slots += self._tracer.value_slots(leaf, item, role)

    def _leave(self, state: ThreadState, frame: Frame, out: Any, note: str) -> None:
        tracer = self._tracer
        try:
            if torch.is_grad_enabled() and frame.phase == "fwd":
                mark_sequence(state, frame.parent)
            tracer.num_calls += 1
            if not frame.records_module:
                return
            slots = frame.inputs
            with tracer.own_ops(state):
                tracer.set_save(tracer.options.save_of(frame.path))
                first = len(slots)
                if out is not _MISSING:
                    self._add_slots(slots, out, "out", "out")
                if frame.parent is None:
                    tracer.record_written_parameters(state, frame.step)
            if not note and getattr(frame.module, "_orig_mod", None) is not None:
                note = "opaque: compiled region"
            producer = -1
            for slot in slots[first:]:
                if slot.is_tensor and slot.producers:
                    producer = slot.producers[-1][0]
                    break
            tracer.put(
                RawRecord(
                    tracer.next_seq(),
                    "module",
                    step=frame.step,
                    model=frame.model,
                    grad_phase=frame.phase,
                    module=frame.path,
                    call=frame.call,
                    slots=slots,
                    producer=producer,
                    opened=frame.opened,
                    thread=state.number,
                    note=note,
                )
            )
        except Exception as error:
            tracer.fault(error)


def _is_compiled_class(cls: type) -> bool:
    return cls.__module__.startswith("torch._dynamo")
