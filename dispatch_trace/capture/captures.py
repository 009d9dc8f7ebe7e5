"""What hooks put into a registry, made into records with the keys that eager capture gives the same sites.

Guarantees: one record per module call, in the order in which the calls returned, each after what ran inside
it; names are resolved by the call that encloses them, as everywhere. Leaves to the caller when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from dispatch_trace.capture.frames import Frame, resolve_path
from dispatch_trace.capture.structure import flatten, flatten_arguments
from dispatch_trace.capture.tracer import Tracer
from dispatch_trace.registry import Entry, Opaque, manual_name
from dispatch_trace.schema import RawSlot

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
        stack: list[Frame] = []
        self._repeats.clear()
        for kind, name, value in entries:
            around = stack[-1] if stack else frame
            if kind == "enter":
                stack.append(self._open(name, around, value))
            elif kind == "manual":
                self._put_inline(around, name, value)
            else:
                # A module that was registered by hand was never entered.
                opened = stack.pop() if stack and stack[-1].mode == name else self._open(name, around, None)
                self._close(opened, value)

    def _open(self, name: str, around: Frame, inputs: Any) -> Frame:
        tracer = self._tracer
        model, path = resolve_path(self._names(name), around)
        call = tracer.counters.next_call(model, around.step, around.phase, path)
        wanted = self._wants is None or self._wants(path)
        frame = Frame(model, path, call, around.phase, around.step, None, around, False, wanted)
        frame.opened = tracer.upcoming_seq
        frame.mode = name  # no dispatch mode is entered with it: the hook's name, to tell calls apart
        if inputs is not None and wanted:
            tracer.set_save(tracer.options.save_of(path))
            args, kwargs = inputs
            for slot, value in flatten_arguments(tuple(args), kwargs):
                frame.inputs += self._slots(slot, value, "in")
        return frame

    def _close(self, frame: Frame, value: Any) -> None:
        if not frame.records_module:
            return
        tracer = self._tracer
        tracer.set_save(tracer.options.save_of(frame.path))
        slots, frame.inputs = frame.inputs, []
        for name, leaf in flatten(value, "out"):
            slots += self._slots(name, leaf, "out")
        tracer.put(
            frame.record(
                tracer.next_seq(),
                "module",
                slots=slots,
                opened=frame.opened,
                thread=tracer.state.number,
                note=self._note,
            )
        )

    def _put_inline(self, frame: Frame, name: str, value: Any) -> None:
        tracer = self._tracer
        counter = f"inline:{name}"
        n = frame.counts[counter] = frame.counts.get(counter, -1) + 1
        repeat = self._repeats[name] = self._repeats.get(name, -1) + 1
        if self._wants is not None and not self._wants(manual_name(name, repeat)):
            return
        tracer.set_save(tracer.options.save_of(frame.path))
        slots = self._slots("out", value, "out")
        tracer.put(
            frame.record(tracer.next_seq(), "inline", name=name, n=n, slots=slots, thread=tracer.state.number)
        )

    def _slots(self, name: str, value: Any, role: str) -> list[RawSlot]:
        if isinstance(value, Opaque):
            return [RawSlot(name, role, value={"opaque": value.name}, is_tensor=False)]
        return self._tracer.value_slots(name, value, role, fresh=True)
