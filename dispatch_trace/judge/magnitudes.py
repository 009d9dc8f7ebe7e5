"""How large recorded values are: what turns an error at an input into an error at an output."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dispatch_trace.align.content import Comparer
from dispatch_trace.align.graph import Program
from dispatch_trace.align.summaries import EXTREME
from dispatch_trace.per_step import greatest, root
from dispatch_trace.schema import StoredContent, StoredRecord, StoredSlot


@dataclass(frozen=True, slots=True)
class Magnitude:
    """Size of a tensor's values, those that stand for -inf left out.

    Attributes:
      rms, mean: over the finite values; rms is None where unknown.
      top: largest absolute value.
      least: smallest absolute value if all have one sign, else 0.
      n: how many values.
    """

    rms: float | None
    mean: float = 0.0
    top: float = 0.0
    least: float = 0.0
    n: float = 0

    @property
    def std(self) -> float:
        if self.rms is None:
            return 0.0
        found: float = root(greatest(self.rms * self.rms - self.mean * self.mean, 0.0))
        return found


UNKNOWN = Magnitude(None)


class Magnitudes:
    """Magnitudes of one side's values, worked out once."""

    def __init__(self, program: Program, comparer: Comparer, *, ref_side: bool) -> None:
        self._program = program
        self._comparer = comparer
        self._ref_side = ref_side
        self._known: dict[int, Magnitude] = {}

    def of_slot(self, record: StoredRecord, slot: StoredSlot) -> Magnitude:
        """Of the values of a slot; of a view without statistics, those of what it looks at."""
        id = self._program.held_content(record, slot)
        if id >= 0:
            found = self.of_content(id)
            if found.rms is not None:
                return found
        best = UNKNOWN
        for origin in self._program.origins(record, slot) if slot.role == "in" else ():
            value = self._program.slot(origin.value)
            if value.content >= 0 and value.content != id:
                found = self.of_content(value.content)
                if found.rms is not None and (best.rms is None or found.rms > best.rms):
                    best = found
        return best

    def of_content(self, id: int) -> Magnitude:
        found = self._known.get(id)
        if found is None:
            found = self._known[id] = self._measure(id)
        return found

    def _measure(self, id: int) -> Magnitude:
        if self._program.reader.together(id) is not None:
            found = magnitude_from(self._program.stats(id))
            return Magnitude(None, n=found.n) if found.top >= EXTREME else found
        content = self._program.reader.content(id)
        found = magnitude_of(content)
        if found.top >= EXTREME and content.has_data:
            array = self._comparer.array(self._ref_side, id)
            if array is not None:
                x = np.abs(array.reshape(-1)).astype(np.float64)
                x = x[x < EXTREME]
                if x.size:
                    rms = math.sqrt(float(np.mean(x**2)))
                    return Magnitude(rms, 0.0, float(x.max()), 0.0, x.size)
        if found.top >= EXTREME:
            return Magnitude(None, n=found.n)
        return found


def magnitude_of(content: StoredContent) -> Magnitude:
    """From the statistics alone; numbers that stand for -inf count."""
    return magnitude_from(content.stats)


def magnitude_from(stats: Mapping[str, float | None]) -> Magnitude:
    """The same from statistics by name, each a number or one a step."""
    square, total = stats.get("sq_sum"), stats.get("n")
    if square is None or total is None:
        return UNKNOWN
    finite = total
    for name in ("nan", "posinf", "neginf"):
        count = stats.get(name)
        finite = finite - (0 if count is None else count)
    if finite <= 0:
        return Magnitude(0.0, n=total)
    low, high, mean = (0.0 if v is None else 0.0 + v for v in map(stats.get, ("min", "max", "sum")))
    return Magnitude(
        rms=root(greatest(square, 0.0) / finite),
        mean=mean / finite,
        top=greatest(abs(low), abs(high)),
        least=greatest(low, -high, 0.0) if stats.get("min") is not None else 0.0,
        n=total,
    )
