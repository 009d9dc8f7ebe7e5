"""Differences of values of which only hashes, statistics and sketches are known: of many pairs at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dispatch_trace.schema import StoredContent
from dispatch_trace.sketch import K, relative_distances
from dispatch_trace.store.table import ContentTable, Numbers, same_hash

# Masks write -inf as the most negative number of some dtype; such a number is a place, not a quantity.
EXTREME = 1e30
# Sums of a sketch are float32: below this, a distance between sketches is their rounding.
SKETCH_FLOOR = 1e-6

WHY_UNKNOWN = (
    "",
    "no statistics were recorded",
    "one side may write as a huge number what is infinite on the other",
    "no sketches were recorded",
    "values as large as a mask's drown the others in a sketch",
)
_KNOWN, _NO_STATISTICS, _INFINITE_OR_HUGE, _NO_SKETCH, _HUGE = range(5)
_COUNTS = ("nan", "posinf", "neginf")

Bools: TypeAlias = npt.NDArray[np.bool_]
_PAIR = [("ref", "i8"), ("target", "i8"), ("equal", "?"), ("why", "i8"), ("nonfinite", "i8"), ("rho", "f8")]


@dataclass(frozen=True, slots=True)
class Summaries:
    """What is known of n values without their data.

    Attributes:
      summarised: [n], whether there are statistics.
      counts: [n, 3], how many are NaN, inf and -inf; NaN where it was not counted.
      huge: [n], whether some are as large as a mask's.
      has_sketch: [n].
      sketch: [n, K], of those that have one; narrow ones [n, NARROW].
    """

    summarised: Bools
    counts: npt.NDArray[np.float64]
    huge: Bools
    has_sketch: Bools
    sketch: npt.NDArray[np.float32]

    @classmethod
    def of(cls, contents: Sequence[StoredContent], sketches: Sequence[Any]) -> Summaries:
        """Of contents, and their sketches [K] or None."""
        counts = np.array([[c.stats.get(name) for name in _COUNTS] for c in contents], dtype=np.float64)
        extremes = np.array([[c.stats.get(n) or 0.0 for n in ("min", "max")] for c in contents], np.float64)
        width = next((len(sketch) for sketch in sketches if sketch is not None), K)
        table = np.zeros((len(contents), width), dtype=np.float32)
        for row, sketch in enumerate(sketches):
            if sketch is not None:
                table[row] = sketch
        return cls(
            np.array([bool(c.stats) for c in contents]),
            counts,
            _any(np.abs(extremes) >= EXTREME),
            np.array([s is not None for s in sketches]),
            table,
        )

    @classmethod
    def at(cls, table: ContentTable, places: Numbers) -> Summaries:
        """Of rows of a table."""
        extremes = np.stack([table.stat("min", places), table.stat("max", places)], axis=1)
        has_sketch = table.has_sketch[places]
        found = table.sketches(places[has_sketch])
        sketch = np.zeros((len(places), found.shape[1]), dtype=np.float32)
        sketch[has_sketch] = found
        return cls(
            table.summarised[places],
            np.stack([table.stat(name, places) for name in _COUNTS], axis=1),
            _any(np.abs(np.nan_to_num(extremes)) >= EXTREME),
            has_sketch,
            sketch,
        )


def _any(given: Any, axis: int = 1) -> Bools:
    found: Bools = given.any(axis=axis)
    return found


def summary_differences(
    ref: Summaries, target: Summaries
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Differences of n pairs of one size.

    Returns: [n] each: why it is unknown (a place in `WHY_UNKNOWN`, 0 where it is known); by how many the
      counts of what is not finite differ; the relative L2 error, inf where those differ.
    """
    why = np.zeros(len(ref.summarised), dtype=np.int64)
    huge = _any(np.stack([ref.huge, target.huge]), 0)
    apart = np.nan_to_num(np.abs(ref.counts - target.counts)).astype(np.int64)
    nonfinite = apart.sum(1)
    why[huge] = _HUGE
    why[~(ref.has_sketch & target.has_sketch)] = _NO_SKETCH
    why[nonfinite > 0] = _KNOWN
    why[huge & _any(apart[:, 1:] > 0)] = _INFINITE_OR_HUGE
    why[~(ref.summarised & target.summarised)] = _NO_STATISTICS
    rho = np.where(nonfinite > 0, np.inf, relative_distances(target.sketch, ref.sketch))
    return why, nonfinite, rho


class KnownDifferences:
    """What `summary_differences` says of contents of two ranks, found once for each pair.

    Steps that repeat are judged again each time that some of them are taken apart; their values are the same.
    """

    def __init__(self, ref: ContentTable, target: ContentTable) -> None:
        self._tables = ref, target
        self._pairs = np.zeros(1 << 10, dtype=_PAIR)
        self._num_pairs = 1  # the first is none
        # Of each content the last pair it was in. One may meet many others: where values have settled on one
        # side, say, and not on the other, whose contents then tell.
        self._last = np.zeros(len(ref.kind), np.int64), np.zeros(len(target.kind), np.int64)
        self._pairs[0] = (-1, -1, False, 0, 0, 0.0)

    def at(self, ref: Numbers, target: Numbers) -> npt.NDArray[np.void]:
        """Differences of n pairs.

        Args:
          ref, target: [n] each, rows of both tables.
        Returns: [n], with fields: "equal", whether the hashes are the same; "why", "nonfinite" and "rho",
          what `summary_differences` returns, 0 where they are.
        Raises:
          TraceFormatError: a shard that holds sketches is missing or corrupt.
        """
        number = self._last[1][target]
        missing = np.flatnonzero(self._pairs["ref"][number] != ref)
        if missing.size:
            number[missing] = self._last[0][ref[missing]]
            missing = missing[self._pairs["target"][number[missing]] != target[missing]]
        if missing.size:
            number[missing] = self._found(ref[missing], target[missing])
        found: npt.NDArray[np.void] = self._pairs[number]
        return found

    def _found(self, ref: Numbers, target: Numbers) -> Numbers:
        """[n], the numbers of n new pairs."""
        found = np.zeros(len(ref), dtype=_PAIR)
        found["ref"], found["target"] = ref, target
        found["equal"] = same_hash(self._tables[0], ref, self._tables[1], target)
        other = np.flatnonzero(~found["equal"])
        if other.size:
            sides = zip(self._tables, (ref[other], target[other]), strict=True)
            columns = summary_differences(*(Summaries.at(table, places) for table, places in sides))
            for name, column in zip(("why", "nonfinite", "rho"), columns, strict=True):
                found[name][other] = column
        number = np.arange(self._num_pairs, self._num_pairs + len(ref))
        self._num_pairs += len(ref)
        while self._num_pairs > len(self._pairs):
            self._pairs = np.concatenate((self._pairs, np.empty_like(self._pairs)))
        self._pairs[number] = found
        self._last[0][ref] = self._last[1][target] = number
        return number


__all__ = [
    "EXTREME",
    "SKETCH_FLOOR",
    "WHY_UNKNOWN",
    "KnownDifferences",
    "Summaries",
    "summary_differences",
]
