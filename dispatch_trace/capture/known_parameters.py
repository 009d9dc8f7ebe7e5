"""Which parameters and buffers have been recorded, and by what a change of one shows.

A parameter changes in three ways: it is written (its version counter moves, but not by writes through
`.data`, which the storage's own history tells), it is given other memory (`.data = x`: no counter moves),
or another object takes its place. Keeps no tensor alive.
"""

from __future__ import annotations

import weakref
from typing import TypeAlias

import torch

Key: TypeAlias = tuple[str, str, str]  # (model, path of the module, name)


class KnownParameters:
    """What was known of each parameter when it was recorded last."""

    def __init__(self) -> None:
        self._known: dict[Key, tuple[weakref.ref[torch.Tensor], int, int]] = {}  # with version and memory
        self._keys: dict[int, Key] = {}  # id of the tensor -> where it was recorded last
        self._uncounted: set[Key] = set()  # those whose tensors count no versions

    def remember(self, tensor: torch.Tensor, key: Key) -> None:
        self._known[key] = weakref.ref(tensor), _version_of(tensor), _memory_of(tensor)
        self._keys[id(tensor)] = key
        if tensor.is_inference():
            self._uncounted.add(key)
        else:
            self._uncounted.discard(key)

    def forget(self, key: Key) -> None:
        """The last record no longer counts."""
        self._known.pop(key, None)

    def forget_uncounted(self) -> None:
        """The last records of those that count no versions no longer do: nobody would see a write."""
        while self._uncounted:
            self.forget(self._uncounted.pop())

    def is_current(self, tensor: torch.Tensor, key: Key) -> bool:
        """Whether nothing that the tensor says of itself has changed since."""
        known = self._known.get(key)
        return (
            known is not None
            and known[0]() is tensor
            and known[2] == _memory_of(tensor)
            and _version_of(tensor) <= known[1]
        )

    def moved(self, tensor: torch.Tensor) -> Key | None:
        """The place of a parameter that was given other memory since its last record."""
        key = self._keys.get(id(tensor))
        known = None if key is None else self._known.get(key)
        if known is None or known[0]() is not tensor or known[2] == _memory_of(tensor):
            return None
        return key


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _memory_of(tensor: torch.Tensor) -> int:
    """What tells the storage of a tensor from another one while both exist; 0 where it has none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return 0
