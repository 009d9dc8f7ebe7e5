"""Runs tapped graphs: the same compiled code whether something records or not.

Guarantees: taps are outputs of the compiled code at all times; without a recording they are dropped at once.
A fault of the recorder is reported to the recording and never reaches the program. What the graph overwrites
(buffers, caches) is put aside before it runs, so that inputs are recorded as they were read.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from dispatch_trace.capture.frames import ThreadState, mark_sequence, owner_of_node
from dispatch_trace.capture.graph_code import Code
from dispatch_trace.capture.graph_emit import Emitter
from dispatch_trace.capture.graph_frames import GraphFrame, Run, begin_run
from dispatch_trace.capture.graph_plan import Plan
from dispatch_trace.capture.inline import ACTIVE
from dispatch_trace.capture.storage import geometry
from dispatch_trace.capture.tracer import Tracer

_current_node = torch._C._current_autograd_node


class _Runs(threading.local):
    """The forward runs that are in progress in a thread, innermost last; one entry per compiled frame."""

    def __init__(self) -> None:
        self.stack: list[list[Run]] = []


@dataclass(eq=False)
class CompiledFrame:
    """What Dynamo compiled in one go: a forward graph, and a backward graph where gradients are wanted.

    Attributes:
      code: whose code it is.
      note: of every record.
      run: the compiled code, called with the graph's inputs.
      num_tapped: how many graphs of it were tapped; what stays 0 has lost its taps.
    """

    code: Code
    note: str
    run: Callable[..., Any] | None = None
    num_tapped: int = 0
    _runs: _Runs = field(default_factory=_Runs)
    # A run holds its recording, which must not live by the compiled code.
    _last: weakref.WeakKeyDictionary[Tracer, weakref.ref[Run]] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    def __call__(self, *args: Any) -> Any:
        assert self.run is not None
        if not ACTIVE:
            return self.run(*args)
        with self.recording(args):
            return self.run(*args)

    @contextmanager
    def recording(self, args: Sequence[Any]) -> Iterator[list[Run]]:
        """Opens a run in every recording that wants one; below it nothing else records."""
        runs: list[Run] = []
        before = []
        for tracer in list(ACTIVE):
            run = self._begin(tracer, args)
            if run is not None:
                runs.append(run)
                before.append((run, tracer.state.frame))
                tracer.state.busy = True
        self._runs.stack.append(runs)
        try:
            yield runs
        finally:
            self._runs.stack.pop()
            for run, frame in before:
                run.tracer.state.busy = False
                if torch.is_grad_enabled():
                    mark_sequence(run.tracer.state, frame)

    def _begin(self, tracer: Tracer, args: Sequence[Any]) -> Run | None:
        state = tracer.state
        if not tracer.active or state.busy or tracer.options.level != "op":
            return None
        try:
            frame = state.frame or tracer.outside_frame()
            if frame is None or not tracer.wants_step(frame.step):
                return None
            run = begin_run(tracer, frame, self.code, args)
            if torch.is_grad_enabled():
                owner = GraphFrame(run.base)
                owner.records_ops = False
                owner.run = run
                mark_sequence(state, owner)
                self._last[tracer] = weakref.ref(run)
            return run
        except Exception as error:
            tracer.fault(error)
            return None

    def forward_runs(self) -> list[Run]:
        """The runs whose forward graph is being called."""
        return self._runs.stack[-1] if self._runs.stack else []

    def backward_runs(self) -> list[Run]:
        """The forward runs whose backward graph is being called."""
        found: list[Run] = []
        node = _current_node()
        for tracer in list(ACTIVE):
            if not tracer.active or tracer.state.busy or tracer.options.level != "op":
                continue
            owner = owner_of_node(tracer.state, node) if node is not None else None
            run = owner.run if isinstance(owner, GraphFrame) else None
            if run is None and owner is None:
                last = self._last.get(tracer)  # backward runs in another thread than forward
                run = None if last is None else last()
            if run is not None:
                found.append(run)
        return found


class TappedGraph:
    """One compiled graph whose last outputs are taps.

    Args:
      frame: what it belongs to.
      plan: the ops to record.
      compiled: the code, in boxed form: takes a list, which it may empty.
      num_outputs: of the graph, without taps.
      taps: names of plan nodes, in the order in which their values are returned.
      placeholders: names of the compiled graph's inputs.
      overwritten: positions of inputs that the graph writes.
      num_returned: how many of the outputs the program sees; the rest is kept for backward.
    """

    def __init__(
        self,
        frame: CompiledFrame,
        plan: Plan,
        compiled: Callable[[list[Any]], Sequence[Any]],
        *,
        num_outputs: int,
        taps: Sequence[str],
        placeholders: Sequence[str],
        overwritten: Sequence[int],
        num_returned: int,
    ) -> None:
        self._boxed_call = True  # on the object: wrappers copy what it holds
        self._frame = frame
        self._plan = plan
        self._compiled = compiled
        self._num_outputs = num_outputs
        self._taps = tuple(taps)
        self._placeholders = tuple(placeholders)
        self._overwritten = tuple(overwritten)
        self._num_returned = num_returned

    def __call__(self, args: list[Any]) -> Any:
        frame = self._frame
        runs: list[Run] = []
        if ACTIVE:
            runs = frame.backward_runs() if self._plan.backward else frame.forward_runs()
        if not runs:
            return self._execute(args, keep=False)[0]
        inputs = [self._inputs(run, args) for run in runs]
        with _busy([run.tracer.state for run in runs]):
            out, values = self._execute(args, keep=True)
        for run, given in zip(runs, inputs, strict=True):
            emit(run, self._plan, given, values, frame.note, out[: self._num_returned])
        return out

    def _execute(self, args: list[Any], *, keep: bool) -> tuple[Sequence[Any], dict[str, Any]]:
        """Runs the code: its own outputs, and the tapped values by name."""
        out = self._compiled(args)
        values = dict(zip(self._taps, out[self._num_outputs :], strict=True)) if keep else {}
        return out[: self._num_outputs], values

    def _inputs(self, run: Run, args: list[Any]) -> dict[str, Any]:
        """The inputs by name, with stand-ins for those that the graph will overwrite."""
        given = dict(zip(self._placeholders, args, strict=False))
        if self._plan.backward:
            # Saved values may be overwritten, and go by other names in the plan; forward has shown them.
            given = {k: v for k, v in given.items() if k.startswith(("primals_", "tangents_"))}
        tracer = run.tracer
        for position in self._overwritten:
            name = self._placeholders[position]
            if name in given and isinstance(given[name], torch.Tensor):
                try:
                    with tracer.own_ops(tracer.state):
                        given[name] = stand_in(tracer, given[name])
                except Exception as error:
                    tracer.fault(error)
        return given


class InterpretedGraph(TappedGraph):
    """An AOT graph that is run op by op, as `aot_eager` does: every value is at hand without taps."""

    def __init__(self, frame: CompiledFrame, plan: Plan, *, overwritten: Sequence[int]) -> None:
        super().__init__(
            frame,
            plan,
            plan.module.forward,
            num_outputs=-1,
            taps=(),
            placeholders=placeholders_of(plan.module.graph),
            overwritten=overwritten,
            num_returned=0,  # what it returns is what its ops returned
        )

    def _execute(self, args: list[Any], *, keep: bool) -> tuple[Sequence[Any], dict[str, Any]]:
        given = list(args)
        args.clear()
        if not keep:
            return self._plan.module(*given), {}
        interpreter = KeepingInterpreter(self._plan)
        return interpreter.run(*given), interpreter.values


class KeepingInterpreter(torch.fx.Interpreter):
    """One run of an AOT graph that keeps what its ops returned."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.module)
        self.extra_traceback = False  # the program's exceptions pass unchanged
        self._sites = plan.sites
        self.values: dict[str, Any] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        value = super().run_node(n)
        if n in self._sites:
            self.values[n.name] = value
        return value


