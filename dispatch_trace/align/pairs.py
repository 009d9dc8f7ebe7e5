"""Two traces, lined up: the result of alignment that `judge` works on.

A `Link` says that a value of the target ought to be a value of the reference, and why: the same op made
both, the same module returned both, paired ops read both in the same place, or both are the parameter of
one name. One value may have several links; it is explained when one of them holds. A `Pair` is a row for
people: every record of both traces stands in exactly one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from dispatch_trace.align.canon import short
from dispatch_trace.align.content import Comparer, Difference, same_class
from dispatch_trace.align.graph import CallKey, Origin, Program, Value
from dispatch_trace.align.modules import Renames
from dispatch_trace.align.ops import OpPair, scalars
from dispatch_trace.align.siblings import Reordered
from dispatch_trace.align.steps import StepPlan
from dispatch_trace.align.unions import Union
from dispatch_trace.align.weights import WeightPair
from dispatch_trace.per_step import Together
from dispatch_trace.schema import StoredRecord, StoredSlot

Outcome: TypeAlias = Literal["matched", "absorbed", "ref-only", "target-only", "no-data", "deselected"]
Progress: TypeAlias = Callable[[int, int, str], None]


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
      reordered: lists of modules that the target holds in another order.
      unions: values that hold the same numbers, where nothing tells in which order.
      notices: what people should know of it.
      redrawn: recomputed ops of the target that alone draw other random numbers than its forward pass did.
      recorded: of runs in float64: the pairing of the recorded ones.
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
    reordered: list[Reordered] = field(default_factory=list)
    unions: list[Union] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    redrawn: frozenset[int] = frozenset()
    recorded: Pairing | None = None
    whole: tuple[set[Value], set[Value]] = field(default_factory=lambda: (set(), set()))

    @property
    def rounds(self) -> list[Pairing]:
        """This and all others: one record may have partners in several of them."""
        return [self, *self.others]

    def compare(self, link: Link) -> Difference:
        return self.comparer.compare(link.ref_content, link.target_content)

    def chosen(self, first: Link, second: Link, where: npt.NDArray[np.bool_], steps: Together) -> Link:
        """The second of two links in some steps, the first in the others; both of one pair of values."""
        ids = (first.ref_content, second.ref_content), (first.target_content, second.target_content)
        readers = self.comparer.ref, self.comparer.target
        chosen = [r.chosen(*both, where, steps) for r, both in zip(readers, ids, strict=True)]
        return replace(first, ref_content=chosen[0], target_content=chosen[1])

    def compare_slots(
        self, ref: StoredRecord, ref_slot: StoredSlot, target: StoredRecord, target_slot: StoredSlot
    ) -> Difference:
        """Difference of what two slots hold, laid out anew where what stands behind them is."""
        link = self.laid_out(ref, ref_slot, target, target_slot)
        if link is not None:
            return self.compare(link)
        return self.comparer.compare(
            self.ref.held_content(ref, ref_slot), self.target.held_content(target, target_slot)
        )

    def laid_out(
        self, ref: StoredRecord, ref_slot: StoredSlot, target: StoredRecord, target_slot: StoredSlot
    ) -> Link | None:
        """The link that says how the target's slot is laid out of the reference's, which has another size."""
        if math.prod(ref_slot.shape) == math.prod(target_slot.shape):
            return None
        first, second = self.ref.origins(ref, ref_slot), self.target.origins(target, target_slot)
        if (
            len(first) != 1
            or len(second) != 1
            or not all(o.whole and o.same_order for o in (*first, *second))
        ):
            return None
        for link in self.links.get(second[0].value, ()):
            layout = self.comparer.layout(link.ref_content)
            if link.ref == first[0].value and layout is not None and layout == layout.in_order:
                return link
        return None

    def made_alike(self, link: Link) -> bool:
        """Whether paired ops made both values, or both are one parameter, however the link was found."""
        if link.method in ("op", "param"):
            return True
        pair = self.ops.get(link.target[0])
        return pair is not None and pair.ref == link.ref[0]

    def add(self, link: Link) -> None:
        known = self.links[link.target]
        if any(k.ref == link.ref and k.target_content == link.target_content for k in known):
            return
        known.append(link)
        self.ref_links[link.ref].append(link)


# Slots that mean the same ---------------------------------------------------------------------------


def module_slots(
    ref: StoredRecord, target: StoredRecord, pairing: Pairing
) -> list[tuple[StoredSlot, StoredSlot]]:
    """Inputs and outputs of two calls that mean the same.

    Of one name; of those left, of equal content; then in order and of one size; last where one is laid out of
    the other. Inputs that several could be stay alone.
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
    for slot in left:
        for key, twin in list(theirs.items()):
            if twin.role == slot.role and pairing.laid_out(ref, twin, target, slot) is not None:
                found.append((theirs.pop(key), slot))
                break
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


def main_slots(
    ref: StoredRecord | None, target: StoredRecord | None
) -> tuple[StoredSlot | None, StoredSlot | None]:
    """The outputs that a reader wants to see: the first whose values differ, else the first."""
    ours, theirs = (
        [] if record is None else [s for s in record.slots if s.role != "in" and s.is_tensor]
        for record in (ref, target)
    )
    if ref is None or target is None:
        return next(iter(ours), None), next(iter(theirs), None)
    pairs = paired_slots(ref, ours, target, theirs)
    return next(iter(pairs), (next(iter(ours), None), next(iter(theirs), None)))


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
