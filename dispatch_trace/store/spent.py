"""Snapshots that a worker is done with, given up in the program's thread.

Two threads that give up the same copy-on-write memory at the same moment may crash or hang in torch (2.13):
the first counts down and then takes a lock that lies in what the second, who was the last, has destroyed
meanwhile (`c10::impl::cow::COWDeleterContext::decrement_refcount`). The program gives its tensors up in its
own thread, in part without the interpreter lock. So its snapshots are given up there as well, between ops.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Spent:
    """What one worker is done with. It adds, and says when it holds none of it; one other thread drops."""

    def __init__(self) -> None:
        self._held: list[Any] = []
        self._num_added = 0
        self._num_free = 0
        self._num_dropped = 0

    def add(self, snapshots: Iterable[Any]) -> None:
        """By the worker, which may hold them still."""
        added = list(snapshots)
        self._held += added
        self._num_added += len(added)

    def free(self) -> None:
        """By the worker: of what it added, no variable of its holds anything any more."""
        self._num_free = self._num_added

    def drop(self) -> None:
        """Gives up what is free; always in the same thread of the program."""
        num = self._num_free - self._num_dropped
        if num:
            self._num_dropped += num
            del self._held[:num]


__all__ = ["Spent"]
