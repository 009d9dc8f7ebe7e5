"""Links between the values of two traces whose calls and ops are paired.

Parameters of one name or of one content, what paired calls take and return, what paired ops read and
make. Nothing is compared here: `Comparer` does that when somebody asks.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from dispatch_trace.align.canon import dtype_class, is_factory, short
from dispatch_trace.align.carried import carry_layouts
from dispatch_trace.align.content import Comparer, Layout, same_class
from dispatch_trace.align.graph import Origin, Program, Value
from dispatch_trace.align.pairs import Link, Pairing, module_slots, paired_slots, same_path
from dispatch_trace.align.weights import products
from dispatch_trace.schema import StoredRecord, StoredSlot


def link(pairing: Pairing) -> None:
    """Adds all links that the paired calls and ops lead to."""
    _link_params(pairing)
    _link_weights(pairing)
    _link_modules(pairing)
    _link_ops(pairing)
    carry_layouts(pairing)


def relinked(pairing: Pairing, ref: Program, target: Program, comparer: Comparer) -> Pairing:
    """The same calls and ops paired, with links between other values of the same records."""
    found = replace(
        pairing,
        ref=ref,
        target=target,
        comparer=comparer,
        modules=[],
        recorded=pairing,
        links=defaultdict(list),
        ref_links=defaultdict(list),
        # Inputs that were varied on purpose count in any precision; what else was measured is rounding.
        floors={value: floor for value, floor in pairing.floors.items() if pairing.ref.is_leaf(value)},
    )
    link(found)
    return found


def _link_params(pairing: Pairing) -> None:
    by_content = {pair.target.seq for pair in pairing.weights}
    for (model, path, name), versions in pairing.ref.params.items():
        if model not in pairing.models:
            continue
        key = (pairing.models[model], pairing.renames.apply(path), name)
        for ref, target in zip(versions, pairing.target.params.get(key, ()), strict=False):
            a, b = ref.slots[0], target.slots[0]
            if same_class(a.dtype, b.dtype) and target.seq not in by_content:
                for c, d in zip(
                    ref.slots, target.slots, strict=False
                ):  # a second one: what it was written by
                    slots = (ref.seq, c.index, target.seq, d.index)
                    pairing.add(Link(slots[:2], slots[2:], c.content, d.content, "param", slots))


def _link_weights(pairing: Pairing) -> None:
    """Parameters that pair by content, and what products with weights laid out otherwise make of them."""
    returned = _returned(pairing.target) if pairing.weights else set()
    for pair in pairing.weights:
        target, parts = (
            pairing.target.records[pair.target.seq],
            [pairing.ref.records[r.seq] for r in pair.ref],
        )
        if not same_class(parts[0].slots[0].dtype, target.slots[0].dtype):
            continue
        places, layout = [(part.seq, 0) for part in parts], pair.layout
        ours = products(pairing.target, (target.seq, 0))
        if layout is not None and returned.intersection(ours):
            layout = layout.in_order  # nothing behind an output puts it in order again
        _link_layout(pairing, places, (target.seq, 0), layout, "param")
        if layout is None or layout.is_plain:
            continue
        readers = [products(pairing.ref, place) for place in places]
        if any(len(found) != len(ours) for found in readers):
            continue
        for made, *theirs in zip(ours, *readers, strict=True):
            shape, shapes = pairing.target.slot(made).shape, [pairing.ref.slot(v).shape for v in theirs]
            sizes = tuple(s[-1] for s in shapes)
            if shape[-1] != len(layout.index) or sizes != layout.sizes or len({s[:-1] for s in shapes}) != 1:
                continue  # the rows of the weight are not what the product is made of
            last = len(shapes[0]) - 1
            made_layout = replace(layout, ref_axis=last, axis=last)
            _link_layout(pairing, theirs, made, made_layout, "op")


def _returned(program: Program) -> set[Value]:
    """What root modules return."""
    return {
        origin.value
        for call in program.calls.values()
        if call.parent is None and call.record is not None
        for slot in call.record.slots
        if slot.role == "out" and slot.is_tensor
        for origin in program.origins(call.record, slot)
    }


def _link_layout(
    pairing: Pairing, parts: list[Value], target: Value, layout: Layout | None, method: str
) -> None:
    """Links a value of the target with the values of the reference that it is laid out of."""
    contents = tuple(pairing.ref.slot(part).content for part in parts)
    number = contents[0]
    if layout is not None:
        if min(contents) < 0:
            return
        number = pairing.comparer.laid_out(replace(layout, parts=contents))
        pairing.whole[0].update(parts)
        pairing.whole[1].add(target)
    slots = (*parts[0], *target)
    link = Link(parts[0], target, number, pairing.target.slot(target).content, method, slots)
    pairing.add(link)
    for part in parts[1:]:
        pairing.ref_links[part].append(link)


def _link_modules(pairing: Pairing) -> None:
    for ref_key, target_key in pairing.calls.items():
        ref, target = pairing.ref.calls[ref_key].record, pairing.target.calls[target_key].record
        if ref is None or target is None:
            continue
        pairing.modules.append((ref, target))
        for twin, slot in module_slots(ref, target, pairing):
            _link_slots(pairing, ref, twin, target, slot, "module" if slot.role == "out" else "input")
    if pairing.target.reader.reads_across:
        _link_handed_on(pairing)
    _link_inline(pairing)


def _link_handed_on(pairing: Pairing) -> None:
    """What other steps made of what paired calls take: after all links by the calls of its own step."""
    for ref, target in pairing.modules:
        for twin, slot in module_slots(ref, target, pairing):
            if slot.role != "in" or not same_class(twin.dtype, slot.dtype):
                continue
            slots = (ref.seq, twin.index, target.seq, slot.index)
            made = (pairing.ref.reader.sources(ref, twin), pairing.target.reader.sources(target, slot))
            for first, second in zip(*made, strict=False):
                contents = pairing.ref.slot(first).content, pairing.target.slot(second).content
                pairing.add(Link(first, second, *contents, "input", slots))


def _link_inline(pairing: Pairing) -> None:
    """Inline captures pair by name and number within a pair of calls: the user said what they are."""
    theirs = {
        (pairing.ref.call_of(record).key, record.grad_phase, record.name, record.n): record
        for record in pairing.ref.records.values()
        if record.kind == "inline"
    }
    backward = {target: ref for ref, target in pairing.calls.items()}
    for target in pairing.target.records.values():
        if target.kind != "inline":
            continue
        around = backward.get(pairing.target.call_of(target).key)
        ref = theirs.get((around, target.grad_phase, target.name, target.n)) if around is not None else None
        if ref is not None and ref.slots[0].is_tensor and target.slots[0].is_tensor:
            pairing.modules.append((ref, target))
            _link_slots(pairing, ref, ref.slots[0], target, target.slots[0], "module")


def _link_ops(pairing: Pairing) -> None:
    for pair in list(pairing.ops.values()):
        ref, target = pairing.ref.records[pair.ref], pairing.target.records[pair.target]
        for a, b in paired_slots(ref, pairing.ref.outputs(ref), target, pairing.target.outputs(target)):
            _link_slots(pairing, ref, a, target, b, "edge" if pairing.target.is_edge(target) else "op")
        if is_factory(target):
            continue
        for a, b in paired_slots(ref, pairing.ref.inputs(ref), target, pairing.target.inputs(target)):
            _link_slots(pairing, ref, a, target, b, "operand")


def _link_slots(
    pairing: Pairing,
    ref: StoredRecord,
    ref_slot: StoredSlot,
    target: StoredRecord,
    target_slot: StoredSlot,
    method: str,
) -> None:
    """Links what stands behind two slots, where the slots hold all of it."""
    if not same_class(ref_slot.dtype, target_slot.dtype) and dtype_class(ref_slot.dtype) != "b":
        return
    places = []
    for program, record, slot in ((pairing.ref, ref, ref_slot), (pairing.target, target, target_slot)):
        if slot.role == "in" or record.kind in ("module", "inline"):
            origins = program.origins(record, slot)
        else:
            origins = program._origins_of((record.seq, slot.index))
        if pairing.plan is not None:
            origins = _last_write(program, origins)
        if len(origins) != 1 or not (origins[0].whole or (pairing.plan is not None and _repeats(origins[0]))):
            return
        places.append((origins[0], program.held_content(record, slot)))
    if places[0][0].whole != places[1][0].whole:
        # One side repeats heads, the other has them repeated by the op: what is repeated can be compared.
        places = [
            (origin, program.slot(origin.value).content)
            for (origin, _), program in zip(places, (pairing.ref, pairing.target), strict=True)
        ]
    (first, a_content), (second, b_content) = places
    a, b = first.value, second.value
    if (a_content < 0 or b_content < 0) and same_path(pairing.ref, first, pairing.target, second):
        a_content, b_content = pairing.ref.slot(a).content, pairing.target.slot(b).content
    if same_class(pairing.ref.slot(a).dtype, pairing.target.slot(b).dtype):
        slots = (ref.seq, ref_slot.index, target.seq, target_slot.index)
        pairing.add(Link(a, b, a_content, b_content, method, slots))


def _repeats(origin: Origin) -> bool:
    """Whether all of a value arrives, some of it more than once."""
    return origin.share >= 1.0 and bool(origin.edges)


def _last_write(program: Program, origins: tuple[Origin, ...]) -> tuple[Origin, ...]:
    """The last of several writes in place, which leaves all of a cache that is written step by step."""
    last = max(origins, key=lambda o: o.value)
    written = [program.slot(o.value).role == "written" for o in origins]
    if len(origins) < 2 or not all(written) or len({program.slot(o.value).shape for o in origins}) != 1:
        return origins
    return (replace(last, whole=last.share >= 1.0),)


def link_gathered(pairing: Pairing) -> None:
    """Rows read from a cache that was written in place: what was written is what the reference has there."""
    for value, links in list(pairing.links.items()):
        record = pairing.target.records[value[0]]
        if record.kind != "op" or short(record.op) not in ("index", "index_select", "gather"):
            continue
        source = next((s for s in pairing.target.inputs(record) if s.name == "in.self"), None)
        origins = (
            () if source is None else _last_write(pairing.target, pairing.target.origins(record, source))
        )
        if len(origins) != 1 or pairing.target.slot(origins[0].value).role != "written":
            continue
        content = pairing.target.slot(origins[0].value).content
        for link in list(links):
            if link.method == "operand" and content >= 0:
                pairing.add(replace(link, target=origins[0].value, target_content=content))
