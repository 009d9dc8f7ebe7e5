"""Two recordings of one program that share some records: whether it came out the same the second time.

A search that runs a program again to look closer has, without a further run, records of both runs under the
same keys. Where their values differ, the program is not deterministic, and that is said first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dispatch_trace.sketch import relative_distance
from dispatch_trace.store.reader import RankReader


@dataclass(frozen=True, slots=True)
class Change:
    """The first value that came out otherwise.

    Attributes:
      module, step: where. what: the slot, and of which op, in words that the module's path ends.
      error: relative L2 distance of both, inf where it is not known.
    """

    module: str
    step: int
    what: str
    error: float

    def __str__(self) -> str:
        size = f"a relative difference of {self.error:.2g}" if math.isfinite(self.error) else "another value"
        return f"{self.what} {self.module or '(root)'} (step {self.step}), {size}"


def first_change(before: RankReader, again: RankReader) -> Change | None:
    """The first value that differs between two runs, among the records that both hold.

    Args:
      before, again: recordings of one program; parameters count like everything else.
    Returns: None where nothing differs, or nothing can be compared.
    """
    known = {record.key: record for record in before.records()}
    for record in again.records():
        other = known.get(record.key)
        if other is None or other.overload != record.overload:
            continue
        theirs = {slot.name: slot for slot in other.slots if slot.is_tensor and slot.content >= 0}
        for slot in record.slots:
            twin = theirs.get(slot.name)
            if twin is None or not slot.is_tensor or slot.content < 0 or slot.uninitialised:
                continue
            x, y = before.content(twin.content).hash, again.content(slot.content).hash
            if x and y and x != y:
                what = f"parameter {record.name}" if record.kind == "param" else slot.name
                what = f"{what} of {record.op} in" if record.kind == "op" else f"{what} of"
                error = _distance(before, twin.content, again, slot.content)
                return Change(record.module, record.step, what, error)
    return None


def _distance(before: RankReader, a: int, again: RankReader, b: int) -> float:
    if before.content(a).shape != again.content(b).shape:
        return math.inf
    first, second = before.sketch(a), again.sketch(b)
    if first is None or second is None:
        return math.inf
    return float(relative_distance(second, first))


__all__ = ["Change", "first_change"]
