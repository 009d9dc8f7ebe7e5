"""Values that hold the same numbers as several of the other side, where no data says which are where.

A fused projection holds the rows of three; their sketches, folded at other places, say nothing of it. What
adds up over parts does: sums of squares and magnitudes, extremes, counts. Here sets of values are put
opposite each other that ought to hold the same numbers; nothing is compared here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from dispatch_trace.align.canon import dtype_class
from dispatch_trace.align.content import Comparer
from dispatch_trace.align.graph import Program, Value
from dispatch_trace.align.weights import WeightPair, products
from dispatch_trace.schema import StoredRecord

# One weight is not taken for more parts than these, unless for all that are left.
_MAX_PARTS = 8

Records: TypeAlias = tuple[StoredRecord, ...]


@dataclass(frozen=True, slots=True)
class Union:
    """Values of the reference and of the target that hold the same numbers, in whatever order."""

    ref: tuple[Value, ...]
    target: tuple[Value, ...]


def find_unions(
    ref: Program,
    target: Program,
    comparer: Comparer,
    modules: Mapping[str, str],
    weights: Iterable[WeightPair],
    taken: Collection[tuple[int, int]],
) -> list[Union]:
    """One parameter against several, in modules that pair, where their sizes leave no choice.

    Args:
      modules: paths of the reference to paths of the target.
      weights, taken: parameters that are paired already.
    Returns: of the parameters, then of what products make of them.
    """
    used = set(taken)
    for pair in weights:
        used |= {(1, pair.target.seq), *((0, part.seq) for part in pair.ref)}
    left = [
        [
            versions[0]
            for versions in program.params.values()
            if (side, versions[0].seq) not in used
            and dtype_class(versions[0].slots[0].dtype) == "f"
            and comparer.array(side == 0, versions[0].slots[0].content) is None
        ]
        for side, program in enumerate((ref, target))
    ]
    found: list[tuple[Records, Records]] = []
    homes = [(path, other) for path, other in modules.items() if path and other]
    for path, other in sorted(homes, key=lambda home: -home[0].count(".")):
        theirs, ours = (
            [record for record in records if f"{record.module}.".startswith(f"{home}.")]
            for records, home in zip(left, (path, other), strict=True)
        )
        sides: list[tuple[Records, Records]] = []
        sides += [(parts, (whole,)) for whole, parts in _filled(ours, theirs)]
        sides += [((whole,), parts) for whole, parts in _filled(theirs, ours)]
        for both in sides:
            seqs = [{record.seq for record in side} for side in both]
            if all(seqs[side] <= {r.seq for r in left[side]} for side in (0, 1)):
                found.append(both)
                left = [[r for r in left[side] if r.seq not in seqs[side]] for side in (0, 1)]
    unions = [Union(*(tuple((r.seq, 0) for r in side) for side in both)) for both in found]
    return [*unions, *(made for union in unions for made in _made(ref, target, union))]


def _filled(
    wholes: Sequence[StoredRecord], others: Sequence[StoredRecord]
) -> Iterator[tuple[StoredRecord, Records]]:
    """Parameters that the others fill in one way only: a run of them, or all."""
    for whole in wholes:
        fitting = [r for r in others if r.name.rpartition("_")[2] == whole.name.rpartition("_")[2]]
        fitting = [r for r in fitting or others if _shares_a_side(whole, r)]
        runs = {
            tuple(fitting[first : first + count])
            for count in {*range(2, _MAX_PARTS + 1), len(fitting)}
            for first in range(len(fitting) - count + 1)
        }
        size = _size(whole)
        full = [run for run in runs if len(run) > 1 and sum(map(_size, run)) == size]
        if len(full) == 1:
            yield whole, full[0]


def _shares_a_side(whole: StoredRecord, part: StoredRecord) -> bool:
    """Whether parts of this shape, side by side or stacked, make up the whole: it has all sides but one."""
    a, b = list(whole.slots[0].shape), list(part.slots[0].shape)
    if len(a) == len(b) == 1:
        return True
    return 1 < len(b) <= len(a) and any(size in a for size in b)


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


__all__ = ["Union", "find_unions"]
