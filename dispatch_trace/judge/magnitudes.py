"""How large recorded values are: what turns an error at an input into an error at an output."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dispatch_trace.align.content import EXTREME, Comparer
from dispatch_trace.align.graph import Program
from dispatch_trace.schema import StoredContent, StoredRecord, StoredSlot


@dataclass(frozen=True, slots=True)
class Magnitude:
    """Size of a tensor's values, those that stand for -inf left out.

    Attributes:
      rms, mean: over the finite values; rms is None where unknown.
      top: largest absolute value.
      least: smallest absolute value if all have one sign, else 0.
      n: how many values.
      zeros: how many are zero.
    """

    rms: float | None
    mean: float = 0.0
    top: float = 0.0
    least: float = 0.0
    n: int = 0
    zeros: int = 0

    @property
    def std(self) -> float:
        if self.rms is None:
            return 0.0
        return math.sqrt(max(self.rms**2 - self.mean**2, 0.0))


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
        content = self._program.reader.content(id)
        found = magnitude_of(content)
        if found.top >= EXTREME and content.has_data:
            array = self._comparer.array(self._ref_side, id)
            if array is not None:
                x = np.abs(array.reshape(-1)).astype(np.float64)
                x = x[x < EXTREME]
                if x.size:
                    rms = math.sqrt(float(np.mean(x**2)))
                    return Magnitude(rms, 0.0, float(x.max()), 0.0, x.size, int((x == 0).sum()))
        if found.top >= EXTREME:
            return Magnitude(None, n=found.n)
        return found


def magnitude_of(content: StoredContent) -> Magnitude:
    """From the statistics alone; numbers that stand for -inf count."""
    stats = content.stats
    if stats.get("sq_sum") is None or stats.get("n") is None:
        return UNKNOWN
    total = int(stats["n"] or 0)
    finite = total - sum(int(stats.get(name) or 0) for name in ("nan", "posinf", "neginf"))
    low, high = stats.get("min"), stats.get("max")
    if finite <= 0:
        return Magnitude(0.0, n=total)
    least = 0.0
    if low is not None and high is not None:
        least = float(low) if low > 0 else (-float(high) if high < 0 else 0.0)
    return Magnitude(
        rms=math.sqrt(max(float(stats["sq_sum"] or 0.0), 0.0) / finite),
        mean=float(stats.get("sum") or 0.0) / finite,
        top=max(abs(float(low or 0.0)), abs(float(high or 0.0))),
        least=least,
        n=total,
        zeros=int(stats.get("zeros") or 0),
    )
