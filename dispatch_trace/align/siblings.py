"""Sibling modules that are stored in another order, and what goes by their numbers.

Experts of a mixture may stand in any order, if the rows of their router do: then what the router makes is the
reference's with its places in that order, a top-k chooses other numbers, and the caller goes through the
experts in another order. Only where weights of a list and rows of a weight outside it agree on an order is
it taken for one; a list alone in another order is a bug.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from dispatch_trace.align.canon import dtype_class
from dispatch_trace.align.content import Comparer, Layout
from dispatch_trace.align.figures import figures_apart, joined_figures, rounding_apart
from dispatch_trace.align.graph import Call, Program
from dispatch_trace.align.modules import Renames
from dispatch_trace.align.ops import Element
from dispatch_trace.align.orders import Order, order_of
from dispatch_trace.align.weights import WeightPair
from dispatch_trace.metrics import coarser, round_to, unit_roundoff
from dispatch_trace.schema import StoredContent, StoredRecord
from dispatch_trace.sketch import alike

_CHILD = re.compile(r"(.+)\.(\d+)")
# Weights are one weight, rounded, up to this distance of their sketches.
_NEAR = 0.02

Labels: TypeAlias = tuple[frozenset[int], ...]
_NONE: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Reordered:
    """A list of modules in another order.

    Attributes:
      ref: path of the list in the reference; of the module around, where one weight holds them all.
      target: path of the list in the target.
      order: for each place of the target's list the number in the reference's.
    """

    ref: str
    target: str
    order: tuple[int, ...]


def find_reordered(
    ref: Program,
    target: Program,
    comparer: Comparer,
    models: Mapping[str, str],
    renames: Renames,
    weights: list[WeightPair],
) -> list[Reordered]:
    """Lists of modules in another order, confirmed by weights outside whose rows are in that order.

    Args:
      renames: takes the module pairs (`Renames.moved`).
      weights: parameters that pair by content; takes those whose rows are reordered.
    """
    found = []
    lists = _Lists(ref, target, models, renames)
    for theirs, ours, order in [*lists.by_number(), *_stacked(weights, lists)]:
        routers = _routers(ref, target, comparer, models, renames, weights, theirs, order)
        agreeing = [r for r in routers if r.layout is not None and Order(r.layout.index).agrees(Order(order))]
        known = {pair.target.seq for pair in routers}
        weights[:] = [w for w in weights if w.target.seq not in known]
        for router in routers:
            layout = router.layout
            if layout is not None:
                # Rows in another order than the list's are wrong.
                layout = replace(layout, index=order) if router in agreeing else None
            weights.append(replace(router, layout=layout))
        if Order(order).is_plain or not routers:
            continue
        found.append(Reordered(theirs, ours, order))
        for path in lists.beneath(theirs):
            number, _, rest = path[len(theirs) + 1 :].partition(".")
            new = f"{ours}.{order.index(int(number))}"
            renames.moved.setdefault(path, f"{new}.{rest}" if rest else new)
    return found


class _Lists:
    """Numbered modules of both traces, by the list that they are in."""

    def __init__(self, ref: Program, target: Program, models: Mapping[str, str], renames: Renames) -> None:
        self._programs = ref, target
        self._renames = renames
        self._paths: list[set[str]] = [set(), set()]
        # list -> number -> (path below, name) -> parameter
        self.params: list[dict[str, dict[int, dict[tuple[str, str], StoredRecord]]]] = [{}, {}]
        for side, program in enumerate(self._programs):
            wanted = set(models) if side == 0 else set(models.values())
            for (model, path, name), versions in program.params.items():
                if model not in wanted or versions[0].slots[0].content < 0:
                    continue
                parts = path.split(".")
                for i, part in enumerate(parts):
                    self._paths[side].add(".".join(parts[: i + 1]))
                    if i and part.isdigit():
                        numbered = self.params[side].setdefault(".".join(parts[:i]), {})
                        below = ".".join(parts[i + 1 :])
                        numbered.setdefault(int(part), {})[below, name] = versions[0]
            self._paths[side] |= {call.path for call in program.calls.values()}

    def beneath(self, path: str) -> list[str]:
        """Paths of numbered modules of a list of the reference, and of all in them."""
        start = f"{path}."
        return [p for p in self._paths[0] if p.startswith(start) and p[len(start) :].split(".")[0].isdigit()]

    def by_number(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """(list of the reference, of the target, order) of lists with as many numbers."""
        for theirs, numbered in self.params[0].items():
            count = len(numbered)
            if count < 2 or set(numbered) != set(range(count)):
                continue
            places = [_CHILD.fullmatch(self._renames.apply(f"{theirs}.{n}")) for n in range(count)]
            homes = {m[1] for m in places if m}
            if len(homes) != 1:
                continue
            home = homes.pop()
            ours = self.params[1].get(home, {})
            if set(ours) != set(numbered):
                continue
            given = [int(m[2]) if m else None for m in places]
            order = self._order(numbered, ours, given)
            if order is not None:
                yield theirs, home, order

    def _order(
        self,
        theirs: Mapping[int, Mapping[tuple[str, str], StoredRecord]],
        ours: Mapping[int, Mapping[tuple[str, str], StoredRecord]],
        given: list[int | None],
    ) -> tuple[int, ...] | None:
        """For each place of the target's list the number of the reference's; None where it is not known."""
        count = len(given)
        votes: list[Counter[int]] = [Counter() for _ in range(count)]
        for name in theirs[0]:
            if not all(name in theirs[n] and name in ours[n] for n in range(count)):
                break
            for n, place in self._nearest(
                [theirs[n][name] for n in range(count)], [ours[n][name] for n in range(count)]
            ):
                votes[n][place] += 1
        else:
            given = [votes[n].most_common(1)[0][0] if votes[n] else None for n in range(count)]
        known = [place for place in given if place is not None]
        left = [place for place in range(count) if place not in known]
        if len(set(known)) < len(known) or 2 * len(known) < count or len(left) > max(1, count // 4):
            return None
        for n in range(count):
            if given[n] is None and n in left:  # what equals nothing stays where it is, where it can
                given[n] = n
                left.remove(n)
        filled = [place if place is not None else left.pop(0) for place in given]
        return tuple(filled.index(place) for place in range(count))

    def _nearest(
        self, theirs: Sequence[StoredRecord], ours: Sequence[StoredRecord]
    ) -> Iterator[tuple[int, int]]:
        """(number, place) of weights that are one weight, up to rounding, and no other's."""
        readers = [program.reader for program in self._programs]
        contents = [
            [reader.content(r.slots[0].content) for r in records]
            for reader, records in zip(readers, (theirs, ours), strict=True)
        ]
        hashes = [[c.hash for c in side] for side in contents]
        if all(hashes[0]) and hashes[0] == hashes[1]:
            if len(set(hashes[0])) == len(hashes[0]):
                yield from ((n, n) for n in range(len(theirs)))
            return
        sketches = [
            [reader.sketch(r.slots[0].content) for r in records]
            for reader, records in zip(readers, (theirs, ours), strict=True)
        ]
        if any(s is None for side in sketches for s in side):
            return
        first, second = alike(*(np.stack(side).astype(np.float64) for side in sketches))  # type: ignore[arg-type]
        for n, sketch in enumerate(first):
            size = max(float(np.linalg.norm(sketch)), 1e-300)
            near = np.flatnonzero(np.linalg.norm(second - sketch, axis=1) <= _NEAR * size)
            if len(near) == 1:
                yield n, int(near[0])


