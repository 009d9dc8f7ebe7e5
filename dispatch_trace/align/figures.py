"""How far two values are apart at least, from their statistics.

By what the triangle inequality leaves: the norm of a difference is at least the difference of norms, at least
sqrt(n) times that of means, and no element moves the maximum by more than itself. Sums add up over the parts
of a value, in whatever order their elements stand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from dispatch_trace.schema import StoredContent

# Standard deviations of a scale or an offset that rounding makes: 0.42 tau / sqrt(n_eff) each.
DEVIATIONS = 8.0
ROUNDED = 0.42
# Sums in float64 agree up to their own rounding.
_SUMMED = 1e-9
_NOT_FINITE = ("nan", "posinf", "neginf")
_ADDED = (*_NOT_FINITE, "n", "sum", "abs_sum", "sq_sum", "quad_sum")


def apart_at_least(ref: StoredContent, target: StoredContent) -> float:
    """A lower bound of ||target - ref|| / ||ref||, from statistics; 0 where they tell nothing.

    Norms are L2; where no bound of it is known but sums of magnitudes are, L1.

    Args:
      ref, target: of one shape.
    """
    n = math.prod(ref.shape)
    if ref.shape != target.shape or n <= 0 or any(size < 0 for size in ref.shape):
        return 0.0
    return figures_apart(ref.stats, target.stats, n)


def figures_apart(a: Mapping[str, Any], b: Mapping[str, Any], n: int) -> float:
    """The same from the statistics of `n` elements, in whatever order those stand."""
    if not a or not b:
        return 0.0
    bounds = [0.0]
    norms = _root(a.get("sq_sum")), _root(b.get("sq_sum"))
    if norms[0] is not None and norms[1] is not None:
        bounds.append(abs(norms[1] - norms[0]))
    for name, share in (("sum", math.sqrt(n)), ("abs_sum", math.sqrt(n)), ("min", 1.0), ("max", 1.0)):
        first, second = a.get(name), b.get(name)
        if first is not None and second is not None:
            bounds.append(abs(float(second) - float(first)) / share)
    size = norms[0]
    sums = a.get("abs_sum"), b.get("abs_sum")
    if size is None and a.get("min") is None and sums[0] and sums[1] is not None:
        return abs(float(sums[1]) - float(sums[0])) / float(sums[0])
    if size is None:  # an upper bound of it keeps the quotient a lower one
        extremes = [abs(float(v)) for v in (a.get("min"), a.get("max")) if v is not None]
        if len(extremes) < 2:
            return 0.0
        size = max(extremes) * math.sqrt(n)
    return max(bounds) / size if size else 0.0


def joined_figures(parts: Iterable[StoredContent | None]) -> dict[str, float] | None:
    """Statistics of several contents together; None where some are not known, or not finite."""
    sums = dict.fromkeys(_ADDED, 0.0)
    for content in parts:
        for name in _ADDED:
            figure = None if content is None else content.stats.get(name)
            if figure is None or (figure and name in _NOT_FINITE):
                return None
            sums[name] += figure
    return sums


def rounding_apart(figures: Mapping[str, float], u: float) -> float:
    """By how much figures may be apart where each element was rounded by itself, with unit roundoff `u`."""
    if not figures["sq_sum"]:
        return 0.0
    return _SUMMED + DEVIATIONS * ROUNDED * u * math.sqrt(figures["quad_sum"]) / figures["sq_sum"]


def _root(value: float | int | None) -> float | None:
    return None if value is None else math.sqrt(max(float(value), 0.0))
