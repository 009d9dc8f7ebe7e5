"""One recording in progress: its options, counters, threads, steps and the road to the writer.

Guarantees: a fault of the recorder is counted and reported once and never reaches the program; work of
the recorder's own runs without gradients and unseen by every dispatch and function mode. Knows nothing
of how modules and ops are intercepted: that is `modules` and `ops`, which stand on top of it.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from dispatch_trace.capture.frames import STEPS_KEPT, Counters, Frame, ModuleTable, ThreadState, owner_of_node
from dispatch_trace.capture.plain import PLAIN_TENSORS, encode, intercepts_ops
from dispatch_trace.capture.roots import RootFinder
from dispatch_trace.capture.snapshot import Storages
from dispatch_trace.capture.sources import SourceFinder
from dispatch_trace.capture.storage import shape_of
from dispatch_trace.config import RecordOptions
from dispatch_trace.errors import CaptureError
from dispatch_trace.schema import NO_CALL, GradPhase, RawRecord, RawSlot, Save, StepInfo
from dispatch_trace.store.layouts import dtype_name
from dispatch_trace.store.writer import RowSource, TraceWriter

_current_node = torch._C._current_autograd_node


class OwnOps:
    """Everything inside runs without gradients, hidden from this recorder and from every other mode."""

    __slots__ = ("_dispatch", "_function", "_grad", "_lock", "_own_modes", "_state")

    def __init__(self, lock: Any, state: ThreadState, own_modes: int) -> None:
        self._lock = lock
        self._state = state
        self._own_modes = own_modes
        self._dispatch: Any = None
        self._function: Any = None

    def __enter__(self) -> None:
        self._lock.acquire()
        self._state.busy = True
        self._grad = torch.is_grad_enabled()
        if self._grad:
            torch._C._set_grad_enabled(False)
        # Our own modes step aside by themselves (`busy`); hiding from all of them would also switch off
        # the tensor subclasses that have to be looked into.
        if torch._C._len_torch_dispatch_stack() > self._own_modes:
            self._dispatch = torch._C._DisableTorchDispatch()
            self._dispatch.__enter__()
        if torch._C._len_torch_function_stack():
            self._function = torch._C.DisableTorchFunction()
            self._function.__enter__()

    def __exit__(self, *exc: object) -> None:
        if self._function is not None:
            self._function.__exit__(None, None, None)
        if self._dispatch is not None:
            self._dispatch.__exit__(None, None, None)
        if self._grad:
            torch._C._set_grad_enabled(True)
        self._state.busy = False
        self._lock.release()


def _ignore(_name: str, _root: torch.nn.Module) -> None:
    """Nobody wants to know which module became the root."""


def _never() -> bool:
    return False


def _no_mode() -> Any:
    raise AssertionError("level='module' enters no dispatch mode")


class Tracer:
    """One recording in progress.

    Args:
      writer: takes the records.
      options: what to record.
      models: root models by name; empty to take the outermost module called.
    """

    def __init__(
        self, writer: TraceWriter, options: RecordOptions, models: dict[str, torch.nn.Module]
    ) -> None:
        self.writer = writer
        self.options = options
        self.adopts_root = not models
        self.table = ModuleTable()
        for name, model in models.items():
            self.table.add_root(name, model)
        self.storages: Storages | None = None
        if options.wants_values:
            self.storages = Storages(writer, caches=options.level == "op")
        self.state = ThreadState()
        self.state.number = 0
        self.counters = Counters()
        self.op_infos: dict[int, Any] = {}  # by id of the overload: its own hash is a Python call
        self.bodies: dict[Any, Any] = {}  # what noted rows share, by what they say
        self.items: dict[int | float, int] = {}
        self.find_source = SourceFinder()
        self.active = True
        self.recorded_steps = False
        self.last_step: tuple[str, int] = (next(iter(models), ""), -1)
        self._num_put = 0
        self._num_noted = 0
        self.num_calls = 0
        self.num_parameters = 0
        self.upcoming = 0  # after the last number that `next_seq` gave
        self.faults: list[Exception] = []
        self.let_through: BaseException | None = None
        self.new_mode: Callable[[], Any] = _no_mode
        self.notes_rows = False  # whether that is a `RowRecorder`
        self.start_lasting_mode: Callable[[], bool] = _never  # for more than one call, where that is safe
        self.root_adopted: Callable[[str, torch.nn.Module], None] = _ignore
        self.finder: RootFinder | None = None  # set: every root that the program calls is adopted
        self._wanted: dict[str, tuple[bool, bool]] = {}
        self._steps: dict[str, int] = {}
        self.numbers = itertools.count()
        self._threads = itertools.count(1)
        self._lock = threading.RLock()
        self._bracket: dict[str, Any] | None = None
        self._bracket_steps: dict[str, int] = {}
        self._begun: set[str] = set()  # models of which something was called in the bracket
        self._running: dict[str, int] = {}
        self._parts: dict[str, set[str]] = {}
        self._parameter_owners: dict[int, list[tuple[str, str, torch.nn.Module, str]]] = {}

    # -- what is wanted ------------------------------------------------------------------------------

    def wants_op(self, base: str) -> bool:
        return self.options.wants_op(base)

    def wants_step(self, step: int) -> bool:
        return self.options.wants_step(step)

    @property
    def default_records_ops(self) -> bool:
        """Whether ops outside every selected module are wanted at all."""
        return self.options.level == "op" and self.options.selector is None

    def wanted(self, path: str, step: int) -> tuple[bool, bool]:
        """(ops, module record): what is wanted of a call of this module in this step."""
        wanted = self._wanted.get(path)
        if wanted is None:
            options = self.options
            wanted = self._wanted[path] = (options.wants_ops_of(path), options.wants_module(path))
        return wanted if self.options.steps is None or self.wants_step(step) else (False, False)

    # -- the road to the writer ----------------------------------------------------------------------

    def next_seq(self) -> int:
        self.upcoming = (seq := next(self.numbers)) + 1
        return seq

    @property
    def upcoming_seq(self) -> int:
        """The number that the next record has at least."""
        upcoming = self.upcoming
        for source in self.writer.sources[:]:
            upcoming = max(upcoming, source.last + 1)
        return upcoming

    def put(self, record: RawRecord) -> None:
        if self.writer.sources:
            self.flush_rows()  # so that records come in the order in which they were made
        self._num_put += 1
        self.writer.put(record)

    def put_module(
        self, frame: Frame, slots: list[RawSlot], *, first_output: int | None = None, note: str = ""
    ) -> None:
        """Hands over the record of a module call that has returned.

        Args:
          first_output: where the outputs begin; with it the record names the producer of the first.
        """
        outputs = [] if first_output is None else slots[first_output:]
        producers = [s.producers[-1][0] for s in outputs if s.is_tensor and s.producers]
        self.put(
            frame.record(
                self.next_seq(),
                "module",
                slots=slots,
                producer=producers[0] if producers else -1,
                opened=frame.opened,
                thread=self.state.number,
                note=note,
            )
        )

    def put_inline(
        self,
        frame: Frame,
        name: str,
        n: int,
        tensor: Any,
        *,
        source: tuple[str, int] | None = None,
        fresh: bool = False,
    ) -> None:
        """Hands over the record of the `n`-th inline capture of a name; within `own_ops`.

        Args:
          fresh: as for `value_slots`.
        """
        self.set_save(self.options.save_of(frame.path))
        slots = self.value_slots("out", tensor, "out", fresh=fresh)
        seq = self.next_seq()
        self.put(
            frame.record(seq, "inline", name=name, n=n, slots=slots, source=source, thread=self.state.number)
        )

    def add_source(self, source: RowSource) -> None:
        """Has the writer fetch from this mode what it notes."""
        self.writer.sources.append(source)

    def remove_source(self, source: RowSource) -> None:
        """A mode has come off its thread's stack: what it noted last is handed over."""
        self.writer.sources.remove(source)
        self.writer.put_rows_of(source)
        with self._lock:
            self._num_noted += source.num_taken
            source.num_taken = 0
            self.upcoming = max(self.upcoming, source.last + 1)

    def flush_rows(self) -> None:
        """Hands over what every mode has noted: before what follows is put, and before the recorder waits."""
        for source in self.writer.sources[:]:
            if source.rows:
                self.writer.put_rows_of(source)

    @property
    def num_records(self) -> int:
        """Records made so far."""
        noted = sum(source.num_taken + len(source.rows) for source in self.writer.sources[:])
        return self._num_put + self._num_noted + noted

    def put_later(self, make: Callable[..., RawRecord], *arguments: Any) -> None:
        """Numbers a record now and has the writer's thread put it together: make(seq, *arguments)."""
        self._num_put += 1
        self.writer.put((make, self.next_seq(), *arguments))

    def own_ops(self, state: ThreadState, *, in_dispatch: bool = False) -> OwnOps:
        """A context for the recorder's own work; within a dispatch handler our mode is off the stack."""
        return OwnOps(self._lock, state, 0 if in_dispatch or state.mode is None else 1)

    def set_save(self, save: Save) -> None:
        """What the snapshots that follow are for."""
        if self.storages is not None:
            self.storages.set_save(save)

    def fault(self, error: Exception) -> None:
        """Counts a fault of the recorder; the program goes on."""
        if error is self.let_through:
            raise error  # somebody asked for the program to be stopped
        with contextlib.suppress(Exception):
            self.writer.drop(f"{type(error).__name__}: {error}")
        first = not self.faults
        self.faults.append(error)
        if first and self.options.on_error == "warn":
            with contextlib.suppress(Exception):  # warnings may be errors, and the program must not see one
                warnings.warn(
                    "dispatch_trace: the recorder failed and the trace is incomplete: "
                    f"{type(error).__name__}: {error}",
                    RuntimeWarning,
                    stacklevel=3,
                )

    def close(self) -> None:
        self.active = False
        if self.storages is not None:
            self.storages.close()
        # The recording object may outlive the block; the program's modules must not live by it.
        self.table = ModuleTable()
        self._parameter_owners.clear()
        self.op_infos.clear()
        self.bodies.clear()

    # -- threads -------------------------------------------------------------------------------------

    def number_thread(self, state: ThreadState) -> None:
        if state.number < 0:
            state.number = next(self._threads)

    # -- steps ---------------------------------------------------------------------------------------

    def new_step(self, model: str, meta: dict[str, Any]) -> int:
        step = self._steps.get(model, -1) + 1
        self._steps[model] = step
        self.last_step = (model, step)
        if self.wants_step(step):
            self.recorded_steps = True
            self.writer.put_step(StepInfo(step=step, model=model, meta=meta))
        self.items.clear()
        self.counters.forget(model, step - STEPS_KEPT - 1)
        return step

    def enter_bracket(self, meta: dict[str, Any]) -> None:
        if self._bracket is not None:
            raise CaptureError("rec.step() was entered inside rec.step(); a step cannot hold another.")
        self._bracket = meta
        self._bracket_steps = {}
        self._begun = set()
        if len(self.table.roots) <= 1:
            model = next(iter(self.table.roots), "")
            self._bracket_steps[model] = self.new_step(model, meta)

    def leave_bracket(self) -> None:
        self._bracket = None

    def step_of_root_call(self, model: str) -> int:
        """The step that an outermost call of a root model belongs to."""
        self._parts.pop(model, None)
        if self._bracket is None:
            return self.new_step(model, {})
        step = self._bracket_steps.get(model)
        if step is None:
            step = self._bracket_steps[model] = self.new_step(model, self._bracket)
        return step

    def step_of_part(self, model: str, path: str) -> tuple[int, bool]:
        """(step, whether it begins) of a call below a root that is not running itself in this thread.

        The model's last step. Where roots are found by themselves their methods may stand for their calls
        (`vae.decode`): such a step lasts until one of its parts, or the root, is called again.
        """
        if self._bracket is not None and model not in self._bracket_steps:
            return self.step_of_root_call(model), True
        step = self._steps.get(model, -1)
        if self._bracket is not None and model not in self._begun:
            self._begun.add(model)
            return step, True
        if self.finder is None or _current_node() is not None or self._running.get(model, 0):
            return step, False
        called = self._parts.get(model)
        begins = called is None or path in called
        if called is None or begins:
            called = self._parts[model] = set()
            step = self.new_step(model, {})
        called.add(path)
        return step, begins

    def outside_frame(self) -> Frame | None:
        """The room for ops outside all module calls, or None where they are not to be recorded."""
        model, step = self.last_step
        if self._bracket is not None:
            step = self._bracket_steps.get(model, step)
        elif not self.adopts_root or (self.finder is not None and self.finder.specs):
            return None
        records = self.default_records_ops and (step < 0 or self.wants_step(step))
        return self.counters.body(
            model=model, step=step, phase="fwd", path="", call=NO_CALL, records_ops=records
        )

    def root_entered(self, model: str) -> None:
        self._begun.add(model)
        self._running[model] = self._running.get(model, 0) + 1

    def root_left(self, model: str) -> None:
        self._running[model] -= 1

    def sees_outside(self, model: str) -> bool:
        """Whether a call that is not below a root in its own thread belongs to the recording all the same."""
        return self.adopts_root or self._bracket is not None or self._running.get(model, 0) > 0

    # -- module calls --------------------------------------------------------------------------------

    def phase_and_call(
        self, state: ThreadState, model: str, path: str, step: int
    ) -> tuple[GradPhase, int, int]:
        """(grad phase, call, step) of a module call that is being entered."""
        node = _current_node()
        if node is None:
            return "fwd", self.counters.next_call(model, step, "fwd", path), step
        owner = owner_of_node(state, node)
        if owner is not None:
            step = owner.step
        frame = owner
        while frame is not None:
            if frame.path == path and frame.model == model:
                return "recompute", frame.call, step
            frame = frame.parent
        return "recompute", self.counters.recomputed_call(model, step, path), step

    # -- values --------------------------------------------------------------------------------------

    def value_slots(self, name: str, value: Any, role: str, *, fresh: bool = False) -> list[RawSlot]:
        """Slots of one leaf of a module's inputs or outputs, always with a value of their own.

        Args:
          fresh: the value is a copy that nobody but the recorder has.
        """
        if not isinstance(value, torch.Tensor):
            return [RawSlot(name, role, value=encode(value), is_tensor=False)]
        if self.storages is None:
            return [
                RawSlot(
                    name, role, dtype=dtype_name(value.dtype), shape=shape_of(value), device=str(value.device)
                )
            ]
        note = ""
        if type(value) not in PLAIN_TENSORS:
            if not intercepts_ops(type(value)):
                note = f"type {type(value).__name__}"
                with torch._C.DisableTorchFunctionSubclass():  # it may count the functions that it sees
                    value = value.as_subclass(torch.Tensor)
            elif value.layout is not torch.jagged:
                return self.subclass_slots(name, value, role)
        slot = self.guarded(name, role, value, lambda s: s.read(value, name, -1, -1, own=True, fresh=fresh))
        slot.role, slot.note = role, slot.note or note
        if role == "out":
            slot.leaf = False
        return [slot]

    def guarded(
        self, name: str, role: str, value: torch.Tensor, look: Callable[[Storages], RawSlot]
    ) -> RawSlot:
        """`look`, or a slot that says why not: one bad tensor takes no sibling with it."""
        assert self.storages is not None
        try:
            return look(self.storages)
        except Exception as error:
            if not isinstance(error, (RuntimeError, NotImplementedError)):
                self.fault(error)  # a batched tensor under vmap has no storage; anything else is ours
            reason = str(error).partition("\n")[0]
            return RawSlot(name, role, dtype=dtype_name(value.dtype), note=f"unreadable: {reason}")

    def subclass_slots(self, name: str, value: torch.Tensor, role: str) -> list[RawSlot]:
        """A tensor subclass: what it says of itself, and the plain tensors inside where it lets us look."""
        kind = type(value).__name__
        note = "fake tensor" if kind == "FakeTensor" else f"type {kind}"
        outer = RawSlot(
            name,
            role,
            dtype=dtype_name(value.dtype),
            shape=shape_of(value),
            device=str(value.device),
            note=note,
        )
        slots = [outer]
        flatten = getattr(type(value), "__tensor_flatten__", None)
        if kind != "FakeTensor" and flatten is not None:
            inner, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
            for attribute in inner:
                slots += self.value_slots(f"{name}.{attribute}", getattr(value, attribute), role)
        return slots

    # -- parameters ----------------------------------------------------------------------------------

    def record_parameters(self, state: ThreadState, model: str, step: int) -> None:
        """A record for each parameter and buffer of the selected modules that is new or has changed."""
        if self.storages is None or self.options.params == "none":
            return
        for name, path, module in list(self.table.items()):
            if name == model and self.options.wants_module(path):
                self._record_parameters_of(state, model, path, module, step)

    def record_written_parameters(self, state: ThreadState, step: int) -> None:
        """The same for those that a recorded op has written since."""
        if self.storages is None or not self.storages.written_parameters or self.options.params == "none":
            return
        owners = [o for n in self.storages.written_parameters for o in self._parameter_owners.get(n, ())]
        self.storages.written_parameters.clear()
        tensors = [module._parameters.get(name, module._buffers.get(name)) for _, _, module, name in owners]
        # A write through `.data` moves no version that a parameter has.
        ended = [tensor is not None and self.storages.ends_parameter(tensor) for tensor in tensors]
        for (model, path, module, name), tensor, has_ended in zip(owners, tensors, ended, strict=True):
            if has_ended:
                self.storages.known_parameters.forget((model, path, name))
            if tensor is not None:
                self._record_parameter(state, model, path, module, name, tensor, step)

    def record_moved_parameters(self, state: ThreadState, args: Iterable[Any], step: int) -> None:
        """The same for those that an op is about to read, and that were given other memory (`.data = x`)."""
        if self.storages is None or self.options.params == "none":
            return
        for tensor in args:
            key = self.storages.known_parameters.moved(tensor) if type(tensor) is torch.nn.Parameter else None
            if key is None:
                continue
            for model, path, module in list(self.table.items()):
                if (model, path) == key[:2]:
                    self._record_parameter(state, model, path, module, key[2], tensor, step)

    def _record_parameters_of(
        self, state: ThreadState, model: str, path: str, module: torch.nn.Module, step: int
    ) -> None:
        for table in (module._parameters, module._buffers):
            for attribute, tensor in list(table.items()):
                if tensor is not None and not torch.nn.parameter.is_lazy(tensor):
                    self._record_parameter(state, model, path, module, attribute, tensor, step)

    def _record_parameter(
        self,
        state: ThreadState,
        model: str,
        path: str,
        module: torch.nn.Module,
        attribute: str,
        tensor: torch.Tensor,
        step: int,
    ) -> None:
        assert self.storages is not None
        known = (model, path, attribute)
        if self.storages.parameter_is_current(tensor, known):
            return
        self.set_save("tensors" if self.options.params == "tensors" else "stats")
        seq = self.next_seq()
        self.num_parameters += 1
        if type(tensor) in PLAIN_TENSORS:
            slot = self.storages.parameter(tensor, known, seq)
            owners = self._parameter_owners.setdefault(slot.storage, [])
            if (model, path, module, attribute) not in owners:
                owners.append((model, path, module, attribute))
            slots = [slot]
        else:
            self.storages.known_parameters.remember(tensor, known)
            slots = self.subclass_slots("out", tensor, "out")
        self.put(
            RawRecord(
                seq,
                "param",
                step=step,
                model=model,
                module=path,
                name=attribute,
                slots=slots,
                thread=state.number,
            )
        )
