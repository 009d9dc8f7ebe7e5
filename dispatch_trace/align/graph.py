"""One trace as a program: calls of modules within calls, ops within calls, values flowing between ops.

A *value* is named by the slot that made it, `(seq, slot index)`: an op's output or written argument, a
parameter record, or the slot that first read a leaf. Views, clones and casts are edges (`canon`), so the
*origins* of a slot are the computed values and leaves behind them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from dispatch_trace.align.canon import SAME_ORDER, dtype_class, edge_input, is_empty, short
from dispatch_trace.schema import NO_CALL, GradPhase, StoredContent, StoredRecord, StoredSlot
from dispatch_trace.store.reader import RankReader

Value: TypeAlias = tuple[int, int]
CallKey: TypeAlias = tuple[int, str, str, int]
_MAX_ORIGINS = 64


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the values of a slot come from.

    Attributes:
      value: the computed value or leaf.
      same_order: element by element in the same logical order.
      whole: every element of the value arrives exactly once (perhaps in another order).
      share: elements that arrive, as a share of the value's; at most 1.
      casts: float dtypes that the value was cast to on the way, in order.
      edges: records passed through, nearest to the origin first.
    """

    value: Value
    same_order: bool = True
    whole: bool = True
    share: float = 1.0
    casts: tuple[str, ...] = ()
    edges: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class Call:
    """One call of a module.

    Attributes:
      key: (step, model, module path, call number).
      record: its module record; None where only its ops were recorded.
      parent: the enclosing call, None for a root's.
      children: calls within, in order.
      ops: records of its own body by grad phase, in order.
      opened, closed: records inside have opened <= seq <= closed.
      begins: where its first op ran, or that of a call within; module records of compiled code come after
        all ops of their region, so `opened` says nothing there.
    """

    key: CallKey
    record: StoredRecord | None
    parent: Call | None = None
    children: list[Call] = field(default_factory=list)
    ops: dict[GradPhase, list[StoredRecord]] = field(default_factory=lambda: defaultdict(list))
    opened: int = 0
    closed: int = 0
    begins: int = 0

    @property
    def path(self) -> str:
        return self.key[2]

    @property
    def number(self) -> int:
        return self.key[3]

    def enclosing(self) -> list[Call]:
        """This call and those around it, innermost first."""
        found, call = [], self
        while call is not None:
            found.append(call)
            call = call.parent  # type: ignore[assignment]
        return found


def around_all(calls: Iterable[Call]) -> Call:
    """The innermost call that is, or stands around, each of some calls; the first's root where none does."""
    first, *others = calls
    chains = [other.enclosing() for other in others]
    around = first.enclosing()
    return next((call for call in around if all(call in chain for chain in chains)), around[-1])


def slot_numel(slot: StoredSlot) -> int:
    count = 1
    for size in slot.shape:
        count *= size
    return count


