"""`save="meta"`: sites, shapes, dtypes and arguments, as cheaply as a dispatch mode allows.

Guarantees: nothing of the program is kept, not even a tensor; in the op's way stand looks into two dicts, a
count and an append.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dispatch_trace.capture.frames import Frame
from dispatch_trace.capture.keys import Key, NoKey, call_key, exact, quick_key, shape_and_dtype
from dispatch_trace.capture.ops import OpInfo, site
from dispatch_trace.capture.plain import PLAIN, encode
from dispatch_trace.capture.rows import MANY_ROWS, RowRecorder
from dispatch_trace.capture.storage import shape_of
from dispatch_trace.nested import flatten, flatten_arguments
from dispatch_trace.schema import RawRecord, RawSlot
from dispatch_trace.store.layouts import dtype_name

_current_node = torch._C._current_autograd_node
_Tensor = torch.Tensor


def freeze(value: Any) -> Any:
    """A value without its tensors, and safe from later changes.

    A tensor becomes a tuple (shape, dtype); nothing else becomes a tuple.
    """
    if isinstance(value, torch.Tensor):
        try:
            return shape_and_dtype(value)
        except RuntimeError:  # strided nested tensors have no one shape
            return shape_of(value), value.dtype
    if isinstance(value, (list, tuple)):
        if value and type(value[0]) is int:
            return list(value)  # sizes, strides, dims: the dispatcher takes no mixed lists
        return [freeze(v) for v in value]
    return value if type(value) in PLAIN else encode(value)


def inputs_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a module call was given: of the usual one tensor (shape, dtype), else names and frozen values."""
    if len(args) == 1 and not kwargs and type(args[0]) is _Tensor:
        return shape_and_dtype(args[0])
    return [(name, freeze(value)) for name, value in flatten_arguments(args, kwargs)]


def _plain_key(info: OpInfo) -> Callable[..., Key]:
    return lambda out, *args: call_key(info, args, None, out)


