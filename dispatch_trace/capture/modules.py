"""Module calls: entered and left, however the call was made, with everything that went in and came out.

Guarantees: each call of a module in the table is seen once, through `module(...)` and through
`module.forward(...)` alike; no hook is put on any module, because a hook on a child turns fused fast
paths off (`nn.TransformerEncoderLayer`); `nn.Module.__call__` and the `forward` of the classes in use are
wrapped while a recording lasts and put back in the end; what the call returns or raises passes unchanged.

Wrapping the class and not the object is deliberate: an object with its own `forward` attribute would
carry the recorder into copies and pickles of the model.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from dispatch_trace.capture import meta
from dispatch_trace.capture.compiled import Region, compile_context
from dispatch_trace.capture.frames import (
    STEPS_KEPT,
    Frame,
    ModuleTable,
    ThreadState,
    forget_marks,
    mark_sequence,
    resolve_path,
)
from dispatch_trace.capture.plain_calls import Site, calls_forward_only
from dispatch_trace.capture.regions import Regions, check_fresh, find_regions
from dispatch_trace.capture.tracer import Tracer
from dispatch_trace.nested import flatten, flatten_arguments

_MISSING = object()
_current_node = torch._C._current_autograd_node
_is_compiling = torch.compiler.is_compiling
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_compiler: Any = torch.compiler


class ModuleRecorder:
    """Wraps calls and forwards for one recording.

    Args:
      tracer: the recording.
      regions: its compiled regions.
    """

    def __init__(self, tracer: Tracer, regions: Regions) -> None:
        self._tracer = tracer
        self._regions = regions
        self._original_call: Any = None
        self._plain = False
        self._wrapper: Any = None
        self._wrapped_forwards: dict[type, Any] = {}
        self._bodies: dict[type, tuple[Any, Any]] = {}
        self._sites: dict[int, Site] = {}
        self._skipped: set[int] = set()

    def install(self) -> None:
        """Wraps `nn.Module.__call__`, and `forward` of every class in the table."""
        original = self._original_call = torch.nn.Module.__call__
        begin, end, fail = self._begin, self._end, self._fail
        tracer = self._tracer
        # A wrapper costs the program stack depth, and deep models come close to the limit: where
        # nobody else has wrapped it, torch's own first frames are stepped over.
        plain = self._plain = original.__name__ == "_wrapped_call_impl"
        bodies = self._bodies

        @functools.wraps(original)
        def call(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if not tracer.active or _is_compiling():
                return original(module, *args, **kwargs)
            body = bodies.get(type(module)) if plain else None
            opened = begin(module, args, kwargs)
            if opened is None:
                return original(module, *args, **kwargs)
            try:
                if body is not None and calls_forward_only(module, body[0]):
                    out = body[1](module, *args, **kwargs)
                elif plain and module._compiled_call_impl is None:
                    out = module._call_impl(*args, **kwargs)
                else:
                    out = original(module, *args, **kwargs)
            except BaseException as error:
                fail(opened, error)
                raise
            end(opened, out)
            return out

        self._wrapper = self._short_call(call)
        torch.nn.Module.__call__ = self._wrapper  # type: ignore[method-assign]
        self._prepare_modules()

    def watch(self, regions: list[Region]) -> None:
        """Watches compiled regions: within them nothing is seen but by their hooks."""
        if regions:
            self._sites.clear()
            self._regions.watch(regions)

    def _prepare_modules(self) -> None:
        """Wraps the forward of every class in the table, and works out what calls of each module share."""
        tracer = self._tracer
        for module in list(tracer.table.modules()):
            self._wrap_forward(type(module))
            paths, body = tracer.table.get(module) or [], self._bodies.get(type(module))
            usual = self._plain and tracer.notes_rows and len(paths) == 1
            usual = usual and id(module) not in tracer.table.compiled
            if usual and body is not None and tracer.options.steps is None:
                model, path = paths[0]
                self._sites[id(module)] = Site(model, path, *tracer.wanted(path, 0), *body)
        self._skipped.clear()
        self._skipped.update(self._far_from_selected())
        for number in self._skipped:
            self._sites.pop(number, None)

    def _far_from_selected(self) -> set[int]:
        """Modules (their ids) whose calls leave no trace: nothing is wanted of them, above them or below.

        Their ops belong to the nearest call that is followed, of which nothing is wanted either.
        """
        tracer, options = self._tracer, self._tracer.options
        if options.selector is None or tracer.table.compiled:
            return set()
        places = [(model, path, id(module)) for model, path, module in tracer.table.items()]
        wanted = {(m, p) for m, p, _ in places if options.wants_ops_of(p) or options.wants_module(p)}
        above = {(model, part) for model, path in wanted for part in _above(path)}
        followed = {
            number
            for model, path, number in places
            if (model, path) in wanted
            or (model, path) in above
            or path == ""
            or any((model, part) in wanted for part in _above(path))
        }
        return {number for _, _, number in places} - followed

    def _short_call(self, call: Any) -> Any:
        """`call` with the plain case in one piece: functions cost more than what they do.

        Plain is a call inside a call of the same model, by the one name the module has, of a module whose
        class's forward is all there is to it, under a mode that notes rows.
        """
        sites, fail, original, state = self._sites, self._fail, self._original_call, self._tracer.state
        plain, bodies, skipped = self._plain, self._bodies, self._skipped

        @functools.wraps(original)
        def short_call(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            # The two halves of `is_compiling`, which is two calls. Dynamo folds the first.
            if _is_dynamo_compiling() or _compiler._is_compiling_flag:
                return original(module, *args, **kwargs)
            site = sites.get(id(module))
            if site is None and (state.resting or id(module) in skipped):  # left out, as its step or itself
                body = bodies.get(type(module)) if plain else None
                if body is not None and calls_forward_only(module, body[0]):
                    return body[1](module, *args, **kwargs)
                return original(module, *args, **kwargs)
            if site is None or (mode := state.mode) is None:
                return call(module, *args, **kwargs)
            frame = mode.enter(site, module, args, kwargs)
            if frame is None:
                return call(module, *args, **kwargs)
            try:
                out = site.original(module, *args, **kwargs)
            except BaseException as error:
                fail(frame, error)
                raise
            mode.leave(frame, out)
            return out

        return short_call

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
        self._sites.clear()

    def _wrap_forward(self, cls: type) -> None:
        if cls in self._wrapped_forwards or _is_compiled_class(cls):
            return
        own = cls.__dict__.get("forward", _MISSING)
        original = getattr(cls, "forward", None)
        if not callable(original) or isinstance(own, (staticmethod, classmethod, property)):
            return
        begin, end, fail = self._begin, self._end, self._fail
        tracer, state, skipped = self._tracer, self._tracer.state, self._skipped

        @functools.wraps(original)
        def forward(self: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if not tracer.active or _is_compiling() or state.resting or id(self) in skipped:
                return original(self, *args, **kwargs)
            frame = state.frame
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
        self._bodies[cls] = (forward, original)

    # -- one call ------------------------------------------------------------------------------------

    def _begin(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame | None:
        """Opens a call, or says that this one is not for us."""
        tracer = self._tracer
        state = tracer.state
        if state.busy or state.resting:
            return None
        if module not in self._regions and state.region is None and compile_context(module) is not None:
            self._compiled_late(module)
        paths = tracer.table.get(module)
        if paths is None:
            if not tracer.adopts_root or state.frame is not None:
                return None
            found = self._find_root(module)
            paths = found if found is None else self._adopt(*found).get(module)
            if paths is None:
                return None
        if state.region is not None:
            return None  # within compiled code: its hooks see what runs
        parent, is_region = state.frame, module in self._regions
        if parent is not None and id(module) in tracer.table.compiled and not is_region:
            return None  # a wrapper that compiles nothing; what it wraps has the same path
        frame = None
        try:
            frame = self._enter(state, module, paths, parent, args, kwargs)
        except Exception as error:
            tracer.fault(error)
        if frame is None:
            return None
        if state.mode is None and (
            tracer.options.level == "op" if tracer.finder is None else frame.records_ops
        ):
            # A thread of the program's that has no mode yet: modes are thread-local.
            tracer.number_thread(state)
            if not tracer.start_lasting_mode():
                frame.mode = tracer.new_mode()
                frame.mode.start()
        if frame.is_root:
            tracer.root_entered(frame.model)
        state.frame = frame
        if frame.is_root and not tracer.wants_step(frame.step):
            self._rest(state, frame)
        if is_region:
            try:
                self._regions.enter(state, frame, module, args, kwargs)
            except Exception as error:
                tracer.fault(error)
        return frame

    def _compiled_late(self, module: torch.nn.Module) -> None:
        """Takes note of a known module that the program has compiled, or wrapped, during the run."""
        tracer = self._tracer
        try:
            tracer.table.add_wrapper(module)
            if tracer.table.get(module) is not None:
                self._regions.add_late(module)
                tracer.writer.amend_header(self._regions.header())
        except Exception as error:
            tracer.fault(error)

    def _find_root(self, module: torch.nn.Module) -> tuple[str, torch.nn.Module] | None:
        """Name and module of the root to adopt now that a module is called that is in none."""
        tracer = self._tracer
        if tracer.finder is not None:
            return tracer.finder.find(module)
        return None if tracer.table.roots else ("", module)

    def _adopt(self, name: str, module: torch.nn.Module) -> ModuleTable:
        """Makes a module a root of a recording that was given none."""
        table = self._tracer.table
        table.add_root(name, module)
        self._tracer.root_adopted(name, module)
        self._prepare_modules()
        regions = find_regions([module])
        try:
            if not self._regions.recompile:
                check_fresh(regions)
            self.watch(regions)
            if regions:
                self._tracer.writer.amend_header(self._regions.header())
        except Exception as error:
            self._tracer.fault(error)
        return table

    def _rest(self, state: ThreadState, frame: Frame) -> None:
        """Takes the mode off the stack for a root call of a step that is not wanted: it runs at full speed.

        Not where another mode lies above ours, nor where compiled code has to be told of its calls.
        """
        if self._tracer.table.compiled:
            return
        mode = state.mode
        if mode is not None and not mode.is_on_top():
            return
        if mode is not None:
            mode.stop()
        frame.rested = mode
        state.resting = True

    def _wake(self, state: ThreadState, frame: Frame) -> None:
        state.resting = False
        mode, frame.rested = frame.rested, None
        if mode is not None:
            mode.start()
        if self._tracer.storages is not None:
            with self._tracer.own_ops(state):
                self._tracer.storages.forget_unseen()

    def _unwind(self, frame: Frame) -> ThreadState:
        tracer = self._tracer
        state = tracer.state
        if state.resting and frame.is_root:
            self._wake(state, frame)
        if frame.mode is not None:
            frame.mode.stop()
        state.frame = frame.parent
        if frame.is_root:
            tracer.root_left(frame.model)
        return state

    def _end(self, frame: Frame, out: Any) -> None:
        self._leave(self._unwind(frame), frame, out, "")

    def _fail(self, frame: Frame, error: BaseException) -> None:
        self._leave(self._unwind(frame), frame, _MISSING, f"raised {type(error).__name__}")

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
        is_root = begins = False
        if parent is not None and parent.model == model:
            step = parent.step
        elif path == "" and _current_node() is None:
            is_root = begins = True
            step = tracer.step_of_root_call(model)
        elif (
            parent is not None
            or tracer.sees_outside(model)
            or (tracer.recorded_steps and _current_node() is not None)
        ):
            step, begins = tracer.step_of_part(model, path)
        else:
            return None
        phase, call, step = tracer.phase_and_call(state, model, path, step)
        records_ops, records_module = tracer.wanted(path, step)
        # By position: this is paid for by every module call.
        frame = Frame(model, path, call, phase, step, module, parent, records_ops, records_module)
        frame.is_root = is_root
        frame.opened = tracer.upcoming_seq
        if phase == "fwd":
            if torch.is_grad_enabled():
                if begins:
                    forget_marks(state, model, step - STEPS_KEPT)
                mark_sequence(state, frame)
            if tracer.storages is not None and (begins or tracer.storages.written_parameters):
                with tracer.own_ops(state):
                    if begins and tracer.wants_step(step):
                        tracer.record_parameters(state, model, step)
                    tracer.record_written_parameters(state, step)
        if records_module and tracer.options.inputs:
            if tracer.storages is None:
                frame.inputs = meta.inputs_of(args, kwargs)
            else:
                with tracer.own_ops(state):
                    tracer.set_save(tracer.options.save_of(path))
                    for name, value in flatten_arguments(args, kwargs):
                        frame.inputs += tracer.value_slots(name, value, "in")
        return frame

    def _leave(self, state: ThreadState, frame: Frame, out: Any, note: str) -> None:
        tracer = self._tracer
        if state.region is not None:
            self._regions.leave(state, frame, out, raised=out is _MISSING)
        try:
            if frame.phase == "fwd" and torch.is_grad_enabled():
                mark_sequence(state, frame.parent)
            tracer.num_calls += 1
            if not frame.records_module:
                return
            if not note:
                note = self._regions.note_of(frame.module)
            if tracer.storages is None:
                if state.mode is None:
                    leaves = [] if out is _MISSING else meta.leaves_of_output(out)
                    tracer.put_later(meta.module_record, frame, leaves, note, state.number)
                else:
                    state.mode.note_module(frame, None if out is _MISSING else out, note)
                return
            slots = frame.inputs if type(frame.inputs) is list else frame.inputs.slots("in", whole=True)
            frame.inputs, first = [], len(slots)
            with tracer.own_ops(state):
                tracer.set_save(tracer.options.save_of(frame.path))
                if out is not _MISSING:
                    for name, value in flatten(out, "out"):
                        slots += tracer.value_slots(name, value, "out")
                if frame.is_root:
                    tracer.record_written_parameters(state, frame.step)
            tracer.put_module(frame, slots, first_output=first, note=note)
        except Exception as error:
            tracer.fault(error)
        finally:
            frame.module = None  # backward may ask for the frame much later, and needs no module


def _above(path: str) -> list[str]:
    """Paths of the modules that hold this one, the root apart: `a`, `a.b` of `a.b.c`."""
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _is_compiled_class(cls: type) -> bool:
    return cls.__module__.startswith("torch._dynamo")