def placeholders_of(graph: torch.fx.Graph) -> tuple[str, ...]:
    return tuple(node.name for node in graph.nodes if node.op == "placeholder")


def emit(
    run: Run,
    plan: Plan,
    inputs: Mapping[str, Any],
    values: Mapping[str, Any],
    note: str,
    returned: Sequence[Any],
) -> None:
    """Makes the records of one graph run in one recording; what goes wrong is the recording's."""
    tracer = run.tracer
    state = tracer.state
    busy = state.busy
    try:
        if state.mode is not None and tracer.storages is None:
            tracer.flush_rows()
        Emitter(run, plan, inputs, values, note).emit(returned)
    except Exception as error:
        tracer.fault(error)
    finally:
        state.busy = busy


@contextmanager
def _busy(states: Sequence[ThreadState]) -> Iterator[None]:
    before = [state.busy for state in states]
    for state in states:
        state.busy = True
    try:
        yield
    finally:
        for state, was in zip(states, before, strict=True):
            state.busy = was


def stand_in(tracer: Tracer, tensor: torch.Tensor) -> torch.Tensor:
    """A copy that the recording takes for the tensor itself, as far as its content goes."""
    twin = tensor.detach().clone()
    storages = tracer.storages
    if storages is None:
        return twin
    known = storages.known(tensor)
    g = geometry(twin)
    if known is None or g is None or g != geometry(tensor):
        return twin
    storages.read(tensor, "in", -1, -1)  # writes that nobody recorded end what is known of it
    entry, _ = storages.entry(twin, g, known.origin)
    told, history = known.history, entry.history
    history.definitions, history.contents = dict(told.definitions), dict(told.contents)
    history.writes, history.leaves = list(told.writes), set(told.leaves)
    history.parameters = dict(told.parameters)
    return twin


__all__ = ["CompiledFrame", "InterpretedGraph", "TappedGraph", "emit", "placeholders_of", "stand_in"]
