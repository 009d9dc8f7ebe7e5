"""What a view touches of the memory behind it; no torch."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


def extent_of(shape: Iterable[int], strides: Iterable[int]) -> int:
    """Elements from the first to the last that a view touches, 0 when it has none."""
    extent = 1
    for size, stride in zip(shape, strides, strict=True):
        if size == 0:
            return 0
        extent += (size - 1) * stride
    return extent


def touched(offset: int, shape: Iterable[int], strides: Iterable[int]) -> npt.NDArray[np.int64]:
    """The elements of the memory that a view touches, one for each of its own: [numel], not sorted."""
    places = np.array([offset], dtype=np.int64)
    for size, stride in zip(shape, strides, strict=True):
        places = np.add.outer(places, np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return places


__all__ = ["extent_of", "touched"]
