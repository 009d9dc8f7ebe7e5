"""Places in another order, carried on: the layout of what an op reads is one of its result.

What stands along a dim in another order goes through elementwise ops, softmax and products as it is:

* The last dim: scores of reordered experts. A reduction or a top-k over it gives the reference's values, and
  other numbers of places; what is scattered by these is in the order again.
* The first: rows that `nonzero` found in another order, and all that is gathered by them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dispatch_trace.align.canon import dtype_class, family, is_factory, short
from dispatch_trace.align.content import Layout
from dispatch_trace.align.graph import Value, slot_numel
from dispatch_trace.align.pairs import Link, Pairing, paired_slots, slot_role
from dispatch_trace.schema import StoredRecord, StoredSlot


def _names(table: str) -> frozenset[str]:
    return frozenset(table.split())


# Results have the order of their operands.
_KEEPING = _names(
    """
    add sub mul div neg abs exp log sqrt rsqrt square pow sigmoid tanh relu silu gelu softplus clamp
    clamp_min clamp_max minimum maximum where masked_fill softmax log_softmax logical_not bitwise_not
    """
)
# Choose among the places of a dim, and return numbers of places.
_CHOOSING = _names("topk sort argsort argmax argmin max min")
_SCATTERING = _names("scatter one_hot")


def carry_layouts(pairing: Pairing) -> None:
    """Adds links between values in another order, from those that reordered weights and rows lead to."""
    orders: dict[Value, Layout] = {}
    for value, links in pairing.links.items():
        for link in links:
            layout = pairing.comparer.layout(link.ref_content)
            if layout is not None and link.method == "op" and _is_order(layout):
                orders[value] = layout
    for target in list(pairing.target.records.values()):
        pair = pairing.ops.get(target.seq) if target.kind == "op" else None
        if pair is None:
            if orders and target.kind == "op" and family(target.op) == "linear":
                _put_together(pairing, target, orders)
            continue
        ref = pairing.ref.records[pair.ref]
        if short(target.op) == "nonzero" and short(ref.op) == "nonzero":
            rows = _other_rows(pairing, ref, target)
            if rows is not None:
                orders[target.seq, pairing.target.outputs(target)[0].index] = rows
        elif orders and not pairing.target.is_edge(target):
            outputs = pairing.ref.outputs(ref), pairing.target.outputs(target)
            for a, b in paired_slots(ref, outputs[0], target, outputs[1]):
                layout = _Operands(pairing, target, orders).result(b)
                if layout is not None and a.content >= 0 and a.shape == b.shape:
                    orders[target.seq, b.index] = layout
                    _relink(pairing, (ref.seq, a.index), (target.seq, b.index), layout)


def _put_together(pairing: Pairing, record: StoredRecord, orders: dict[Value, Layout]) -> None:
    """A product of a fused weight with rows in another order: so are those of the products it stands for."""
    for out in pairing.target.outputs(record):
        rows = _Operands(pairing, record, orders).result(out)
        if rows is None or rows.axis != 0:
            continue
        value = record.seq, out.index
        orders[value] = rows
        known = pairing.links[value]
        for at, link in enumerate(known):
            layout = pairing.comparer.layout(link.ref_content)
            if layout is None or layout.axis == 0:
                continue
            number = pairing.comparer.laid_out(replace(layout, rows=rows.index))
            known[at] = replace(link, ref_content=number)


def _is_order(layout: Layout) -> bool:
    """Whether all of one value is in another order."""
    if len(layout.parts) != 1 or layout.is_plain or layout.ref_axis != layout.axis:
        return False
    return sorted(layout.index) == list(range(layout.sizes[0]))


def _other_rows(pairing: Pairing, ref: StoredRecord, target: StoredRecord) -> Layout | None:
    """How the places that `nonzero` found are ordered, where they are the reference's in another order.

    Two programs may count their dims in another order, too.
    """
    a, b = pairing.ref.outputs(ref)[0], pairing.target.outputs(target)[0]
    if a.shape != b.shape or len(a.shape) != 2 or a.content < 0 or b.content < 0 or not a.shape[0]:
        return None
    pairing.whole[0].add((ref.seq, a.index))
    pairing.whole[1].add((target.seq, b.index))
    first, second = pairing.comparer.array(True, a.content), pairing.comparer.array(False, b.content)
    if first is None or second is None:
        return None
    for turned in (first, first[:, ::-1]):
        orders = [np.lexsort(rows.T) for rows in (turned, second)]
        if np.array_equal(turned[orders[0]], second[orders[1]]):
            index = np.empty(len(first), dtype=np.int64)
            index[orders[1]] = orders[0]
            layout = Layout((a.content,), (len(first),), 0, 0, tuple(index.tolist()))
            return None if layout.is_plain else layout
    return None


class _Operands:
    """What an op of the target reads, and in which order."""

    def __init__(self, pairing: Pairing, record: StoredRecord, orders: dict[Value, Layout]) -> None:
        self._pairing = pairing
        self._record = record
        self._args = dict(record.args)
        self._ordered: list[tuple[StoredSlot, Layout]] = []
        self._others: list[StoredSlot] = []
        for slot in pairing.target.inputs(record):
            layout = self._order_of(slot, orders)
            if layout is None:
                self._others.append(slot)
            else:
                self._ordered.append((slot, layout))

    def _order_of(self, slot: StoredSlot, orders: dict[Value, Layout]) -> Layout | None:
        origins = self._pairing.target.origins(self._record, slot)
        layout = orders.get(origins[0].value) if len(origins) == 1 else None
        if layout is None:
            return None
        source = self._pairing.target.slot(origins[0].value)
        if layout.axis == 0 and len(source.shape) > 1:
            # Columns may be looked at one by one.
            return layout if slot.shape[:1] == source.shape[:1] else None
        same_end = slot.shape[-1:] == source.shape[-1:] == (len(layout.index),)
        return layout if origins[0].same_order and origins[0].whole and (layout.numbers or same_end) else None

    def result(self, out: StoredSlot) -> Layout | None:
        """How the places of a result are ordered; None where it is the reference's order, or not known."""
        if not self._ordered or any(other.index != self._ordered[0][1].index for _, other in self._ordered):
            return None
        slot, layout = self._ordered[0]
        if layout.numbers:
            return self._scattered(layout, out)
        return self._rows(layout, out) if layout.axis == 0 else self._last(slot, layout, out)

    def _scattered(self, layout: Layout, out: StoredSlot) -> Layout | None:
        """By numbers of places in another order."""
        last = len(out.shape) - 1
        if short(self._record.op) not in _SCATTERING or self._args.get("dim", -1) not in (-1, last):
            return None
        if out.shape[-1:] != (len(layout.index),) or not all(map(self._is_constant, self._others)):
            return None
        return replace(layout, numbers=False, ref_axis=last, axis=last)

    def _rows(self, layout: Layout, out: StoredSlot) -> Layout | None:
        name = family(self._record.op)
        roles = {slot_role(self._record, slot) for slot, _ in self._ordered}
        gathers = name == "index" and "in.self" not in roles
        multiplies = name == "linear" and roles == {"input"}
        keeps = name in _KEEPING and all(
            len(s.shape) < len(out.shape) or s.shape[:1] == (1,) for s in self._others
        )
        whole = out.shape[:1] == (len(layout.index),)
        return layout if whole and (gathers or multiplies or keeps) else None

    def _last(self, operand: StoredSlot, layout: Layout, out: StoredSlot) -> Layout | None:
        last, name = len(operand.shape) - 1, family(self._record.op)
        if short(self._record.op) in _CHOOSING and dtype_class(out.dtype) == "i":
            return replace(layout, numbers=True) if self._args.get("dim", -1) in (-1, last) else None
        if name not in _KEEPING or out.shape[-1:] != (len(layout.index),):
            return None
        if any(slot.shape and slot.shape[-1] != 1 for slot in self._others):
            return None
        return replace(layout, ref_axis=len(out.shape) - 1, axis=len(out.shape) - 1)

    def _is_constant(self, slot: StoredSlot) -> bool:
        program = self._pairing.target
        origins = program.origins(self._record, slot)
        return slot_numel(slot) == 1 or all(is_factory(program.records[o.value[0]]) for o in origins)


def _relink(pairing: Pairing, ref: Value, target: Value, layout: Layout) -> None:
    """The value is the reference's in another order, not the reference's as it is."""
    a, b = pairing.ref.slot(ref), pairing.target.slot(target)
    number = pairing.comparer.laid_out(replace(layout, parts=(a.content,), sizes=(len(layout.index),)))
    for place, links in ((target, pairing.links), (ref, pairing.ref_links)):
        links[place] = [known for known in links[place] if (known.ref, known.target) != (ref, target)]
    pairing.whole[0].add(ref)
    pairing.whole[1].add(target)
    pairing.add(Link(ref, target, number, b.content, "op", (*ref, *target)))


__all__ = ["carry_layouts"]
