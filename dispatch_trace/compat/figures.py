"""Statistics that other tools write, under our names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

UNKNOWN_SHAPE = (-1,)


def number(value: Any) -> float | None:
    """A finite number, None for anything else (NaN, an error in words)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def moments(given: Mapping[str, Any], shape: Sequence[int] | None) -> dict[str, int | float | None]:
    """What follows from figures of a tensor without NaN and inf.

    Args:
      given: any of min, max, sum, mean, abs_mean, abs_sum, std (with Bessel's correction), l2.
      shape: None where it is not known; then nothing that takes the number of elements follows.
    Returns: by the names of `schema.STATISTICS`; {} where a figure is not finite, which says that some
      elements are not.
    """
    read = {name: number(value) for name, value in given.items()}
    if any(value is None and _is_nonfinite(given[name]) for name, value in read.items()):
        return {}
    found: dict[str, int | float | None] = {name: read.get(name) for name in ("min", "max", "sum", "abs_sum")}
    l2, mean, std = read.get("l2"), read.get("mean"), read.get("std")
    if l2 is not None:
        found["sq_sum"] = l2 * l2
    if shape is not None:
        n = found["n"] = math.prod(shape)
        if found["sum"] is None and mean is not None:
            found["sum"] = mean * n
        if (abs_mean := read.get("abs_mean")) is not None:
            found["abs_sum"] = abs_mean * n
        if l2 is None and std is not None and mean is not None and n > 1:
            found["sq_sum"] = std * std * (n - 1) + n * mean * mean
    return {name: value for name, value in found.items() if value is not None}


def _is_nonfinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