def _stacked(weights: Sequence[WeightPair], lists: _Lists) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """The same for lists of one side that are slices of one weight of the other, in order."""
    places: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
    torn = set()
    for pair in weights:
        for key, place, number in _slices(pair, lists):
            if places[key].setdefault(place, number) != number:
                torn.add(key)
    for key, numbers in places.items():
        order = tuple(numbers[place] for place in sorted(numbers))
        if key not in torn and sorted(numbers) == sorted(order) == list(range(len(order))):
            yield *key, order


def _slices(pair: WeightPair, lists: _Lists) -> Iterator[tuple[tuple[str, str], int, int]]:
    """((path in the reference, in the target), place in the target, number in the reference) of matrices."""
    layout = pair.layout
    if layout is None or not layout.ordered:
        return
    shapes = pair.ref[0].slots[0].shape, pair.target.slots[0].shape
    if len(pair.ref) == 1 and len(shapes[0]) == 3:
        rows = shapes[0][2 if layout.ref_axis else 1]
        for home, place in _members(lists.params[1], pair.target.module, shapes[0][0]):
            for number in {i // rows for i in layout.index}:
                yield (pair.ref[0].module, home), place, number
    elif len(pair.ref) > 1 and len(shapes[1]) == 3:
        rows = shapes[1][2 if layout.axis else 1]
        starts = list(itertools.accumulate(layout.sizes))
        parts = [bisect_right(starts, i) if i >= 0 else -1 for i in layout.index]
        for place in range(shapes[1][0]):
            for part in set(parts[place * rows : (place + 1) * rows]) - {-1}:
                for home, number in _members(lists.params[0], pair.ref[part].module, shapes[1][0]):
                    yield (home, pair.target.module), place, number


def _members(lists: Mapping[str, Mapping[int, Any]], path: str, count: int) -> Iterator[tuple[str, int]]:
    """(list, number) of a module in lists of so many."""
    for home, numbered in lists.items():
        match = re.match(re.escape(home) + r"\.(\d+)(?:\.|$)", path)
        if match is not None and len(numbered) == count:
            yield home, int(match[1])


def _routers(
    ref: Program,
    target: Program,
    comparer: Comparer,
    models: Mapping[str, str],
    renames: Renames,
    weights: Sequence[WeightPair],
    theirs: str,
    order: tuple[int, ...],
) -> list[WeightPair]:
    """Weights beside a list, or around it, of a row for each of its members, that are in another order."""
    around, beneath = f"{theirs.rpartition('.')[0]}.", f"{theirs}."
    by_content = {pair.ref[0].seq: pair for pair in weights if len(pair.ref) == 1}
    found = []
    for (model, path, name), versions in ref.params.items():
        record = versions[0]
        shape = record.slots[0].shape
        below = f"{path}."[len(beneath) :].partition(".")[0] if f"{path}.".startswith(beneath) else ""
        if model not in models or not f"{path}.".startswith(around) or below.isdigit() or len(shape) > 2:
            continue
        if shape[:1] != (len(order),):
            continue
        known = by_content.get(record.seq)
        if known is None:
            twins = target.params.get((models[model], renames.apply(path), name))
            if not twins:
                continue
            known = WeightPair((record,), twins[0], None, "path", 1.0)
        rows = _rows(comparer, record, known.target, Order(order))
        if rows is not None:
            layout = Layout((record.slots[0].content,), (len(order),), 0, 0, rows.rows)
            found.append(replace(known, layout=layout, method="order"))
    return found


def _rows(comparer: Comparer, ref: StoredRecord, target: StoredRecord, order: Order) -> Order | None:
    """How the rows of a weight are ordered; None where they are in order, or are others.

    Args:
      order: of the list; taken for the rows' where all that is known of them are the same moments.
    """
    a, b = ref.slots[0], target.slots[0]
    first, second = comparer.array(True, a.content), comparer.array(False, b.content)
    if first is None or second is None:
        known = comparer.ref.content(a.content), comparer.target.content(b.content)
        return order if known[0].hash != known[1].hash and _same_figures(*known) else None
    if a.dtype != b.dtype and dtype_class(a.dtype) == dtype_class(b.dtype) == "f":
        common = coarser(a.dtype, b.dtype)
        first, second = round_to(first, common), round_to(second, common)
    return order_of(first, second)


def _same_figures(a: StoredContent, b: StoredContent) -> bool:
    """Whether two tensors may hold the same elements in other places, rounded in one of them."""
    first, second = joined_figures([a]), joined_figures([b])
    if first is None or second is None or first["n"] != second["n"] or not first["sq_sum"]:
        return False
    limit = rounding_apart(second, max(unit_roundoff(a.dtype), unit_roundoff(b.dtype)))
    return figures_apart(first, second, int(first["n"])) <= limit


# Bodies of callers ----------------------------------------------------------------------------------------


def by_siblings(
    reordered: Sequence[Reordered],
    ref: Program,
    target: Program,
    calls: tuple[Call, Call],
    *bodies: list[Element],
) -> list[tuple[list[Element], list[Element]]]:
    """Two bodies, to be aligned part by part: what stands alike between calls of reordered modules.

    The target goes through the modules in another order, so its body as a whole is in no order of the
    reference's. What depends on the same of the modules, and is read by the same, belongs together.

    Args:
      calls: whose bodies these are, of the reference and of the target.
      bodies: their elements.
    """
    parts: list[dict[Labels, list[Element]]] = [defaultdict(list), defaultdict(list)]
    numbers: list[dict[str, int]] = [{}, {}]
    for number, one in enumerate(reordered):
        for place, theirs in enumerate(one.order):
            label = number + theirs * len(reordered)
            numbers[0][f"{one.ref}.{theirs}"] = numbers[1][f"{one.target}.{place}"] = label
    for side, (program, call) in enumerate(zip((ref, target), calls, strict=True)):
        inside = [child for child in call.children if child.path in numbers[side]]
        if len(inside) < 2:
            return [(bodies[0], bodies[1])]
        labels = _labels(program, call, {child.key: numbers[side][child.path] for child in inside})
        for element in bodies[side]:
            known = labels.get(element.record.seq) if element.record is not None else None
            parts[side][known or (_NONE, _NONE, _NONE)].append(element)
    return [(parts[0][key], parts[1][key]) for key in parts[0] if key in parts[1]]


def _labels(program: Program, call: Call, numbers: Mapping[object, int]) -> dict[int, Labels]:
    """By seq of what ran within a call: of which of its calls it takes something, and which take of it.

    And which take, alone, of something that it reads itself: a share goes by the rows that one expert got.
    """
    ran = [r for r in program.records.values() if call.begins <= r.seq <= call.closed and r.kind != "param"]
    own: dict[int, int] = {}
    for record in ran:
        for around in program.call_of(record).enclosing():
            if around.key in numbers:
                own[record.seq] = numbers[around.key]
    takes: dict[int, frozenset[int]] = {}
    gives: dict[int, frozenset[int]] = {r.seq: frozenset() for r in ran}
    reads = {
        r.seq: {
            seq for s in r.slots if s.role == "in" for seq, _ in s.producers if seq in gives and seq < r.seq
        }
        for r in ran
        if r.kind == "op"
    }
    mine = {seq: frozenset([own[seq]]) if seq in own else _NONE for seq in reads}
    for seq, sources in reads.items():
        takes[seq] = mine[seq].union(*(takes.get(source, _NONE) for source in sources))
    for seq, sources in reversed(reads.items()):
        for source in sources:
            gives[source] |= gives[seq] | mine[seq]
    beside: dict[int, frozenset[int]] = {}
    for seq, sources in reads.items():
        alone = (
            gives[source] if len(gives[source]) == 1 else beside.get(source, _NONE) for source in sources
        )
        beside[seq] = _NONE.union(*alone)
    markers: dict[int, Labels] = {
        r.seq: (frozenset([own[r.seq]]), frozenset([own[r.seq]]), _NONE)
        for r in ran
        if r.kind == "module" and r.seq in own
    }
    return {**{seq: (takes[seq], gives[seq], beside[seq]) for seq in reads}, **markers}


__all__ = ["Reordered", "by_siblings", "find_reordered"]
