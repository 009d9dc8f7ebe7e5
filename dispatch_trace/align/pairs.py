"""Two traces, lined up: the result of alignment that `judge` works on.

A `Link` says that a value of the target ought to be a value of the reference, and why: the same op made
both, the same module returned both, paired ops read both in the same place, or both are the parameter of
one name. One value may have several links; it is explained when one of them holds. A `Pair` is a row for
people: every record of both traces stands in exactly one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from dispatch_trace.align.arrival import by_arrival, has_no_order
from dispatch_trace.align.canon import dtype_class, family, is_factory, short
from dispatch_trace.align.content import Comparer, Difference, Layout, Rows, same_class
from dispatch_trace.align.graph import CallKey, Origin, Program, Value
from dispatch_trace.align.lens import StepLens
from dispatch_trace.align.modules import Renames, host, pair_calls
from dispatch_trace.align.named import named_alike
from dispatch_trace.align.ops import BodyAligner, Element, OpPair, scalars
from dispatch_trace.align.rows import RowMap
from dispatch_trace.align.steps import StepPair, StepPlan, pair_models, pair_steps, unpaired_steps
from dispatch_trace.align.structure import find_structure
from dispatch_trace.align.weights import WeightPair
from dispatch_trace.schema import NO_CALL, GradPhase, StoredRecord, StoredSlot
from dispatch_trace.store.reader import RankReader

Outcome: TypeAlias = Literal["matched", "absorbed", "ref-only", "target-only", "no-data", "deselected"]
Progress: TypeAlias = Callable[[int, int, str], None]
_PHASES: tuple[GradPhase, ...] = ("fwd", "recompute", "bwd")


@dataclass(slots=True, kw_only=True)
class Pair:
    """One row of an alignment.

    Attributes:
      ref, target: the records; None on the side that has none.
      outcome: matched (compared), absorbed (part of a region whose result was compared, or an op that
        only moves values), ref-only, target-only, no-data, deselected.
      method: how it was matched ("same op", "same family", "path", "name", "region", "edge").
      confidence: in [0, 1].
      error: relative L2 error of the worst output that someone reads, None where unknown.
      band: error up to which it is taken for noise here, None where unknown.
      label: "" or the label of a finding at this record.
      worst_row: (row, error) of the main output, from data only.
      notes: in words.
    """

    ref: StoredRecord | None
    target: StoredRecord | None
    outcome: Outcome
    method: str = ""
    confidence: float = 0.0
    error: float | None = None
    band: float | None = None
    label: str = ""
    worst_row: tuple[tuple[int, ...], float] | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Link:
    """A value of the target that ought to be a value of the reference.

    Attributes:
      ref, target: the values.
      ref_content, target_content: what to compare, by number; -1 where nothing was recorded.
      method: "op", "edge", "operand", "module", "param" or "input".
      slots: (ref seq, ref slot index, target seq, target slot index) of the place where they meet.
    """

    ref: Value
    target: Value
    ref_content: int
    target_content: int
    method: str
    slots: tuple[int, int, int, int]


@dataclass(slots=True, eq=False)
class Pairing:
    """Everything that alignment found out.

    Attributes:
      ref, target: the programs.
      comparer: compares their contents.
      models: models of the reference to models of the target.
      steps: the only steps that are compared, None for all.
      calls: calls of the reference to calls of the target.
      ops: op pairs by the target's seq.
      ops_by_ref: the same by the reference's seq.
      modules: (ref, target) module records of paired calls.
      links: by value of the target.
      ref_links: by value of the reference.
      plan: how steps were paired; None where they pair by number and as they are.
      others: further rounds of the plan, lined up in the same way.
      floors: relative errors that runs of the reference have among themselves, by value of the reference.
      unpaired: numbers of steps that only the reference, and only the target, has.
      weights: parameters that pair by content, where names say nothing.
      whole: values, of either side, whose layouts are compared: that takes all elements.
    """

    ref: Program
    target: Program
    comparer: Comparer
    models: dict[str, str]
    renames: Renames
    steps: Collection[int] | None = None
    calls: dict[CallKey, CallKey] = field(default_factory=dict)
    ops: dict[int, OpPair] = field(default_factory=dict)
    ops_by_ref: dict[int, OpPair] = field(default_factory=dict)
    modules: list[tuple[StoredRecord, StoredRecord]] = field(default_factory=list)
    links: dict[Value, list[Link]] = field(default_factory=lambda: defaultdict(list))
    ref_links: dict[Value, list[Link]] = field(default_factory=lambda: defaultdict(list))
    plan: StepPlan | None = None
    others: list[Pairing] = field(default_factory=list)
    floors: dict[Value, float] = field(default_factory=dict)
    unpaired: tuple[list[int], list[int]] = ([], [])
    weights: list[WeightPair] = field(default_factory=list)
    whole: tuple[set[Value], set[Value]] = field(default_factory=lambda: (set(), set()))

    @property
    def rounds(self) -> list[Pairing]:
        """This and all others: one record may have partners in several of them."""
        return [self, *self.others]

    def compare(self, link: Link) -> Difference:
        return self.comparer.compare(link.ref_content, link.target_content)

    def add(self, link: Link) -> None:
        known = self.links[link.target]
        if any(k.ref == link.ref and k.target_content == link.target_content for k in known):
            return
        known.append(link)
        self.ref_links[link.ref].append(link)


def pair_traces(
    ref: RankReader,
    target: RankReader,
    *,
    rename: Any = None,
    rows: Any = None,
    steps: Collection[int] | None = None,
    progress: Progress | None = None,
) -> Pairing:
    """Lines up two ranks.

    Args:
      ref, target: the traces.
      rename, rows: see `Renames` and `Rows`.
      steps: only these steps.
      progress: called with (done, total, what).
    Raises:
      RenameError, ConfigError: as those.
    """
    cut = Rows.of(rows)

    def reading(what: str) -> Callable[[int, int], None] | None:
        return None if progress is None else lambda done, total: progress(done, total, what)

    models, renames = pair_models(ref, target), Renames(rename)
    ref, target = named_alike(ref, target, models, renames.apply)
    plan = pair_steps(ref, target, models, steps)
    if plan is not None:
        found = [
            _round(plan, number, ref, target, cut, models, renames, reading)
            for number in range(max(len(plan.rounds), 1))
        ]
        found[0].others = found[1:]
    else:
        pairing = Pairing(
            Program(ref, steps=steps, progress=reading("reading the reference")),
            Program(target, steps=steps, progress=reading("reading the target")),
            Comparer(ref, target, cut),
            models,
            renames,
            steps,
            unpaired=unpaired_steps(ref, target, steps),
        )
        pairing.weights = find_structure(pairing.ref, pairing.target, pairing.comparer, models, renames)
        pairing.calls = pair_calls(pairing.ref, pairing.target, models, renames)
        found = [pairing]
    for pairing in found:
        _pair_ops(pairing, ignore_sizes=cut is not None or plan is not None, progress=progress)
        _link_params(pairing)
        _link_weights(pairing)
        _link_modules(pairing)
        _link_ops(pairing)
        if plan is not None:
            _link_gathered(pairing)
    return found[0]


def _round(
    plan: StepPlan,
    number: int,
    ref: RankReader,
    target: RankReader,
    cut: Rows | None,
    models: dict[str, str],
    renames: Renames,
    reading: Callable[[str], Callable[[int, int], None] | None],
) -> Pairing:
    """One round of a plan; what no round pairs shows in the first."""
    pairs: list[StepPair] = plan.rounds[number] if plan.rounds else []
    first = number == 0
    shown = [{p.ref for p in pairs}, {p.target for p in pairs}]
    if first:
        shown[0].update(plan.ref_only)
        shown[1].update(plan.target_only)
    lenses = [
        StepLens(reader, keys, out if first else (), outside=first)
        for reader, keys, out in zip((ref, target), shown, plan.left_out, strict=True)
    ]
    programs = [
        Program(lens, progress=reading(f"reading the {name}"))
        for lens, name in zip(lenses, ("reference", "target"), strict=True)
    ]
    for program, lens in zip(programs, lenses, strict=True):
        program.deselected += lens.left_out
    maps = {(p.ref, p.target): None if p.ref_rows is None else RowMap(p) for p in pairs}
    numbers = {p.ref: p.target[1] for p in pairs} | {(model, -1): -1 for model in models}
    pairing = Pairing(
        programs[0], programs[1], Comparer(lenses[0], lenses[1], cut, maps), models, renames, plan=plan
    )
    if first:
        pairing.unpaired = (
            sorted(number for model, number in plan.ref_only if model in models),
            sorted(number for model, number in plan.target_only if model in models.values()),
        )
    pairing.calls = pair_calls(programs[0], programs[1], models, renames, numbers)
    return pairing


def relinked(pairing: Pairing, ref: Program, target: Program, comparer: Comparer) -> Pairing:
    """The same calls and ops paired, with links between other values of the same records."""
    found = replace(
        pairing,
        ref=ref,
        target=target,
        comparer=comparer,
        modules=[],
        links=defaultdict(list),
        ref_links=defaultdict(list),
        # Inputs that were varied on purpose count in any precision; what else was measured is rounding.
        floors={value: floor for value, floor in pairing.floors.items() if pairing.ref.is_leaf(value)},
    )
    _link_params(found)
    _link_weights(found)
    _link_modules(found)
    _link_ops(found)
    return found


# Ops --------------------------------------------------------------------------------------------------


def _pair_ops(pairing: Pairing, *, ignore_sizes: bool, progress: Progress | None) -> None:
    aligner = BodyAligner(pairing.ref, pairing.target, ignore_sizes=ignore_sizes)
    backward = {target: ref for ref, target in pairing.calls.items()}
    bodies = [
        _bodies(pairing.ref, pairing.calls, lambda key: key),
        _bodies(pairing.target, backward, lambda key: backward[key]),
    ]
    order = sorted((key for key in bodies[1] if key in bodies[0]), key=has_no_order)
    for done, key in enumerate(order):
        first, second = bodies[0][key], bodies[1][key]
        if has_no_order(key):
            first = by_arrival(pairing.ref, first, None, pairing.ref)
            second = by_arrival(pairing.target, second, aligner.partner, pairing.ref)
        for pair in aligner.align(first, second):
            pairing.ops[pair.target] = pairing.ops_by_ref[pair.ref] = pair
        if progress is not None and done % 64 == 0:
            progress(done, len(order), "aligning ops")


def _bodies(
    program: Program, paired: dict[CallKey, CallKey], common: Callable[[CallKey], CallKey]
) -> dict[tuple[CallKey, GradPhase], list[Element]]:
    """The sequences to align: ops and child calls in order, by (call in the reference's terms, phase)."""
    placed: dict[tuple[CallKey, GradPhase], list[tuple[float, Element]]] = defaultdict(list)
    for call in program.calls.values():
        owner = host(call, paired)
        if owner.key not in paired:
            continue
        for phase in _PHASES:
            for record in call.ops.get(phase, ()):
                element = Element(record, edge=program.is_edge(record))
                placed[(common(owner.key), phase)].append((record.seq, element))
        if call.key in paired and call.parent is not None and call.number != NO_CALL:
            around = host(call.parent, paired)
            if around.key in paired:
                marker = Element(call.record, marker=common(call.key))
                placed[(common(around.key), "fwd")].append((call.begins - 0.5, marker))
    first = {key: min(place for place, _ in elements) for key, elements in placed.items()}
    return {
        key: [element for _, element in sorted(placed[key], key=lambda item: item[0])]
        for key in sorted(placed, key=first.__getitem__)
    }


# Links ------------------------------------------------------------------------------------------------


def _link_params(pairing: Pairing) -> None:
    by_content = {pair.target.seq for pair in pairing.weights}
    for (model, path, name), versions in pairing.ref.params.items():
        if model not in pairing.models:
            continue
        key = (pairing.models[model], pairing.renames.apply(path), name)
        for ref, target in zip(versions, pairing.target.params.get(key, ()), strict=False):
            a, b = ref.slots[0], target.slots[0]
            if same_class(a.dtype, b.dtype) and target.seq not in by_content:
                slots = (ref.seq, 0, target.seq, 0)
                pairing.add(Link((ref.seq, 0), (target.seq, 0), a.content, b.content, "param", slots))


def _link_weights(pairing: Pairing) -> None:
    """Parameters that pair by content, and what products with weights laid out otherwise make of them."""
    for pair in pairing.weights:
        target, parts = (
            pairing.target.records[pair.target.seq],
            [pairing.ref.records[r.seq] for r in pair.ref],
        )
        if not same_class(parts[0].slots[0].dtype, target.slots[0].dtype):
            continue
        places = [(part.seq, 0) for part in parts]
        _link_layout(pairing, places, (target.seq, 0), pair.layout, "param")
        if pair.layout is None or pair.layout.is_plain:
            continue
        readers = [_products(pairing.ref, place) for place in places]
        ours = _products(pairing.target, (target.seq, 0))
        if any(len(found) != len(ours) for found in readers):
            continue
        for made, *theirs in zip(ours, *readers, strict=True):
            shape, shapes = pairing.target.slot(made).shape, [pairing.ref.slot(v).shape for v in theirs]
            sizes = tuple(s[-1] for s in shapes)
            if (
                shape[-1] != len(pair.layout.index)
                or sizes != pair.layout.sizes
                or len({s[:-1] for s in shapes}) != 1
            ):
                continue  # the rows of the weight are not what the product is made of
            last = len(shapes[0]) - 1
            layout = replace(pair.layout, ref_axis=last, axis=last)
            _link_layout(pairing, theirs, made, layout, "op")


def _products(program: Program, weight: Value) -> list[Value]:
    """What linear ops make of a weight, in order."""
    found = []
    for seq, _ in program.consumers.get(weight, ()):
        record = program.records[seq]
        outputs = program.outputs(record)
        if family(record.op) == "linear" and len(outputs) == 1 and len(outputs[0].shape) > 1:
            found.append((seq, outputs[0].index))
    return found


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
    _link_inline(pairing)


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


def module_slots(
    ref: StoredRecord, target: StoredRecord, pairing: Pairing
) -> list[tuple[StoredSlot, StoredSlot]]:
    """Inputs and outputs of two calls that mean the same.

    Of one name; of those left, of equal content; then in order and of one size. Inputs that several could be
    stay alone.
    """
    found, left = [], []
    theirs = {(slot.role, slot.name): slot for slot in ref.slots if slot.is_tensor}
    for slot in target.slots:
        twin = theirs.pop((slot.role, slot.name), None) if slot.is_tensor else None
        if twin is not None:
            found.append((twin, slot))
        elif slot.is_tensor:
            left.append(slot)
    for equal in (True, False):
        for slot in list(left):
            fitting = [
                key
                for key, twin in theirs.items()
                if twin.role == slot.role
                and same_class(twin.dtype, slot.dtype)
                and _core(twin) == _core(slot)
            ]
            if equal:
                fitting = [key for key in fitting if _equal_content(pairing, theirs[key], slot)]
            elif slot.role == "in" and len(fitting) > 1:
                continue
            if fitting:
                found.append((theirs.pop(fitting[0]), slot))
                left.remove(slot)
    return found


def _equal_content(pairing: Pairing, a: StoredSlot, b: StoredSlot) -> bool:
    if a.content < 0 or b.content < 0:
        return False
    hashes = pairing.ref.reader.content(a.content).hash, pairing.target.reader.content(b.content).hash
    return bool(hashes[0]) and hashes[0] == hashes[1]


def _core(slot: StoredSlot) -> tuple[int, ...]:
    return tuple(size for size in slot.shape if size != 1)


def paired_slots(
    ref: StoredRecord, ref_slots: list[StoredSlot], target: StoredRecord, target_slots: list[StoredSlot]
) -> list[tuple[StoredSlot, StoredSlot]]:
    """Slots of two ops that mean the same; a lone one goes with the first."""
    roles = {slot_role(ref, slot): slot for slot in ref_slots}
    found = [(roles[slot_role(target, s)], s) for s in target_slots if slot_role(target, s) in roles]
    if not found and ref_slots and target_slots and (len(ref_slots) == 1 or len(target_slots) == 1):
        return [(ref_slots[0], target_slots[0])]
    return found


# Arguments of products go by different names in different ops.
_PRODUCT_ROLES = {
    "addmm": {"in.self": "bias", "in.mat1": "input", "in.mat2": "weight"},
    "baddbmm": {"in.self": "bias", "in.batch1": "input", "in.batch2": "weight"},
    "mm": {"in.self": "input", "in.mat2": "weight"},
    "bmm": {"in.self": "input", "in.mat2": "weight"},
    "matmul": {"in.self": "input", "in.other": "weight"},
    "linear": {"in.input": "input", "in.weight": "weight", "in.bias": "bias"},
}
_FIRST_OUTPUT = frozenset({"out", "out.self", "out.out"})


def slot_role(record: StoredRecord, slot: StoredSlot) -> str:
    """What a slot is to its op, under one name for all ops that compute the same."""
    roles = _PRODUCT_ROLES.get(short(record.op))
    if roles is not None and slot.name in roles:
        return roles[slot.name]
    return "out[0]" if slot.name in _FIRST_OUTPUT else slot.name


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


def _link_gathered(pairing: Pairing) -> None:
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


def same_path(ref: Program, first: Origin, target: Program, second: Origin) -> bool:
    """Whether two slots look at their origins in the same way: the same views, of the same shapes."""
    return view_path(ref, first) == view_path(target, second)


def view_path(program: Program, origin: Origin) -> tuple[Any, ...]:
    """The shape of the origin, then the views on the way with their arguments; copies say nothing."""
    steps: list[Any] = [program.slot(origin.value).shape]
    for seq in origin.edges:
        record = program.records[seq]
        if short(record.op) not in _NO_VIEW:
            steps.append((short(record.op), scalars(record), program.outputs(record)[0].shape))
    return tuple(steps)


_NO_VIEW = frozenset(
    [
        "clone",
        "detach",
        "alias",
        "contiguous",
        "_to_copy",
        "to",
        "lift_fresh",
        "lift",
        "lift_fresh_copy",
        "copy",
        "positive",
    ]
)
