"""What a view touches of the memory behind it; no torch."""

from __future__ import annotations

from collections.abc import Iterable


def extent_of(shape: Iterable[int], strides: Iterable[int]) -> int:
    """Elements from the first to the last that a view touches, 0 when it has none."""
    extent = 1
    for size, stride in zip(shape, strides, strict=True):
        if size == 0:
            return 0
        extent += (size - 1) * stride
    return extent


__all__ = ["extent_of"]
