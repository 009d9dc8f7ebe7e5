"""Op-level capture in eager mode: a `TorchDispatchMode` that records every op below autograd.

Guarantees: the op runs once, on its own arguments, outside every `try` of the recorder; its result is
handed on unchanged; what the recorder itself computes is never recorded and draws no random numbers.
Everything about an overload is worked out once and cached (`OpInfo`). Leaves to `frames` whose op it is,
to `snapshot` what its tensors hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from dispatch_trace.capture.frames import Frame, ThreadState, in_checkpoint_recompute, owner_of_node
from dispatch_trace.capture.plain import PLAIN, PLAIN_TENSORS, encode, intercepts_ops
from dispatch_trace.capture.tracer import Tracer
from dispatch_trace.schema import NO_CALL, GradPhase, RawRecord, RawSlot

_current_node = torch._C._current_autograd_node

# Of these only the arguments and the alias relation are recorded (DESIGN.md, "On disk").
_EMPTY = frozenset(
    {
        "aten.empty",
        "aten.empty_like",
        "aten.empty_strided",
        "aten.empty_permuted",
        "aten.new_empty",
        "aten.new_empty_strided",
        "aten.empty_quantized",
        "aten._empty_affine_quantized",
        "aten._empty_per_channel_affine_quantized",
    }
)
_ALIAS = frozenset({"aten.detach", "aten.lift_fresh", "aten.alias", "aten._unsafe_view", "aten.lift"})
# They overwrite `self` without looking at it, so reading it is no read of unwritten memory.
_BLIND = frozenset(
    {
        "aten.copy",
        "aten.fill",
        "aten.zero",
        "aten.normal",
        "aten.uniform",
        "aten.bernoulli",
        "aten.random",
        "aten.exponential",
        "aten.cauchy",
        "aten.log_normal",
        "aten.geometric",
        "aten._foreach_copy",
        "aten._foreach_zero",
        "aten.set",
    }
)
# In training they update what their schema calls read only.
_RUNNING = ("running_mean", "running_var")
_UNDECLARED_WRITES = {
    "aten.native_batch_norm": _RUNNING,
    "aten.cudnn_batch_norm": _RUNNING,
    "aten.miopen_batch_norm": _RUNNING,
}
# Ops of other libraries run again only where that library is loaded: their results are kept like leaves.
_TORCH_NAMESPACES = frozenset(
    {
        "aten",
        "prims",
        "quantized",
        "_quantized",
        "quantization",
        "mkl",
        "mkldnn",
        "onednn",
        "sparse",
        "inductor",
    }
)
_RESIZING = frozenset({"aten.resize", "aten.resize_as"})
_DROPPED_NAMESPACES = frozenset({"profiler", "dispatch_trace"})
_DROPPED = frozenset({"prim.device", "prim.layout", "aten.sym_size", "aten.sym_stride", "aten.sym_numel"})
# What they return reads negated or conjugated, which no geometry shows.
_FLAGGING = frozenset({"aten._neg_view", "aten._conj", "aten.real", "aten.imag", "aten.view_as_real"})
# Scalars that turn up everywhere: equality with an earlier `.item()` says nothing about them.
_COMMON = frozenset({0, 1, 2, -1, -2, 0.5, -0.5})


def base_name(func: Any) -> str:
    """`aten.relu` for `aten::relu_`: namespace and name, overload and trailing `_` dropped."""
    namespace, _, name = func._schema.name.partition("::")
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return f"{namespace}.{name}"


class OpInfo:
    """What is fixed about one overload, worked out once."""

    __slots__ = (
        "aten",
        "base",
        "blind",
        "call",
        "composite",
        "direct",
        "dropout",
        "dropped",
        "foreign",
        "func",
        "is_empty",
        "item",
        "keys",
        "light",
        "names",
        "overload",
        "quick",
        "random",
        "resizes",
        "selected",
        "training",
        "written",
        "written_names",
    )

    def __init__(self, func: Any, selected: Callable[[str], bool]) -> None:
        self.func = func  # kept, so that its id stays its own
        self.keys: dict[int, Callable[..., tuple[Any, ...]]] = {}  # by number of arguments, see `keys`
        if not isinstance(func, OpOverload):
            self.base = f"higher_order.{func.name() if callable(func.name) else func.name}"
            self.overload = self.base
            self.call = func
            self.names: list[str] = []
            self.written: list[int] = []
            self.written_names: list[str] = []
            self.light = self.random = self.is_empty = self.item = self.composite = False
            self.blind: frozenset[str] = frozenset()
            self.resizes = False
            self.aten = False
            self.foreign = True
            self.dropout = self.training = -1
            self.dropped = self.direct = self.quick = False
            self.selected = selected(self.base)
            return
        schema = func._schema
        self.base = base_name(func)
        self.overload = str(func)
        self.call = func._op
        self.names = [a.name for a in schema.arguments]
        undeclared = _UNDECLARED_WRITES.get(self.base, ())
        self.written = [
            i
            for i, a in enumerate(schema.arguments)
            if a.name in undeclared or (a.alias_info is not None and a.alias_info.is_write)
        ]
        self.training = self.names.index("training") if undeclared else -1
        self.written_names = [self.names[i] for i in self.written]
        self.is_empty = self.base in _EMPTY
        returns_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        self.light = (
            (returns_view and not self.written and func.is_view) or self.base in _ALIAS or self.is_empty
        )
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        self.item = self.base == "aten._local_scalar_dense"
        self.aten = schema.name.startswith("aten::")
        self.foreign = schema.name.split("::")[0] not in _TORCH_NAMESPACES or self.base == "aten.from_file"
        self.dropout = self.names.index("dropout_p") if "dropout_p" in self.names else -1
        blind = set(self.written_names) if self.base in _BLIND else set()
        blind.update(a.name for a in schema.arguments if a.is_out)
        self.blind = frozenset(blind)
        self.resizes = self.base in _RESIZING or any(a.is_out for a in schema.arguments)
        self.dropped = schema.name.split("::")[0] in _DROPPED_NAMESPACES or self.base in _DROPPED
        self.selected = selected(self.base)
        self.composite = _is_composite(func)
        # No question but whose it is stands between the op and its record.
        self.direct = self.selected and not (self.dropped or self.composite)
        # What it reads may be looked at after it has run, and what it returns comes of that alone.
        self.quick = (
            self.direct
            and self.aten
            and not (self.written or self.resizes or self.foreign or self.is_empty or self.item)
            and self.base not in _FLAGGING
            and (not self.random or self.dropout >= 0)
        )

    def record(self, frame: Frame, seq: int, n: int, **fields: Any) -> RawRecord:
        """A record of this op in a body, the `n`-th of its name there."""
        return frame.record(seq, "op", op=self.base, n=n, overload=self.overload, light=self.light, **fields)

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """What was passed, by the names of the schema."""
        names = self.names
        named = [(names[i] if i < len(names) else str(i), value) for i, value in enumerate(args)]
        return named + list(kwargs.items())

    def writes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
        """The tensors that a call writes to, each with the name of its argument."""
        if self.training >= 0 and not self._passed(self.training, args, kwargs):
            return []
        places = zip(self.written, self.written_names, strict=True)
        return [(f"{n}{end}", t) for i, n in places for end, t in _tensors_of(self._passed(i, args, kwargs))]

    def _passed(self, position: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return args[position] if position < len(args) else kwargs.get(self.names[position])

    def draws(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call takes something from a random state (attention does so only with dropout)."""
        if not self.random or self.dropout < 0:
            return self.random
        return bool(self._passed(self.dropout, args, kwargs))