class Program:
    """One rank of a trace, read into memory without its tensors.

    Attributes:
      reader: where the values lie.
      records: by seq, in order.
      calls: by key; outside all calls there is one pseudo-call per (step, model) with number -1.
      roots: calls without a parent, in order.
      params: parameter records by (model, module path, name), versions in order.
      consumers: value -> (seq, slot index) of the compute ops that read it, through edges.
    """

    def __init__(
        self,
        reader: RankReader,
        *,
        steps: Collection[int] | None = None,
        ops: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.reader = reader
        self.records: dict[int, StoredRecord] = {}
        self.deselected = 0
        self.calls: dict[CallKey, Call] = {}
        self.roots: list[Call] = []
        self.params: dict[tuple[str, str, str], list[StoredRecord]] = defaultdict(list)
        self.consumers: dict[Value, list[tuple[int, int]]] = defaultdict(list)
        self._leaves: dict[int, Value] = {}  # content -> the parameter or first reader that holds it
        self._returned: dict[int, list[Value]] = defaultdict(list)  # content -> results of compiled regions
        self._origins: dict[Value, tuple[Origin, ...]] = {}
        self._edges: dict[int, StoredSlot | None] = {}
        self._is_edge: dict[int, bool] = {}
        self._held: dict[Value, int] = {}
        for count, record in enumerate(reader.records()):
            unwanted = steps is not None and record.kind != "param" and record.step not in steps
            if unwanted or (record.kind == "op" and not ops):
                self.deselected += 1
                continue
            self.records[record.seq] = record
            if progress is not None and count % 512 == 0:
                progress(count, reader.num_records)
        self.records = dict(sorted(self.records.items()))
        self._build_calls()
        for record in self.records.values():
            if record.kind == "param":
                self.params[(record.model, record.module, record.name)].append(record)
                for slot in record.slots:
                    if slot.content >= 0:
                        self._leaves.setdefault(slot.content, (record.seq, slot.index))
        for record in self.records.values():
            opaque = record.kind == "module" and record.note.startswith("opaque")
            for slot in record.slots:
                if slot.content < 0 or slot.producers:
                    continue
                if slot.leaf:
                    self._leaves.setdefault(slot.content, (record.seq, slot.index))
                elif opaque and slot.role == "out" and slot.is_tensor:
                    self._returned[slot.content].append((record.seq, slot.index))
        for record in self.records.values():
            if record.kind == "op" and not self.is_edge(record):
                for slot in record.slots:
                    if slot.role == "in" and slot.is_tensor:
                        for origin in self.origins(record, slot):
                            self.consumers[origin.value].append((record.seq, slot.index))
                            if reader.reads_across:
                                owner, held = self.records[origin.value[0]], self.slot(origin.value)
                                for source in reader.sources(owner, held):
                                    self.consumers[source].append((record.seq, slot.index))

    # Values ---------------------------------------------------------------------------------------

    def slot(self, value: Value) -> StoredSlot:
        return self.records[value[0]].slots[value[1]]

    def content(self, slot: StoredSlot) -> StoredContent | None:
        return self.reader.content(slot.content) if slot.content >= 0 else None

    def stats(self, id: int) -> Mapping[str, float | None]:
        """Statistics of a content by name, each a number or one a step."""
        steps = self.reader.together(id)
        if steps is None:
            return self.reader.content(id).stats
        return self.reader.per_step(id, steps).stats(steps)

    def edge(self, record: StoredRecord) -> StoredSlot | None:
        """The input that an edge op hands on; None for ops that compute."""
        if record.seq not in self._edges:
            self._edges[record.seq] = edge_input(record)
        return self._edges[record.seq]

    def is_edge(self, record: StoredRecord) -> bool:
        found = self._is_edge.get(record.seq)
        if found is None:
            found = self._is_edge[record.seq] = is_empty(record) or self.edge(record) is not None
        return found

    def is_leaf(self, value: Value) -> bool:
        """A parameter, or a tensor that was read before anything recorded had made it."""
        record = self.records[value[0]]
        return record.kind == "param" or record.slots[value[1]].role == "in"

    def outputs(self, record: StoredRecord) -> list[StoredSlot]:
        """What an op made: returned and written tensors."""
        return [slot for slot in record.slots if slot.role != "in" and slot.is_tensor]

    def inputs(self, record: StoredRecord) -> list[StoredSlot]:
        return [slot for slot in record.slots if slot.role == "in" and slot.is_tensor]

    def origins(self, record: StoredRecord, slot: StoredSlot) -> tuple[Origin, ...]:
        """The computed values and leaves that a slot of a record holds (inputs, and module outputs)."""
        producers = slot.producers
        if len(producers) == 1 and producers[0][0] != record.seq and producers[0][0] in self.records:
            return self._origins_of(producers[0])  # nearly always
        found: dict[Value, Origin] = {}
        for seq, index in producers:
            if seq not in self.records or (seq, index) == (record.seq, slot.index):
                continue
            for origin in self._origins_of((seq, index)):
                found.setdefault(origin.value, origin)
        if not found:
            # One leaf may be read many times; an inner tensor of a parameter (its codes) is the parameter's.
            known = None
            if slot.leaf and record.kind != "param":
                known = self._returned_before(record, slot) or self._leaves.get(slot.content)
            return (Origin(known if known is not None else (record.seq, slot.index)),)
        if len(found) > 1:
            # Written piece by piece: what was only allocated is no part of the value.
            written = [o for o in found.values() if not is_empty(self.records[o.value[0]])]
            made = written or list(found.values())
            if len(made) > 1:
                made = [
                    Origin(
                        o.value, same_order=False, whole=False, share=o.share, casts=o.casts, edges=o.edges
                    )
                    for o in made
                ]
            return tuple(made[-_MAX_ORIGINS:])
        return tuple(found.values())

    def _returned_before(self, record: StoredRecord, slot: StoredSlot) -> Value | None:
        """What a compiled region returned last with the content of a leaf, in its memory: no op made it."""
        found = [v for v in self._returned.get(slot.content, ()) if v[0] < record.seq]
        return next((v for v in reversed(found) if self.slot(v).storage == slot.storage), None)

    def writers(self, record: StoredRecord) -> list[Value]:
        """What a parameter holds that has been written since it was recorded first, by who made it."""
        found: list[Value] = []
        for slot in record.slots:
            if slot.role == "in":  # made by another step (`RankReader.sources`)
                found.append((record.seq, slot.index))
            for place in slot.producers:
                if place[0] in self.records and place[0] != record.seq:
                    found += [origin.value for origin in self._origins_of(place)]
        return found

    def held_content(self, record: StoredRecord, slot: StoredSlot) -> int:
        """Number of the content that a slot holds, element by element; -1 where none was recorded.

        A view has no content of its own; where it keeps the logical order, what it shows has.
        """
        if slot.content >= 0:
            return slot.content
        key = (record.seq, slot.index)
        found = self._held.get(key)
        if found is None:
            found = self._held[key] = self._content_behind(record, slot)
        return found

    def _content_behind(self, record: StoredRecord, slot: StoredSlot) -> int:
        """`held_content` of a slot without a content of its own."""
        origins = self.origins(record, slot)
        if len(origins) != 1 or not origins[0].whole:
            return -1
        for seq in reversed(origins[0].edges):
            edge = self.records[seq]
            outputs = self.outputs(edge)
            if len(outputs) == 1 and outputs[0].content >= 0:
                return outputs[0].content
            if short(edge.op) not in SAME_ORDER or len(outputs) != 1:
                return -1
            source = self.edge(edge)
            if source is not None and source.content >= 0 and source.dtype == outputs[0].dtype:
                return source.content
        return self.slot(origins[0].value).content

    def _origins_of(self, value: Value) -> tuple[Origin, ...]:
        known = self._origins.get(value)
        if known is not None:
            return known
        record = self.records[value[0]]
        slot = record.slots[value[1]]
        result: tuple[Origin, ...]
        if slot.role == "in" or (record.kind == "param" and slot.producers):
            result = self.origins(record, slot)  # a weight that an op wrote to is what that op made
        else:
            source = self.edge(record)
            if source is None:
                result = (Origin(value),)
            else:
                result = tuple(self._through(record, source, slot, o) for o in self.origins(record, source))
        self._origins[value] = result
        return result

    def _through(self, record: StoredRecord, source: StoredSlot, out: StoredSlot, origin: Origin) -> Origin:
        name = short(record.op)
        before, after = slot_numel(source), slot_numel(out)
        casts = origin.casts
        if source.dtype != out.dtype and dtype_class(out.dtype) in "fc":
            casts = (*casts, out.dtype)
        return Origin(
            origin.value,
            same_order=origin.same_order and name in SAME_ORDER and before == after,
            whole=origin.whole and before == after and name not in ("as_strided", "expand", "unfold"),
            share=origin.share * min(1.0, after / before) if before else origin.share,
            casts=casts,
            edges=(*origin.edges, record.seq),
        )

    # Calls ----------------------------------------------------------------------------------------

    def call_of(self, record: StoredRecord) -> Call:
        """The innermost call that a record belongs to; for a module record the call it describes."""
        return self.calls[(record.step, record.model, record.module, record.call)]

    def _build_calls(self) -> None:
        modules = [r for r in self.records.values() if r.kind == "module" and r.grad_phase == "fwd"]
        for record in modules:
            key = (record.step, record.model, record.module, record.call)
            self.calls[key] = Call(key, record, opened=record.opened, closed=record.seq)
        for record in self.records.values():
            if record.kind in ("param", "module"):
                continue
            key = (record.step, record.model, record.module, record.call)
            call = self.calls.get(key)
            if call is None:
                call = self.calls[key] = Call(key, None, opened=record.seq, closed=record.seq)
            if record.kind == "op":
                call.ops[record.grad_phase].append(record)
                if call.record is None and record.grad_phase == "fwd":
                    call.opened, call.closed = min(call.opened, record.seq), max(call.closed, record.seq)
        ordered = self._nest()
        for call in ordered:
            ops = call.ops.get("fwd")
            call.begins = min(call.opened, ops[0].seq) if ops else call.opened
        for call in reversed(ordered):  # those within before those around
            if call.parent is not None:
                call.parent.begins = min(call.parent.begins, call.begins)

    def _nest(self) -> list[Call]:
        """Finds parents: the innermost call of an enclosing path that was open at the time.

        Returns: all calls, parents before children.
        """
        by_path: dict[tuple[int, str, str], list[Call]] = defaultdict(list)
        ordered = sorted(self.calls.values(), key=lambda c: (c.opened, -c.closed))
        for call in ordered:
            by_path[call.key[:3]].append(call)
        stacks: dict[int, list[Call]] = defaultdict(list)
        for call in ordered:
            if call.number == NO_CALL:
                self.roots.append(call)
                continue
            thread = call.record.thread if call.record is not None else 0
            stack = stacks[thread]
            while stack and not (stack[-1].opened <= call.opened and call.closed <= stack[-1].closed):
                stack.pop()
            parent = stack[-1] if stack else self._enclosing_path(call, by_path)
            if parent is not None and parent.key[:2] != call.key[:2] and not stack:
                parent = None
            call.parent = parent
            (parent.children if parent is not None else self.roots).append(call)
            stack.append(call)
        return ordered

    def _enclosing_path(self, call: Call, by_path: dict[tuple[int, str, str], list[Call]]) -> Call | None:
        """For calls of other threads: the call of the nearest enclosing path that was open then."""
        step, model, path, _ = call.key
        while path:
            path = path.rpartition(".")[0]
            around = by_path.get((step, model, path), [])
            at = bisect_left([c.opened for c in around], call.opened + 1) - 1
            for candidate in reversed(around[: at + 1]):
                if candidate.closed >= call.closed and candidate is not call:
                    return candidate
        return None
