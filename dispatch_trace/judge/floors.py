"""Several runs of the reference: how far they are from each other is a measured floor of every band.

Other thread counts, batch shapes or inputs one unit in the last place off give other roundings. What the
reference itself does not reproduce is not held against the target. A quantile of the errors counts, not the
maximum: one run in which something went wrong must not excuse everything.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from dispatch_trace.align.graph import Value
from dispatch_trace.align.pairs import Pairing

QUANTILE = 0.9


def measured_floors(runs: Sequence[Pairing]) -> dict[Value, float]:
    """By value of the reference: the relative error up to which its runs differ.

    Args:
      runs: the reference, lined up with each other run of it (as the target).
    """
    errors: dict[Value, list[float]] = defaultdict(list)
    for run in runs:
        nearest: dict[Value, float] = {}
        for one in run.rounds:
            for links in list(one.links.values()):
                for link in links:
                    difference = one.compare(link)
                    if difference.known and not difference.nonfinite and math.isfinite(difference.rho):
                        nearest[link.ref] = min(difference.rho, nearest.get(link.ref, math.inf))
        for value, error in nearest.items():
            errors[value].append(error)
    floors = {value: float(np.quantile(found, QUANTILE)) for value, found in errors.items()}
    return {value: floor for value, floor in floors.items() if floor > 0.0}


__all__ = ["QUANTILE", "measured_floors"]
