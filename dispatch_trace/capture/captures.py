"""What hooks put into a registry, made into records with the keys that eager capture gives the same sites.

Guarantees: one record per module call, in the order in which the calls returned, each after what ran inside
it; names are resolved by the call that encloses them, as everywhere. Leaves to the caller when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from dispatch_trace.capture.frames import Frame, resolve_path
from dispatch_trace.capture.tracer import Tracer
from dispatch_trace.nested import flatten, flatten_arguments
from dispatch_trace.registry import Entry, manual_name

# (model, path) candidates of the name under which a hook registers.
Names = Callable[[str], list[tuple[str, str]]]


class CaptureRecords:
    """Turns the entries of one forward into records.

    Args:
      tracer: the recording; must be busy with its own work (`own_ops`) while this is used.
      names: what the hooks' names stand for.
      note: kept with every module record.
      wants: whether the module of a path is to be written.
    """

    def __init__(
        self, tracer: Tracer, names: Names, *, note: str, wants: Callable[[str], bool] | None = None
    ) -> None:
        self._tracer = tracer
        self._names = names
        self._note = note
        self._wants = wants
        self._repeats: dict[str, int] = {}

    def put(self, frame: Frame, entries: Iterable[Entry]) -> None:
        """Records of what was captured inside the call `frame`."""
        stack: list[tuple[str, Frame]] = []  # the calls in progress, by the names of their hooks
        self._repeats.clear()
        for kind, name, value in entries:
            around = stack[-1][1] if stack else frame
            if kind == "enter":
                stack.append((name, self._open(name, around, value)))
            elif kind == "manual":
                self._put_inline(around, name, value)
            else:
                # A module that was registered by hand was never entered.
                entered = bool(stack) and stack[-1][0] == name
                self._close(stack.pop()[1] if entered else self._open(name, around, None), value)

    def _open(self, name: str, around: Frame, inputs: Any) -> Frame:
        tracer = self._tracer
        model, path = resolve_path(self._names(name), around)
        call = tracer.counters.next_call(model, around.step, around.phase, path)
        wanted = self._wants is None or self._wants(path)
        frame = Frame(model, path, call, around.phase, around.step, None, around, False, wanted)
        frame.opened = tracer.upcoming_seq
        if inputs is not None and wanted:
            tracer.set_save(tracer.options.save_of(path))
            args, kwargs = inputs
            for slot, value in flatten_arguments(tuple(args), kwargs):
                frame.inputs += tracer.value_slots(slot, value, "in", fresh=True)
        return frame

    def _close(self, frame: Frame, value: Any) -> None:
        if not frame.records_module:
            return
        tracer = self._tracer
        tracer.set_save(tracer.options.save_of(frame.path))
        slots, frame.inputs = frame.inputs, []
        for name, leaf in flatten(value, "out"):
            slots += tracer.value_slots(name, leaf, "out", fresh=True)
        tracer.put_module(frame, slots, note=self._note)

    def _put_inline(self, frame: Frame, name: str, value: Any) -> None:
        n = frame.count(f"inline:{name}")
        repeat = self._repeats[name] = self._repeats.get(name, -1) + 1
        if self._wants is None or self._wants(manual_name(name, repeat)):
            self._tracer.put_inline(frame, name, n, value, fresh=True)
