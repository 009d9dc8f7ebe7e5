"""Nested arguments and outputs as flat lists of named leaves.

The names are the slot names of DESIGN.md. Enters what a model may return and pytree may not know
(unregistered dataclasses, mappings, named tuples); looks, and never changes or keeps what it looks at.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from dispatch_trace.slot_names import slot_key

_MAX_DEPTH = 400


def flatten(value: Any, name: str, depth: int = 0) -> list[tuple[str, Any]]:
    """The leaves of a nested structure with their slot names.

    Enters lists, tuples, mappings and dataclasses, registered with pytree or not. Anything else is a
    leaf: tensors, None and scalars keep their value, other objects their type.
    """
    if isinstance(value, torch.Tensor) or value is None or isinstance(value, (bool, int, float, str)):
        return [(name, value)]
    if depth >= _MAX_DEPTH:
        return [(name, value)]
    found: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        for key, item in list(value.items()):
            found += flatten(item, name + slot_key(key), depth + 1)
        return found or [(name, value)]
    if isinstance(value, (list, tuple)):
        fields = getattr(value, "_fields", None)
        for i, item in enumerate(value):
            found += flatten(item, f"{name}.{fields[i]}" if fields else f"{name}[{i}]", depth + 1)
        return found or [(name, value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                found += flatten(getattr(value, field.name), name + slot_key(field.name), depth + 1)
        return found or [(name, value)]
    return [(name, value)]


def flatten_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Leaves of a call's arguments: `in[0]`, `in.name`."""
    found: list[tuple[str, Any]] = []
    for i, value in enumerate(args):
        found += flatten(value, f"in[{i}]")
    for name, value in kwargs.items():
        found += flatten(value, f"in.{name}")
    return found
