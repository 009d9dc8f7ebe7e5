"""`save="meta"`: sites, shapes, dtypes and arguments, as cheaply as a dispatch mode allows.

Guarantees: nothing of the program is kept, not even a tensor; in the op's way stand a dictionary lookup,
a count and an append. Records are put together by the writer's thread from what `MetaRecorder` notes.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Sequence
from typing import Any

import torch

from dispatch_trace.capture.frames import Frame
from dispatch_trace.capture.ops import OpInfo, OpRecorder
from dispatch_trace.capture.snapshot import dtype_name
from dispatch_trace.capture.tracer import PLAIN, PLAIN_TENSORS, Tracer, encode
from dispatch_trace.nested import flatten, flatten_arguments
from dispatch_trace.schema import LaterRecord, RawRecord, RawSlot

_current_node = torch._C._current_autograd_node
_Tensor = torch.Tensor
_meta = operator.attrgetter("shape", "dtype")  # both in one call


_ROWS = 256
_EVERY = 15  # a mask of record numbers
_FLUSH_AFTER_S = 0.5


def freeze(value: Any) -> Any:
    """A value without its tensors, and safe from later changes.

    A tensor becomes a tuple (shape, dtype); nothing else becomes a tuple.
    """
    if isinstance(value, torch.Tensor):
        return _meta(value)
    if isinstance(value, (list, tuple)):
        if value and type(value[0]) is int:
            return list(value)  # sizes, strides, dims: the dispatcher takes no mixed lists
        return [freeze(v) for v in value]
    return value if type(value) in PLAIN else encode(value)


class MetaRecorder(OpRecorder):
    """The dispatch mode of a recording that keeps no values."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__(tracer)
        self._state = tracer.state
        self._infos = tracer.op_infos
        self._number = tracer.state.number
        self._next = tracer.numbers.__next__
        self._rows: list[LaterRecord] = []
        self._append = self._rows.append
        self._flushed = time.monotonic()
        self.last = tracer.upcoming_seq - 1

    def start(self) -> None:
        super().start()
        self._tracer.flushers.append(self.flush)

    def stop(self) -> None:
        # A program's threads come and go, and each call in one has a mode of its own.
        super().stop()
        self._tracer.flushers.remove(self.flush)
        self.flush()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        frame = self._state.frame
        info = self._infos.get(id(func))
        if types or info is None or frame is None or not info.direct or _current_node() is not None:
            return self.dispatch(func, types, args, kwargs)
        out = info.call(*args, **kwargs) if kwargs else info.call(*args)
        if frame.records_ops:
            # As `_note`, without the call: every line here is paid for by each op.
            try:
                counts, base = frame.counts, info.base
                counts[base] = n = counts.get(base, -1) + 1
                self.last = seq = self._next()
                self._append(
                    (
                        op_record,
                        seq,
                        frame,
                        info,
                        n,
                        [
                            _meta(v) if type(v) in PLAIN_TENSORS else v if type(v) in PLAIN else freeze(v)
                            for v in args
                        ],
                        {k: freeze(v) for k, v in kwargs.items()} if kwargs else None,
                        _meta(out) if type(out) is _Tensor else freeze(out),
                        self._number,
                    )
                )
                if not seq & _EVERY:
                    self._flush_if_due()
            except Exception as error:
                self._tracer.fault(error)
        return out

    def observe(self, frame: Frame, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = info.call(*args, **kwargs)
        try:
            self._note(frame, info, args, kwargs, out)
        except Exception as error:
            self._tracer.fault(error)
        return out

    def _note(
        self, frame: Frame, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        """Counts the op and notes what it was called with."""
        n = frame.count(info.base)
        self.last = seq = self._next()
        named = {k: freeze(v) for k, v in kwargs.items()}
        self._append((op_record, seq, frame, info, n, freeze(args), named, freeze(out), self._number))
        self.flush()

    def note_module(self, frame: Frame, out: Any, note: str = "") -> None:
        """Notes that a module call has ended, with what it returned (None where it raised)."""
        try:
            self.last = seq = self._next()
            if type(out) is _Tensor:
                leaves = [("out", _meta(out))]
            else:
                leaves = [] if note.startswith("raised") else leaves_of_output(out)
            self._append((module_record, seq, frame, leaves, note, self._number))
            if frame.is_root:
                self.flush()
            elif not seq & _EVERY:
                self._flush_if_due()
        except Exception as error:
            self._tracer.fault(error)

    def _flush_if_due(self) -> None:
        """Asked at every sixteenth record: a long call must not keep its notes to itself."""
        if len(self._rows) >= _ROWS or time.monotonic() - self._flushed > _FLUSH_AFTER_S:
            self.flush()

    def upcoming_seq(self) -> int:
        return self.last + 1

    def flush(self) -> None:
        """Hands on what was noted: at a batch, at the end of a root call, and before the recorder waits."""
        self._flushed = time.monotonic()
        rows, self._rows = self._rows, []
        self._append = self._rows.append
        if rows:
            self._tracer.put_rows(rows)


def op_record(
    seq: int,
    frame: Frame,
    info: OpInfo,
    n: int,
    values: list[Any],
    keywords: dict[str, Any] | None,
    result: Any,
    thread: int,
) -> RawRecord:
    """The record of an op, from what `MetaRecorder` noted."""
    record = info.record(frame, seq, n, random=info.random, thread=thread)
    for name, value in info.arguments(values, keywords or {}):
        record.args.append((name, _slots(value, f"in.{name}", "in", record.slots)))
    if result is not None:
        _slots(result, "out", "out", record.slots)
    return record


def leaves_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Names and frozen values of a module call's arguments."""
    if not kwargs and len(args) == 1 and type(args[0]) is torch.Tensor:
        return [("in[0]", _meta(args[0]))]
    return [(name, freeze(value)) for name, value in flatten_arguments(args, kwargs)]


def leaves_of_output(out: Any) -> list[tuple[str, Any]]:
    """Names and frozen values of what a module call returned."""
    if type(out) is torch.Tensor:
        return [("out", _meta(out))]
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
    for role, leaves in (("in", frame.inputs), ("out", outputs)):
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


def _plain_shape(shape: torch.Size) -> tuple[int, ...]:
    return tuple(s if type(s) is int else -1 for s in shape)