class MetaRecorder(RowRecorder):
    """The dispatch mode of a recording that keeps no values."""

    inputs_of = staticmethod(inputs_of)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        info = self._infos.get(id(func))
        if types or info is None or not info.direct:
            if info is not None and not (types or info.selected):
                return info.call(*args, **kwargs) if kwargs else info.call(*args)
            return self.dispatch(func, types, args, kwargs)
        frame = self.here["frame"]
        if frame is None or _current_node() is not None:
            frame = site(self._tracer, self._state, info)
            if frame is None:
                return info.call(*args, **kwargs) if kwargs else info.call(*args)
        out = info.call(*args, **kwargs) if kwargs else info.call(*args)
        if frame.records_ops:
            # As `_note`, without the call: every line here is paid for by each op.
            try:
                if kwargs:
                    key = call_key(info, args, kwargs, out)
                else:
                    make = info.keys.get(len(args))
                    key = self._quick_key(info, args, out) if make is None else make(out, *args)
                body = self._bodies.get(key)
                if body is None or not frame.shares_bodies:
                    body = self._new_body(key, frame, info, args, kwargs, out)
                counts, base = frame.counts, info.base
                counts[base] = n = counts.get(base, -1) + 1
                self.last = seq = self._next()
                self._append((body, seq, frame, n, self._number, None, None))
            except (NoKey, RuntimeError):  # strided nested tensors raise at their shape
                self._note(frame, info, args, kwargs or {}, out)
            except AttributeError:  # an optional tensor that the first call of so many arguments was given
                info.keys[len(args)] = _plain_key(info)
                self._note(frame, info, args, kwargs or {}, out)
            except Exception as error:
                self._tracer.fault(error)
        return out

    def _quick_key(self, info: OpInfo, args: tuple[Any, ...], out: Any) -> Key:
        """The key of a call; remembers how to make it where others have as many arguments."""
        make = quick_key(info, len(args))
        try:
            key = make(out, *args)
        except (AttributeError, TypeError, IndexError):  # an optional tensor that is not given, most often
            make, key = _plain_key(info), call_key(info, args, None, out)
        info.keys[len(args)] = make
        return key

    def observe(self, frame: Frame, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = info.call(*args, **kwargs)
        self._note(frame, info, args, kwargs, out)
        return out

    def _note(
        self, frame: Frame, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        """Counts the op and notes what it was called with, in a body of its own."""
        try:
            body = self._new_body(None, frame, info, args, kwargs, out)
            n = frame.count(info.base)
            self.last = seq = self._next()
            self._append((body, seq, frame, n, self._number, None, None))
        except Exception as error:
            self._tracer.fault(error)

    def _new_body(
        self,
        key: tuple[Any, ...] | None,
        frame: Frame,
        info: OpInfo,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        out: Any,
    ) -> RawRecord:
        body = op_record(
            frame, info, freeze(args), {k: freeze(v) for k, v in (kwargs or {}).items()}, freeze(out)
        )
        if key is not None and frame.shares_bodies:
            self.keep_body(key, body)
        return body

    def note_module(self, frame: Frame, out: Any, note: str = "") -> None:
        """Notes that a module call has ended, with what it returned (None where it raised)."""
        try:
            inputs = frame.inputs
            if type(out) is _Tensor:
                outputs: Any = out.shape, out.dtype
            else:
                outputs = [] if note.startswith("raised") else leaves_of_output(out)
            if type(inputs) is tuple and type(outputs) is tuple:
                key: Any = (note, inputs, outputs)
            else:
                key = _key_of_leaves(note, inputs, outputs)
            body = self._bodies.get(key)
            if body is None:
                leaves = [("out", outputs)] if type(outputs) is tuple else outputs
                body = module_record(-1, frame, leaves, note, self._number)
                if key is not None:
                    self.keep_body(key, body)
            self.last = seq = self._next()
            self._append((body, seq, frame, 0, self._number, None, None))
            if len(self.rows) > MANY_ROWS:
                self._tracer.writer.put_rows_of(self)
        except Exception as error:
            self._tracer.fault(error)


def _key_of_leaves(note: str, *sides: Any) -> tuple[Any, ...] | None:
    """The key of a module call that took or returned more than one tensor; None where it has none."""
    try:
        return note, *[
            side
            if type(side) is tuple
            else (
                "leaves",
                *[(name, v if type(v) is tuple else exact(v, shape_and_dtype)) for name, v in side],
            )
            for side in sides
        ]
    except NoKey:
        return None


def op_record(
    frame: Frame, info: OpInfo, values: list[Any], keywords: dict[str, Any], result: Any
) -> RawRecord:
    """The record of an op with these frozen values; whose it is and its numbers stand in the rows."""
    record = info.record(frame, -1, 0, random=info.random)
    for name, value in info.arguments(values, keywords):
        record.args.append((name, _slots(value, f"in.{name}", "in", record.slots)))
    if result is not None:
        _slots(result, "out", "out", record.slots)
    return record


def leaves_of_output(out: Any) -> list[tuple[str, Any]]:
    """Names and frozen values of what a module call returned."""
    if type(out) is torch.Tensor:
        return [("out", shape_and_dtype(out))]
    return [(name, freeze(value)) for name, value in flatten(out, "out")]


def module_record(
    seq: int, frame: Frame, outputs: Sequence[tuple[str, Any]], note: str, thread: int
) -> RawRecord:
    """The record of a module call, from the leaves noted at its entry and its return."""
    record = frame.record(
        seq,
        "module",
        opened=frame.opened,
        thread=thread,
        note=note,
    )
    inputs = [("in[0]", frame.inputs)] if type(frame.inputs) is tuple else frame.inputs
    for role, leaves in (("in", inputs), ("out", outputs)):
        for name, value in leaves:
            if type(value) is tuple:
                _slots(value, name, role, record.slots)
            else:
                record.slots.append(RawSlot(name, role, value=value, is_tensor=False))
    return record


def _slots(value: Any, name: str, role: str, slots: list[RawSlot]) -> Any:
    """Adds the slots of a frozen value; returns it in the form that arguments are kept in."""
    if type(value) is tuple:
        shape, dtype = value
        slots.append(RawSlot(name, role, dtype=dtype_name(dtype), shape=_plain_shape(shape)))
        return {"ref": len(slots) - 1}
    if type(value) is list:
        return [_slots(v, f"{name}[{i}]", role, slots) for i, v in enumerate(value)]
    if role == "out":
        slots.append(RawSlot(name, role, value=value, is_tensor=False))
    return value


def _plain_shape(shape: Sequence[Any]) -> tuple[int, ...]:
    return tuple(s if type(s) is int else -1 for s in shape)