def _is_composite(func: OpOverload) -> bool:
    """Whether the op exists only as a composition of others (`linear`, `matmul`, `to`)."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    name = func.name()
    return bool(
        has(name, "CompositeImplicitAutograd")
        and not has(name, "CPU")
        and torch.Tag.maybe_aliasing_or_mutating not in func.tags
    )


def _any_subclass(types: Sequence[type]) -> bool:
    """Whether one of them intercepts ops; autograd lists plain tensors when it saves a result (`detach`)."""
    return any(map(intercepts_ops, types))


class OpRecorder(TorchDispatchMode):
    """The dispatch mode of one thread of one recording."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs as compiled code below the mode, which sees its extern kernels only."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracer = tracer

    def start(self) -> None:
        """Puts the mode on this thread's stack."""
        self.__enter__()  # type: ignore[no-untyped-call]
        self._tracer.state.mode = self

    def stop(self) -> None:
        """Takes it off again; must run in the thread that started it."""
        self._tracer.state.mode = None
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def is_on_top(self) -> bool:
        """Whether no other mode lies above this one on this thread's stack."""
        return _get_current_dispatch_mode() is self

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self.dispatch(func, types, args, kwargs)

    def dispatch(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> Any:
        """Runs the op, and records it where it is wanted."""
        if types and isinstance(func, OpOverload) and _any_subclass(types):
            if FakeTensor in types:
                return func(*args, **(kwargs or {}))  # a run without values; its mode lies below ours
            return NotImplemented  # a tensor subclass: its own inner ops come back here
        tracer = self._tracer
        info = tracer.op_infos.get(id(func))
        if info is None:
            info = op_info(tracer, func)
        state = tracer.state
        kwargs = kwargs or {}
        if state.busy or info.dropped:
            return info.call(*args, **kwargs)
        frame = site(tracer, state, info)
        if frame is None:
            out = info.call(*args, **kwargs)
            if info.written and tracer.storages is not None:
                unrecorded_writes(tracer, info, args, kwargs, out)
            return out
        if info.composite:
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        return self.observe(frame, info, args, kwargs)

    def observe(self, frame: Frame, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an op of this frame and records it."""
        tracer = self._tracer
        state = tracer.state
        pending = None
        try:
            pending = before_op(tracer, state, frame, info, args, kwargs)
        except Exception as error:
            tracer.fault(error)
        out = info.call(*args, **kwargs)
        if pending is not None:
            try:
                after_op(tracer, state, info, pending, args, kwargs, out)
            except Exception as error:
                tracer.fault(error)
        return out


def op_info(tracer: Tracer, func: Any) -> OpInfo:
    info = OpInfo(func, tracer.wants_op)
    tracer.op_infos[id(func)] = info
    return info


def site(tracer: Tracer, state: ThreadState, info: OpInfo) -> Frame | None:
    """The frame whose op this is, or None where it is not to be recorded."""
    if not tracer.active or not info.selected:
        return None
    frame: Frame | None = state.frame
    node = _current_node()
    if node is None or (frame is not None and frame.phase == "recompute"):
        if frame is None:
            frame = tracer.outside_frame()
        return frame if frame is not None and frame.records_ops else None
    return backward_frame(tracer, state, node)


def backward_frame(tracer: Tracer, state: ThreadState, node: Any) -> Frame | None:
    """The frame of an op that runs inside autograd's backward."""
    if not tracer.recorded_steps:
        return None
    owner = owner_of_node(state, node)
    recompute = torch.is_grad_enabled() and in_checkpoint_recompute()
    phase: GradPhase = "recompute" if recompute else "bwd"
    if owner is None:
        model, step = tracer.last_step
        records = tracer.default_records_ops and tracer.wants_step(step)
        return (
            tracer.counters.body(model=model, step=step, phase=phase, path="", call=NO_CALL, records_ops=True)
            if records
            else None
        )
    if not owner.records_ops:
        return None
    return tracer.counters.body(
        model=owner.model, step=owner.step, phase=phase, path=owner.path, call=owner.call, records_ops=True
    )


def before_op(
    tracer: Tracer,
    state: ThreadState,
    frame: Frame,
    info: OpInfo,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> RawRecord:
    """Numbers the op and looks at its inputs, before it runs."""
    if any(type(value) is torch.nn.Parameter for value in args):
        with tracer.own_ops(state, in_dispatch=True):
            tracer.record_moved_parameters(state, args, frame.step)
    n, seq = frame.count(info.base), tracer.next_seq()
    record = info.record(
        frame,
        seq,
        n,
        random=info.draws(args, kwargs),
        source=tracer.find_source(2),
        thread=state.number,
    )
    with tracer.own_ops(state, in_dispatch=True):
        if info.resizes:
            _own_memory((*args, *kwargs.values()))
        tracer.set_save(tracer.options.save_of(frame.path))
        slots, encoded = record.slots, record.args
        for name, value in info.arguments(args, kwargs):
            encoded.append((name, _argument(tracer, value, f"in.{name}", seq, slots, name in info.blind)))
    return record


def _own_memory(values: Sequence[Any]) -> None:
    """Ends the copy-on-write link of snapshots: torch 2.13 fails when such a storage grows (c10 COW.cpp)."""
    for value in values:
        if isinstance(value, torch.Tensor) and torch._C._is_cow_tensor(value):  # type: ignore[attr-defined]
            value.untyped_storage().data_ptr()
        elif isinstance(value, (list, tuple)):
            _own_memory(value)


def _argument(tracer: Tracer, value: Any, name: str, seq: int, slots: list[RawSlot], blind: bool) -> Any:
    kind = type(value)
    if kind in PLAIN:
        if tracer.items and (kind is float or kind is int) and value in tracer.items:
            return {"item": [value, tracer.items[value]]}
        return value
    if isinstance(value, torch.Tensor):
        if not tracer.options.inputs:
            return {"opaque": "tensor"}
        index = len(slots)
        slots.append(
            tracer.guarded(name, "in", value, lambda s: s.read(value, name, seq, index, blind=blind))
        )
        return {"ref": index}
    if isinstance(value, (list, tuple)):
        return [_argument(tracer, v, f"{name}[{i}]", seq, slots, blind) for i, v in enumerate(value)]
    return encode(value)


def after_op(
    tracer: Tracer,
    state: ThreadState,
    info: OpInfo,
    record: RawRecord,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Any,
) -> None:
    """Looks at what the op returned and wrote, and hands the record over."""
    storages = tracer.storages
    assert storages is not None
    slots = record.slots
    keep = record.random or info.foreign or (tracer.options.inputs and _has_opaque(record.args))
    with tracer.own_ops(state, in_dispatch=True):
        tracer.set_save(tracer.options.save_of(record.module))
        written: list[torch.Tensor] = []
        if info.written:
            for name, tensor in info.writes(args, kwargs):
                slots.append(storages.written(tensor, f"out.{name}", record.seq, len(slots), keep=keep))
                written.append(tensor)
        aliased = bool(written)
        fresh = False
        for name, value in _outputs_of(out):
            if isinstance(value, torch.Tensor):
                if any(value is w for w in written):
                    continue
                if type(value) not in PLAIN_TENSORS and intercepts_ops(type(value)):
                    slots += tracer.subclass_slots(name, value, "out")
                    continue
                slot, alias = storages.produced(
                    value,
                    name,
                    record.seq,
                    len(slots),
                    origin="empty" if info.is_empty else "op",
                    aten=info.aten,
                    keep=keep,
                )
                slots.append(slot)
                fresh = fresh or not alias
                aliased = aliased or alias
            else:
                slots.append(RawSlot(name, "out", value=encode(value), is_tensor=False))
                if info.item and type(value) in (int, float) and value not in _COMMON:
                    tracer.items[value] = record.seq
        if aliased and not written and not fresh:
            record.light = True  # a view that its schema does not declare
    tracer.put(record)


def _has_opaque(args: list[tuple[str, Any]]) -> bool:
    """Whether an argument cannot be given to the op again (a packed weight, a callable)."""
    return any(type(value) is dict and "opaque" in value for _, value in args)


def unrecorded_writes(
    tracer: Tracer, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> None:
    """Values that an unselected op overwrote are leaves from now on."""
    assert tracer.storages is not None
    try:
        for _, tensor in info.writes(args, kwargs):
            tracer.storages.overwritten_unseen(tensor)
    except Exception as error:
        tracer.fault(error)


def _tensors_of(value: Any) -> list[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        return [("", value)]
    if isinstance(value, (list, tuple)):
        return [(f"[{i}]", v) for i, v in enumerate(value) if isinstance(v, torch.Tensor)]
    return []


def _outputs_of(out: Any, name: str = "out") -> list[tuple[str, Any]]:
    """Every output with its slot name; a single one is `out`."""
    if isinstance(out, torch.Tensor):
        return [(name, out)]
    if isinstance(out, (tuple, list)):
        found: list[tuple[str, Any]] = []
        for i, value in enumerate(out):
            found += _outputs_of(value, f"{name}[{i}]")
        return found
    if out is None and name == "out":
        return []  # an op that only writes its arguments
    return [(name, out)]
