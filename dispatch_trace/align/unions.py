"""Values that hold the same numbers as several of the other side, where no data says which are where.

A fused projection holds the rows of three; their sketches, folded at other places, say nothing of it. What
adds up over parts does: sums of squares and magnitudes, extremes, counts. Here sets of values are put
opposite each other that ought to hold the same numbers: parameters whose figures say so, then those of paired
modules whose sizes leave no choice, then what products make of them. In which order is never known.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from dispatch_trace.align.canon import dtype_class
from dispatch_trace.align.content import Comparer, Layout
from dispatch_trace.align.figures import figures_apart, joined_figures, rounding_apart
from dispatch_trace.align.graph import Program, Value
from dispatch_trace.align.weights import NUMBER, WeightPair, products
from dispatch_trace.metrics import unit_roundoff
from dispatch_trace.schema import StoredRecord

# Siblings are put together in all ways up to these many of them, and these many parts.
_MAX_SIBLINGS = 8
_MAX_PARTS = 4

Records: TypeAlias = tuple[StoredRecord, ...]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Union:
    """Values of the reference and of the target that hold the same numbers, in whatever order."""

    ref: tuple[Value, ...]
    target: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class _Gathered:
    """Parameters of one side whose figures were added up."""

    records: Records
    figures: dict[str, float]
    u: float


class Gathering:
    """Parameters of which no data tells where their rows stand, put opposite each other.

    Attributes:
      found: (of the reference, of the target).
    """

    def __init__(
        self,
        ref: Program,
        target: Program,
        comparer: Comparer,
        weights: Iterable[WeightPair],
        taken: Collection[tuple[int, int]],
    ) -> None:
        """
        Args:
          weights, taken: parameters that are paired already.
        """
        self._programs = ref, target
        self.found: list[tuple[Records, Records]] = []
        used = set(taken)
        for pair in weights:
            used |= {(1, pair.target.seq), *((0, part.seq) for part in pair.ref)}
        self._left = [
            {
                versions[0].seq: versions[0]
                for versions in program.params.values()
                if (side, versions[0].seq) not in used
                and dtype_class(versions[0].slots[0].dtype) == "f"
                and len(versions[0].slots[0].shape) > 1
                and comparer.array(side == 0, versions[0].slots[0].content) is None
            }
            for side, program in enumerate(self._programs)
        ]

    def by_figures(self) -> list[tuple[str, str]]:
        """Gathers what has the same figures, and nothing else has.

        Returns: paths of modules, of the reference and of the target, that hold the same numbers.
        """
        if not all(self._left):
            return []
        sides = [self._sets(side) for side in (0, 1)]
        by_size: dict[float, list[_Gathered]] = defaultdict(list)
        for one in sides[0]:
            by_size[one.figures["n"]].append(one)
        for listed in by_size.values():
            listed.sort(key=lambda one: one.figures["sq_sum"])
        fitting: list[tuple[_Gathered, _Gathered]] = []
        for ours in sides[1]:
            fitting += ((theirs, ours) for theirs in _alike(by_size.get(ours.figures["n"], []), ours))
        # Small sets first: what equals one parameter is not part of a set that happens to fit as well.
        for theirs, ours in sorted(fitting, key=lambda p: len(p[0].records) + len(p[1].records)):
            self._take(theirs.records, ours.records)
        return [
            (self._home(0, theirs, alone=len(ours) == 1), self._home(1, ours, alone=len(theirs) == 1))
            for theirs, ours in self.found
        ]

    def by_place(self, modules: Mapping[str, str]) -> None:
        """Gathers one parameter against several, in modules that pair, where sizes leave no choice.

        Args:
          modules: paths of the reference to paths of the target.
        """
        homes = [(path, other) for path, other in modules.items() if path and other]
        for path, other in sorted(homes, key=lambda home: -home[0].count(".")):
            theirs, ours = (
                [record for record in left.values() if f"{record.module}.".startswith(f"{home}.")]
                for left, home in zip(self._left, (path, other), strict=True)
            )
            for whole, parts in _filled(ours, theirs):
                self._take(parts, (whole,))
            for whole, parts in _filled(theirs, ours):
                self._take((whole,), parts)

    def routers(self) -> list[WeightPair]:
        """Parameters of a row for each of several modules that the other side holds in one stack of matrices.

        In which order a list stands that is a stack on the other side, nothing tells; so with their rows.
        """
        found = []
        for theirs, ours in self.found:
            stack, members = (theirs, ours) if len(theirs) == 1 else (ours, theirs)
            count, shape = len({r.module for r in members}), stack[0].slots[0].shape
            if len(stack) > 1 or len(shape) != 3 or shape[0] != count or count < 2:
                continue
            paths = [common_path(r.module for r in side) for side in (theirs, ours)]
            around = [f"{path.rpartition('.')[0]}." for path in paths]
            for a, b in self.found:
                sides = a, b
                if len(a) == len(b) == 1 and a[0].slots[0].shape == b[0].slots[0].shape:
                    beside = all(
                        f"{s[0].module}.".startswith(path) for s, path in zip(sides, around, strict=True)
                    )
                    if beside and a[0].slots[0].shape[0] == count:
                        rows = Layout(
                            (a[0].slots[0].content,), (count,), 0, 0, tuple(range(count)), ordered=False
                        )
                        found.append(WeightPair(a, b[0], rows, "figures", 0.6))
        return list({pair.target.seq: pair for pair in found}.values())

    def taken(self) -> set[tuple[int, int]]:
        """Parameters that stand opposite several: (0 for the reference's or 1, seq)."""
        several = [sides for sides in self.found if len(sides[0]) + len(sides[1]) > 2]
        return {(side, r.seq) for sides in several for side in (0, 1) for r in sides[side]}

    def unions(self) -> list[Union]:
        """Of the parameters, then of what products make of them."""
        found = [Union(*(tuple((r.seq, 0) for r in side) for side in both)) for both in self.found]
        return [*found, *(made for union in found for made in _made(*self._programs, union))]

    def _take(self, theirs: Records, ours: Records) -> None:
        sides = theirs, ours
        if all(r.seq in left for left, side in zip(self._left, sides, strict=True) for r in side):
            self.found.append(sides)
            for left, side in zip(self._left, sides, strict=True):
                for record in side:
                    del left[record.seq]

    def _home(self, side: int, records: Records, *, alone: bool) -> str:
        """The module that holds parameters; the one around it where it holds but one, which faces several.

        Args:
          alone: whether a single parameter faces them.
        """
        path = common_path(record.module for record in records)
        if len(records) > 1 or alone:
            return path
        owned = {key for key in self._programs[side].params if key[1] == path and key[2] != "bias"}
        return path.rpartition(".")[0] if len(owned) == 1 else path

    def _sets(self, side: int) -> list[_Gathered]:
        """What may have been put together, with its figures."""
        records_left = tuple(self._left[side].values())
        program = self._programs[side]
        sets = []
        for records in [*((record,) for record in records_left), *_together(records_left)]:
            figures = joined_figures(program.content(record.slots[0]) for record in records)
            if figures is not None:
                u = max(unit_roundoff(record.slots[0].dtype) for record in records)
                sets.append(_Gathered(records, figures, u))
        return sets


def _together(records: Iterable[StoredRecord]) -> list[Records]:
    """Siblings put together, and all parameters of one role, or of several, in a list of modules."""
    siblings: dict[str, list[StoredRecord]] = defaultdict(list)
    lists: dict[str, dict[str, list[StoredRecord]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        siblings[record.module.rpartition(".")[0]].append(record)
        numbers = list(NUMBER.finditer(record.module))
        if numbers:
            home, below = record.module[: numbers[-1].start()], record.module[numbers[-1].end() :]
            lists[home][f"{below} {record.name}"].append(record)
    found: list[Records] = []
    for group in siblings.values():
        found += _chosen(group, 2)
    for roles in lists.values():
        columns = [column for column in roles.values() if len(column) > 1]
        found += (tuple(itertools.chain.from_iterable(some)) for some in _chosen(columns, 1))
    return list(dict.fromkeys(found))


def _chosen(group: Sequence[T], least: int) -> Iterator[tuple[T, ...]]:
    """Some of a group, in all ways; nothing of a large one."""
    if len(group) <= _MAX_SIBLINGS:
        for count in range(least, min(len(group), _MAX_PARTS) + 1):
            yield from itertools.combinations(group, count)


def common_path(paths: Iterable[str]) -> str:
    """The longest path that all of these lie in or are."""
    names = [path.split(".") for path in paths]
    same = itertools.takewhile(lambda each: len(set(each)) == 1, zip(*names, strict=False))
    return ".".join(each[0] for each in same)


def _alike(listed: Sequence[_Gathered], ours: _Gathered) -> Iterator[_Gathered]:
    """Sets that differ from one by rounding; one of both is a single parameter."""
    size = ours.figures["sq_sum"]
    width = 2.0 * rounding_apart(ours.figures, max([ours.u, *(one.u for one in listed)]))
    first = bisect_left(listed, size * (1.0 - width), key=lambda one: one.figures["sq_sum"])
    for theirs in itertools.islice(listed, first, None):
        if theirs.figures["sq_sum"] > size * (1.0 + width):
            return
        limit = rounding_apart(ours.figures, max(ours.u, theirs.u))
        if min(len(theirs.records), len(ours.records)) > 1 or not _shares_sides(theirs.records, ours.records):
            continue
        if figures_apart(theirs.figures, ours.figures, int(ours.figures["n"])) <= limit:
            yield theirs


def _filled(
    wholes: Sequence[StoredRecord], others: Sequence[StoredRecord]
) -> Iterator[tuple[StoredRecord, Records]]:
    """Parameters that the others fill in one way only."""
    for whole in wholes:
        size = _size(whole)
        fitting = [r for r in others if _shares_sides((whole,), (r,))]
        full = [one for one in _together(fitting) if sum(map(_size, one)) == size]
        if len(full) == 1:
            yield whole, full[0]


def _shares_sides(theirs: Iterable[StoredRecord], ours: Iterable[StoredRecord]) -> bool:
    """Whether parameters may be parts of each other, stacked or side by side: they have a side in common."""
    sides = [[set(record.slots[0].shape) for record in records] for records in (theirs, ours)]
    return bool(set.intersection(*sides[0], *sides[1]))


def _size(record: StoredRecord) -> int:
    return math.prod(record.slots[0].shape)


def _made(ref: Program, target: Program, weights: Union) -> Iterator[Union]:
    """What products make of the parameters, time by time."""
    readers = [
        [products(program, value) for value in values]
        for program, values in ((ref, weights.ref), (target, weights.target))
    ]
    if len({len(made) for side in readers for made in side}) != 1:
        return
    for theirs, ours in zip(zip(*readers[0], strict=True), zip(*readers[1], strict=True), strict=True):
        sizes = [
            sum(math.prod(program.slot(value).shape) for value in values)
            for program, values in ((ref, theirs), (target, ours))
        ]
        if sizes[0] == sizes[1]:
            yield Union(theirs, ours)


__all__ = ["Gathering", "Union", "common_path"]
