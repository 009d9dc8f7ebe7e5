"""Steps whose sizes differ: what is alike in them beside sizes, and sizes that stand for those of all.

A decoder that keeps keys and values reads more of them with each step: the same ops in the same order, on
shapes that grow. Sizes are the dims, strides and offsets of tensors, and numbers among arguments: what an
optimiser multiplies by may be another one in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dispatch_trace.per_step import Together, each
from dispatch_trace.store.columns import unpack_plain
from dispatch_trace.store.table import Names, Numbers

_STATISTICS_BITS = 16  # of a kind of contents (`ContentTable`), below the number of its type


def plain_geometries(numbers: Numbers, names: Names) -> Numbers:
    """Numbers of geometries in which sizes count for nothing."""

    def plain(geometry: Any) -> Any:
        dtype, shape, strides, offset, device, layout = geometry
        return "geometry", dtype, len(shape), strides is None, offset is None, device, layout

    return _plain(numbers, names, plain)


def plain_arguments(numbers: Numbers, names: Names) -> Numbers:
    """The same of arguments."""
    return _plain(numbers, names, lambda args: ("args", _without_sizes(args)))


def plain_values(numbers: Numbers, names: Names) -> Numbers:
    """The same of what slots hold that are no tensors: numbers that `.item()` gave, say."""
    return _plain(numbers, names, lambda value: ("value", _without_sizes(value)))


def plain_kinds(kinds: Numbers, names: Names) -> Numbers:
    """The same of kinds of contents, -1 for none."""
    types = np.where(kinds < 0, -1, kinds >> _STATISTICS_BITS)
    plain = _plain(types, names, lambda given: ("type", given[0]))
    return np.where(kinds < 0, -1, (plain << _STATISTICS_BITS) + (kinds & ((1 << _STATISTICS_BITS) - 1)))


def _plain(numbers: Numbers, names: Names, plain: Callable[[Any], Any]) -> Numbers:
    distinct, place = np.unique(numbers, return_inverse=True)
    found = [-1 if n < 0 else names.number(repr(plain(value_of(names, n)))) for n in distinct.tolist()]
    return np.array(found, dtype=np.int64)[place]


def value_of(names: Names, number: int) -> Any:
    """The plain value that a number stands for."""
    key = names.key(number)
    assert isinstance(key, bytes)
    return unpack_plain(key)


def _without_sizes(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_without_sizes(one) for one in value]
    if isinstance(value, dict):
        return {name: _without_sizes(one) for name, one in value.items()}
    if isinstance(value, float):
        return "."
    return "#" if _is_size(value) else value


def _is_size(value: Any) -> bool:
    """Whether a value is an integer, of at most 64 bits; seeds may have more."""
    return isinstance(value, int) and not isinstance(value, bool) and -(1 << 63) <= value < 1 << 63


def together_of(values: Sequence[Any], steps: Together) -> Any:
    """One value for those of all steps, which are alike but for numbers."""
    first = values[0]
    if isinstance(first, (list, tuple)):
        return type(first)(together_of(ones, steps) for ones in zip(*values, strict=True))
    if isinstance(first, dict):
        return {name: together_of([one[name] for one in values], steps) for name in first}
    if (_is_size(first) or isinstance(first, float)) and any(one != first for one in values):
        return each(np.array(values, dtype=np.int64 if _is_size(first) else np.float64), steps)
    return first


__all__ = ["plain_arguments", "plain_geometries", "plain_kinds", "plain_values", "together_of", "value_of"]
