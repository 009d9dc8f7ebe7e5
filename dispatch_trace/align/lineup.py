"""Lines up two traces: steps, models, weights, calls, ops, and last the links between values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any

from dispatch_trace.align.api_calls import placed_calls
from dispatch_trace.align.arrival import by_arrival, has_no_order
from dispatch_trace.align.content import Comparer, Rows
from dispatch_trace.align.graph import CallKey, Program
from dispatch_trace.align.lens import StepLens
from dispatch_trace.align.links import link, link_gathered
from dispatch_trace.align.modules import Renames, host, pair_calls
from dispatch_trace.align.named import named_alike
from dispatch_trace.align.ops import BodyAligner, Element
from dispatch_trace.align.pairs import Pairing, Progress
from dispatch_trace.align.rebuilt import rebuilt
from dispatch_trace.align.recompute import redrawn
from dispatch_trace.align.rows import RowMap
from dispatch_trace.align.siblings import by_siblings, find_reordered
from dispatch_trace.align.states import placed_states
from dispatch_trace.align.steps import StepPair, StepPlan, pair_models, pair_steps, unpaired_steps
from dispatch_trace.align.structure import find_structure
from dispatch_trace.schema import NO_CALL, GradPhase
from dispatch_trace.store.reader import RankReader

_PHASES: tuple[GradPhase, ...] = ("fwd", "recompute", "bwd")


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
    ref, target, placed = placed_states(*named_alike(ref, target, models, renames.apply))
    ref, target, called = placed_calls(ref, target)
    ops = not lacks_operands(ref, target)
    plan = pair_steps(ref, target, models, steps)
    if plan is not None or cut is not None:
        ref = rebuilt(ref, reading("running the reference again"))
        target = rebuilt(target, reading("running the target again"))
    if plan is not None:
        found = [
            _round(plan, number, ref, target, ops, cut, models, renames, reading)
            for number in range(max(len(plan.rounds), 1))
        ]
        found[0].others = found[1:]
    else:
        pairing = Pairing(
            Program(ref, steps=steps, ops=ops, progress=reading("reading the reference")),
            Program(target, steps=steps, ops=ops, progress=reading("reading the target")),
            Comparer(ref, target, cut),
            models,
            renames,
            steps,
            unpaired=unpaired_steps(ref, target, steps),
        )
        pairing.weights, pairing.unions = find_structure(
            pairing.ref, pairing.target, pairing.comparer, models, renames, pairing.notices
        )
        pairing.reordered = find_reordered(
            pairing.ref, pairing.target, pairing.comparer, models, renames, pairing.weights
        )
        pairing.calls = pair_calls(pairing.ref, pairing.target, models, renames)
        found = [pairing]
    found[0].notices += [*placed, *called]
    cycle = renames.cycle()
    if cycle:
        circle = " -> ".join(map(repr, [*cycle, cycle[0]]))
        found[0].notices.append(
            f"rename rules go round in a circle, {circle}: each is applied once, from a path of the "
            "reference to one of the target"
        )
    for pairing in found:
        _pair_ops(pairing, ignore_sizes=cut is not None or plan is not None, progress=progress)
        link(pairing)
        if plan is not None:
            link_gathered(pairing)
    return found[0]


def lacks_operands(ref: RankReader, target: RankReader) -> bool:
    """Whether ops are to be left out: a side did not record what they read, and modules stand for them.

    Without operands nothing links an op to those before it: the last would be blamed for what the first did.
    """
    options = [reader.header.get("options") or {} for reader in (ref, target)]
    if any(given.get("level") != "op" for given in options):
        return False
    if all(given.get("inputs") is not False for given in options):
        return False
    return all(next(reader.records(kind="module"), None) is not None for reader in (ref, target))


def _round(
    plan: StepPlan,
    number: int,
    ref: RankReader,
    target: RankReader,
    ops: bool,
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
        Program(lens, ops=ops, progress=reading(f"reading the {name}"))
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
        parts = [(first, second)]
        if pairing.reordered and key[1] == "fwd":
            calls = pairing.ref.calls[key[0]], pairing.target.calls[pairing.calls[key[0]]]
            parts = by_siblings(pairing.reordered, pairing.ref, pairing.target, calls, first, second)
        for one in parts:
            for pair in aligner.align(*one):
                pairing.ops[pair.target] = pairing.ops_by_ref[pair.ref] = pair
        if progress is not None and done % 64 == 0:
            progress(done, len(order), "aligning ops")
    again = [redrawn(p.records.values(), p.reader.content) for p in (pairing.ref, pairing.target)]
    pairs = (pairing.ops.get(seq) for seq in again[1])
    pairing.redrawn = frozenset(
        pair.target for pair in pairs if pair is not None and pair.ref not in again[0]
    )


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
