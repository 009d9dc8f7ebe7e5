"""A dispatch mode that notes rows instead of making records: what `meta` and `values` have in common.

What an op was called with and what it returned is mostly what it was a step ago. So it is made into a
record once (a *body*), found again by its exact description, and what is noted of each op is a row
(`schema.NotedRow`): less memory to touch, less for the garbage collector to walk through, and a row costs
the writer's thread, whose work holds up the program's, a twentieth of what a record does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from dispatch_trace.capture.frames import Frame, mark_sequence
from dispatch_trace.capture.ops import OpRecorder
from dispatch_trace.capture.plain_calls import Site, calls_forward_only
from dispatch_trace.capture.tracer import Tracer
from dispatch_trace.schema import NotedRow

_current_node = torch._C._current_autograd_node
_num_function_modes = torch._C._len_torch_function_stack
MANY_ROWS = 1 << 15
MAX_BODIES = 1 << 13  # shapes that never come back (a growing cache) must not fill the memory


class RowRecorder(OpRecorder):
    """The dispatch mode of a recording that notes rows.

    Attributes:
      rows: what was noted and not taken yet. Only this thread adds to it; whoever takes holds a lock.
      last: number of the last record of this mode.
      here: attributes of the tracer's `ThreadState` in this mode's thread, without asking which it is.
      num_taken: rows taken so far.
      wants_inputs: whether what module calls are given is noted.
    """

    def __init__(self, tracer: Tracer) -> None:
        super().__init__(tracer)
        self._state = tracer.state
        self.here: dict[str, Any] = {}
        self._infos = tracer.op_infos
        self._bodies = tracer.bodies
        self._number = tracer.state.number
        self._next = tracer.numbers.__next__
        self.rows: list[NotedRow] = []
        self._append = self.rows.append
        self.wants_inputs = tracer.options.inputs
        self._written = None if tracer.storages is None else tracer.storages.written_parameters
        self._taking = threading.Lock()
        self.num_taken = 0
        self.last = tracer.upcoming_seq - 1

    def start(self) -> None:
        super().start()
        self.here = self._state.__dict__
        self._tracer.add_source(self)

    def stop(self) -> None:
        # A program's threads come and go, and each call in one has a mode of its own.
        super().stop()
        self._tracer.remove_source(self)

    def move_rows(self, put: Callable[[list[NotedRow]], None]) -> None:
        """Gives what was noted so far to `put`; from any thread, while the program goes on noting."""
        with self._taking:
            rows = self.rows[:]
            if rows:
                del self.rows[: len(rows)]
                self.num_taken += len(rows)
                put(rows)

    def at_hand(self) -> tuple[Any, ...]:
        """What each op needs, for `native`, in this mode's thread."""
        return (
            *(self._state.__dict__, self._infos, self._bodies, self.rows),
            *(self._tracer, self._state, self._next, self._number),
            *(self._written, self._tracer.counters.lock),
        )

    def keep_body(self, key: Any, body: Any) -> None:
        """Remembers a body, or what holds one, by its key."""
        if len(self._bodies) >= MAX_BODIES:
            self._bodies.clear()
        self._bodies[key] = body

    def enter(
        self, site: Site, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Frame | None:
        """Opens the call of a module within a call of its model; None where that takes more than `site` says.

        All of it, and of `leave`, is paid for by each module call.
        """
        here, tracer, written = self.here, self._tracer, self._written
        parent = here["frame"]
        if (
            parent is None
            or parent.model != site.model
            or _current_node() is not None
            or not tracer.active
            or (written is not None and (written or _num_function_modes()))
            or not calls_forward_only(module, site.forward)
        ):
            return None
        calls = parent.calls
        if calls is None:
            calls = parent.calls = tracer.counters.calls_of(site.model, parent.step)
        number = tracer.counters.next_of(calls, site.key)
        step, returns = parent.step, site.records_module
        frame = Frame(site.model, site.path, number, "fwd", step, module, parent, site.records_ops, returns)
        frame.calls = calls
        frame.opened = max(self.last + 1, tracer.upcoming)
        if returns and self.wants_inputs:
            try:
                frame.inputs = self.inputs_of(args, kwargs)
            except Exception as error:
                tracer.fault(error)
        if torch.is_grad_enabled():
            mark_sequence(self._state, frame)
        here["frame"] = frame
        return frame

    def leave(self, frame: Frame, out: Any) -> None:
        """Closes a call that `enter` has opened and that has returned."""
        self.here["frame"] = frame.parent
        if torch.is_grad_enabled():
            mark_sequence(self._state, frame.parent)
        if frame.records_module:
            self.note_module(frame, out)
        frame.module = None

    def inputs_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a module call is given, in the form that `note_module` wants as `frame.inputs`."""
        raise NotImplementedError

    def note_module(self, frame: Frame, out: Any, note: str = "") -> None:
        """Notes that a module call has ended, with what it returned (None where it raised)."""
        raise NotImplementedError
