"""`save="meta"`: sites, shapes, dtypes and arguments, as cheaply as a dispatch mode allows.

Guarantees: nothing of the program is kept, not even a tensor; in the op's way stand a dictionary lookup,
a count and an append. Records are put together by the writer's thread from what `MetaRecorder` notes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dispatch_trace.capture.frames import Frame
from dispatch_trace.capture.ops import OpInfo, OpRecorder
from dispatch_trace.capture.snapshot import dtype_name
from dispatch_trace.capture.structure import flatten, flatten_arguments
from dispatch_trace.capture.tracer import PLAIN, Tracer, encode
from dispatch_trace.schema import RawRecord, RawSlot

_current_node = torch._C._current_autograd_node


class TensorMeta:
    """Shape and dtype of a tensor that has to be told from a plain argument."""

    __slots__ = ("dtype", "shape")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tensor.shape
        self.dtype = tensor.dtype


def freeze(value: Any) -> Any:
    """A value without its tensors, and safe from later changes."""
    if isinstance(value, torch.Tensor):
        return TensorMeta(value)
    if isinstance(value, (list, tuple)):
        return [freeze(v) for v in value]
    return value if type(value) in PLAIN else encode(value)


class MetaRecorder(OpRecorder):
    """The dispatch mode of a recording that keeps no values."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__(tracer)
        self._infos = tracer.op_infos

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        tracer = self._tracer
        frame = tracer.state.frame
        info = self._infos.get(func)
        if types or info is None or not info.direct or frame is None or _current_node() is not None:
            return self.dispatch(func, types, args, kwargs)
        out = info.call(*args, **kwargs) if kwargs else info.call(*args)
        if frame.records_ops:
            note_op(tracer, frame, info, args, kwargs, out)
        return out

    def observe(
        self,
        frame: Frame,
        info: OpInfo,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        out = info.call(*args, **kwargs)
        note_op(self._tracer, frame, info, args, kwargs, out)
        return out


def note_op(
    tracer: Tracer,
    frame: Frame,
    info: OpInfo,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    out: Any,
) -> None:
    """Counts the op and notes what it was called with."""
    try:
        counts, base = frame.counts, info.base
        n = counts.get(base, 0)
        counts[base] = n + 1
        values = [v if type(v) in PLAIN else freeze(v) for v in args]
        keywords = {k: freeze(v) for k, v in kwargs.items()} if kwargs else None
        result = TensorMeta(out) if type(out) is torch.Tensor else freeze(out)
        tracer.put_later(op_record, frame, info, n, values, keywords, result, tracer.state.number)
    except Exception as error:
        tracer.fault(error)


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
    """The record of an op, from what `note_op` noted."""
    record = RawRecord(
        seq,
        "op",
        step=frame.step,
        model=frame.model,
        grad_phase=frame.phase,
        module=frame.path,
        call=frame.call,
        op=info.base,
        n=n,
        overload=info.overload,
        light=info.light,
        random=info.random,
        thread=thread,
    )
    names = info.names
    arguments = [(names[i] if i < len(names) else str(i), v) for i, v in enumerate(values)]
    arguments += (keywords or {}).items()
    for name, value in arguments:
        record.args.append((name, _slots(value, f"in.{name}", "in", record.slots)))
    if result is not None:
        _slots(result, "out", "out", record.slots)
    return record


def leaves_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Names and frozen values of a module call's arguments."""
    if not kwargs and len(args) == 1 and type(args[0]) is torch.Tensor:
        return [("in[0]", TensorMeta(args[0]))]
    return [(name, freeze(value)) for name, value in flatten_arguments(args, kwargs)]


def leaves_of_output(out: Any) -> list[tuple[str, Any]]:
    """Names and frozen values of what a module call returned."""
    if type(out) is torch.Tensor:
        return [("out", TensorMeta(out))]
    return [(name, freeze(value)) for name, value in flatten(out, "out")]


def module_record(
    seq: int, frame: Frame, outputs: Sequence[tuple[str, Any]], note: str, thread: int
) -> RawRecord:
    """The record of a module call, from the leaves noted at its entry and its return."""
    record = RawRecord(
        seq,
        "module",
        step=frame.step,
        model=frame.model,
        grad_phase=frame.phase,
        module=frame.path,
        call=frame.call,
        opened=frame.opened,
        thread=thread,
        note=note,
    )
    for role, leaves in (("in", frame.inputs), ("out", outputs)):
        for name, value in leaves:
            if isinstance(value, TensorMeta):
                _slots(value, name, role, record.slots)
            else:
                record.slots.append(RawSlot(name, role, value=value, is_tensor=False))
    return record


def _slots(value: Any, name: str, role: str, slots: list[RawSlot]) -> Any:
    """Adds the slots of a frozen value; returns it in the form that arguments are kept in."""
    if type(value) is TensorMeta:
        slots.append(RawSlot(name, role, dtype=dtype_name(value.dtype), shape=_plain_shape(value.shape)))
        return {"ref": len(slots) - 1}
    if type(value) is list:
        return [_slots(v, f"{name}[{i}]", role, slots) for i, v in enumerate(value)]
    if role == "out":
        slots.append(RawSlot(name, role, value=value, is_tensor=False))
    return value


def _plain_shape(shape: torch.Size) -> tuple[int, ...]:
    return tuple(s if type(s) is int else -1 for s in shape)
