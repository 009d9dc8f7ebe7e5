"""Makes op records from a plan and the values that compiled code handed out.

The records are what eager recording would have made: same keys, arguments, views as light records, producers
through storages. Views are taken again, on the tapped values; nothing else is computed here, because a value
that the compiled code did not compute must not stand in its trace. What was not tapped is listed without
data.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dispatch_trace.capture.graph_frames import GraphFrame, Run
from dispatch_trace.capture.graph_plan import Plan, Site, accesses, is_access, is_op, is_tap
from dispatch_trace.capture.ops import OpInfo, op_info
from dispatch_trace.capture.plain import PLAIN, PLAIN_TENSORS, encode
from dispatch_trace.capture.storage import geometry, shape_of
from dispatch_trace.schema import RawRecord, RawSlot
from dispatch_trace.store.layouts import dtype_name

NOT_TAPPED = "not tapped"


class _Missing:
    """Stands for a value that nobody has: the compiled code did not hand it out."""

    def __repr__(self) -> str:
        return "MISSING"


MISSING = _Missing()


class Seen:
    """A value that is on record and not at hand any more.

    Attributes:
      slot: the slot that shows it.
      producers: of a slot that reads it.
    """

    __slots__ = ("producers", "slot")

    def __init__(self, slot: RawSlot, producers: tuple[tuple[int, int], ...]) -> None:
        self.slot = slot
        self.producers = producers

    def read_as(self, name: str) -> RawSlot:
        slot = copy.copy(self.slot)
        slot.name, slot.role, slot.producers = name, "in", self.producers
        return slot


class Emitter:
    """One run of one graph, for one recording.

    Args:
      run: the forward run whose module calls the ops belong to.
      plan: the ops.
      inputs: values of placeholders by name.
      values: tapped values by name of the node (of its `getitem` where an op returns several).
      note: of every record.
    """

    def __init__(
        self, run: Run, plan: Plan, inputs: Mapping[str, Any], values: Mapping[str, Any], note: str
    ) -> None:
        self._run = run
        self._tracer = run.tracer
        self._state = run.tracer.state
        self._plan = plan
        self._inputs = inputs
        self._values = values
        self._note = note
        self._seen: dict[torch.fx.Node, Any] = {}
        self._first_reads: dict[int, Seen] = {}

    def emit(self, returned: Sequence[Any] = ()) -> None:
        """Makes the records, in the order of the graph.

        Args:
          returned: the graph's own outputs, as far as the program sees them.
        """
        env: dict[torch.fx.Node, Any] = {}
        for node in self._plan.nodes:
            if node.op == "placeholder":
                env[node] = self._inputs[node.name] if node.name in self._inputs else self._earlier(node)
            elif node.op == "get_attr":
                env[node] = _attribute(self._plan.module, str(node.target))
            elif node.op == "call_function":
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
                site = self._plan.sites.get(node)
                if site is None:
                    env[node] = self._compute(node, args, kwargs)
                else:
                    env[node] = self._op(node, site, args, kwargs)
            elif node.op == "output":
                self._define(node, returned)
                if not self._plan.backward:
                    self._keep_for_backward(node, env)

    def _define(self, node: torch.fx.Node, returned: Sequence[Any]) -> None:
        """Tells the recording which op made each output, and what the program really got."""
        storages, tracer = self._tracer.storages, self._tracer
        if storages is None:
            return
        sources: Any = node.args[0]
        with tracer.own_ops(self._state):
            tracer.set_save(tracer.options.save_of(self._run.base.path))
            for source, value in zip(sources, returned, strict=False):
                seen = self._seen.get(source) if isinstance(source, torch.fx.Node) else None
                if not isinstance(seen, Seen) or type(value) is not torch.Tensor:
                    continue
                g = geometry(value)
                if g is None or storages.known(value) is not None:
                    continue  # on record already
                entry, _ = storages.entry(value, g, "op")
                entry.history.definitions[g] = (*seen.producers[-1], 0)
                content = storages.snapshot(
                    value, g, keep=tracer.options.save_of(self._run.base.path) == "tensors"
                )
                if content is not None:
                    entry.history.contents[g] = content

    def _earlier(self, node: torch.fx.Node) -> Any:
        """What forward showed of a value that backward reads."""
        return self._run.seen.get(node.name, MISSING) if self._plan.backward else MISSING

    def _keep_for_backward(self, node: torch.fx.Node, env: dict[torch.fx.Node, Any]) -> None:
        for source in node.all_input_nodes:
            seen = self._seen.get(source) or self._first_reads.get(id(env[source]))
            if seen is not None:
                self._run.seen[source.name] = seen

    # -- what is no op -------------------------------------------------------------------------------

    def _compute(self, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
        """Sizes, tuple access, and taps of module hooks, which are their input."""
        if is_tap(node):
            return args[0]
        if node.name in self._values and is_op(node):
            return self._values[node.name]
        target: Any = node.target
        if is_access(node):
            parts, index = args
            if not isinstance(parts, (tuple, list)):
                return MISSING
            source = node.args[0]
            if isinstance(source, torch.fx.Node) and source in self._seen:
                self._seen[node] = self._seen[source][index]
            return parts[index]
        if is_op(node) or not _all_at_hand((args, kwargs)):
            return MISSING
        with self._tracer.own_ops(self._state):
            return target(*args, **kwargs)

    # -- ops -----------------------------------------------------------------------------------------

    def _op(self, node: torch.fx.Node, site: Site, args: Any, kwargs: Any) -> Any:
        tracer = self._tracer
        info = tracer.op_infos.get(id(node.target)) or op_info(tracer, node.target)
        with tracer.own_ops(self._state):
            out = self._output(node, info, args, kwargs)
            frame = self._run.frame(site)
            if frame is None or not info.selected or info.dropped:
                return out
            if self._plan.sparse and not info.is_empty and _all_missing(out):
                frame.count(info.base)
                return out
            frame.note, frame.source = self._note, site.source
            return self._record(node, frame, info, args, kwargs, out)

    def _output(self, node: torch.fx.Node, info: OpInfo, args: Any, kwargs: Any) -> Any:
        """What the op returned: as tapped, or a view taken again."""
        if node.name in self._values:
            return self._values[node.name]
        described = node.meta.get("val")
        if isinstance(described, (tuple, list)):
            parts: list[Any] = [MISSING] * len(described)
            for index, user in accesses(node).items():
                parts[index] = self._values.get(user.name, MISSING)
            if any(part is not MISSING for part in parts):
                return tuple(parts)
        if info.light and not info.is_empty and _all_at_hand((args, kwargs)):
            try:
                return info.call(*args, **kwargs)
            except RuntimeError:  # strides that the compiled code did not keep
                pass
        if isinstance(described, (tuple, list)):
            return tuple(MISSING for _ in described)
        return MISSING

    def _record(
        self, node: torch.fx.Node, frame: GraphFrame, info: OpInfo, args: Any, kwargs: Any, out: Any
    ) -> Any:
        tracer = self._tracer
        n, seq = frame.count(info.base), tracer.next_seq()
        record = info.record(
            frame, seq, n, random=info.draws(args, kwargs), source=None, thread=self._state.number
        )
        tracer.set_save(tracer.options.save_of(frame.path))
        for name, value in info.arguments(args, kwargs):
            record.args.append((name, self._argument(record, value, f"in.{name}", name in info.blind)))
        described = node.meta.get("val")
        seen: Any
        if isinstance(out, (tuple, list)):
            seen, results = [], []
            for i, value in enumerate(out):
                fake = described[i] if isinstance(described, (tuple, list)) and i < len(described) else None
                slot = self._result(record, info, value, f"out[{i}]", fake)
                seen.append(slot)
                results.append(slot if value is MISSING else value)
            result: Any = tuple(results)
        else:
            seen = self._result(record, info, out, "out", described)
            result = seen if out is MISSING else out
        self._seen[node] = seen
        tracer.put(record)
        return result

    def _argument(self, record: RawRecord, value: Any, name: str, blind: bool) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return value
        if isinstance(value, (torch.Tensor, Seen)):
            if not self._tracer.options.inputs:
                return {"opaque": "tensor"}
            index = len(record.slots)
            record.slots.append(self._read(record, value, name, index, blind))
            return {"ref": index}
        if isinstance(value, (list, tuple)):
            return [self._argument(record, v, f"{name}[{i}]", blind) for i, v in enumerate(value)]
        if value is MISSING:
            return {"opaque": NOT_TAPPED}
        return encode(value)

    def _read(self, record: RawRecord, value: Any, name: str, index: int, blind: bool) -> RawSlot:
        tracer, seq = self._tracer, record.seq
        if isinstance(value, Seen):
            return value.read_as(name)
        if tracer.storages is None:
            return _plain_slot(name, "in", value)
        slot = tracer.guarded(name, "in", value, lambda s: s.read(value, name, seq, index, blind=blind))
        if id(value) not in self._first_reads:
            producers = slot.producers or (((seq, index),) if slot.leaf else ())
            self._first_reads[id(value)] = Seen(slot, producers)
        return slot

    def _result(self, record: RawRecord, info: OpInfo, value: Any, name: str, described: Any) -> Any:
        """Adds the slot of one output, and returns what later ops know of it."""
        tracer, index = self._tracer, len(record.slots)
        if not isinstance(value, torch.Tensor):
            if value is not MISSING or not isinstance(described, torch.Tensor):
                record.slots.append(
                    RawSlot(name, "out", value=None if value is MISSING else encode(value), is_tensor=False)
                )
                return value
            slot = _plain_slot(name, "out", described)
            slot.note = "" if info.light else NOT_TAPPED
        elif tracer.storages is None:
            slot = _plain_slot(name, "out", value)
        elif type(value) not in PLAIN_TENSORS:
            record.slots += tracer.subclass_slots(name, value, "out")
            return value
        else:
            keep = record.random or info.foreign
            slot, _ = tracer.storages.produced(
                value,
                name,
                record.seq,
                index,
                origin="empty" if info.is_empty else "op",
                aten=info.aten,
                keep=keep,
            )
        record.slots.append(slot)
        return Seen(slot, ((record.seq, index),))


def _plain_slot(name: str, role: str, value: torch.Tensor) -> RawSlot:
    return RawSlot(name, role, dtype=dtype_name(value.dtype), shape=shape_of(value), device=str(value.device))


def _all_at_hand(values: Any) -> bool:
    if isinstance(values, (tuple, list)):
        return all(_all_at_hand(v) for v in values)
    if isinstance(values, Mapping):
        return all(_all_at_hand(v) for v in values.values())
    return not (values is MISSING or isinstance(values, Seen))


def _all_missing(value: Any) -> bool:
    return all(map(_all_missing, value)) if isinstance(value, (tuple, list)) else value is MISSING


def _attribute(module: torch.nn.Module, path: str) -> Any:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value


__all__ = ["MISSING", "NOT_TAPPED", "Emitter", "Seen"]
