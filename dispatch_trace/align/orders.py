"""Rows of a weight in another order: which row of the reference each of them is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# Above this no other order is looked for.
MAX_ROWS = 1 << 16
_CHANGED = -1


@dataclass(frozen=True, slots=True)
class Order:
    """Which row of the reference each row of a weight is; -1 for a row that is none of them."""

    rows: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        return _CHANGED not in self.rows

    @property
    def is_plain(self) -> bool:
        return self.rows == tuple(range(len(self.rows)))

    def agrees(self, other: Order) -> bool:
        return len(self.rows) == len(other.rows) and all(
            a == b or _CHANGED in (a, b) for a, b in zip(self.rows, other.rows, strict=True)
        )


def order_of(ref: npt.NDArray[Any], target: npt.NDArray[Any]) -> Order | None:
    """Which row of `ref` each row of `target` is; None where the order is the same, or most are none of them.

    Args:
      ref, target: [rows, *shape].
    """
    if ref.shape != target.shape or ref.ndim < 1 or not 2 <= ref.shape[0] <= MAX_ROWS:
        return None
    places: dict[bytes, int] = {}
    for number, row in enumerate(ref):
        places[np.ascontiguousarray(row).tobytes()] = number
    if len(places) < ref.shape[0]:
        return None  # rows that are alike have no order
    rows = [places.get(np.ascontiguousarray(row).tobytes(), _CHANGED) for row in target.astype(ref.dtype)]
    found = [(place, row) for place, row in enumerate(rows) if row != _CHANGED]
    if 2 * len(found) < len(rows) or all(place == row for place, row in found):
        return None
    return Order(tuple(rows)) if len({row for _, row in found}) == len(found) else None


__all__ = ["Order", "order_of"]
