"""Weights whose rows are the reference's in one other order: a relabelling, where more than that is wrong.

Experts that are stored in another order, with the rows of their router, compute the same. Next to a fault
among them every one of these weights differs, and the first that is read is not to blame.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dispatch_trace.align.pairs import Pairing
from dispatch_trace.judge.findings import Finding, demoted

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

    def agrees(self, other: Order) -> bool:
        return len(self.rows) == len(other.rows) and all(
            a == b or _CHANGED in (a, b) for a, b in zip(self.rows, other.rows, strict=True)
        )


def without_relabelling(pairing: Pairing, findings: list[Finding]) -> tuple[list[Finding], list[Finding]]:
    """(fatal findings that stay, suspects): weights that merely share an order with one that differs besides.

    Args:
      findings: fatal ones.
    """
    weights = [f for f in findings if f.label == "parameter" and isinstance(f.evidence.get("path"), str)]
    if len(weights) < 2:
        return findings, []
    orders = {id(f): order for f in weights if (order := _order(pairing, f)) is not None}
    torn = [order for order in orders.values() if not order.is_whole]
    merely = {key for key, order in orders.items() if order.is_whole and any(order.agrees(t) for t in torn)}
    why = "its rows are in the order of those of other weights, which differ besides"
    suspects = [demoted(f, why) for f in findings if id(f) in merely]
    return [f for f in findings if id(f) not in merely], suspects


def _order(pairing: Pairing, finding: Finding) -> Order | None:
    """The order of the rows of the weight that a finding names; None where it is no other order."""
    for (_, module, name), versions in pairing.target.params.items():
        if (f"{module}.{name}" if module else name) != finding.evidence["path"]:
            continue
        for link in pairing.links.get((versions[-1].seq, 0), ()):
            ref = pairing.comparer.whole(True, link.ref_content)
            target = pairing.comparer.whole(False, link.target_content)
            if ref is not None and target is not None:
                return order_of(ref, target)
    return None


def order_of(ref: npt.NDArray[Any], target: npt.NDArray[Any]) -> Order | None:
    """Which row of `ref` each row of `target` is; None where the order is the same, or most are none of them.

    Args:
      ref, target: [rows, *shape].
    """
    if ref.shape != target.shape or ref.ndim < 2 or not 2 <= ref.shape[0] <= MAX_ROWS:
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


__all__ = ["Order", "order_of", "without_relabelling"]
