"""Python's search for garbage, at longer intervals while much is read that stays."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Objects made before the youngest are searched: by default so few that a trace of 100,000 records is gone
# through again and again while it is read, a seventh of the time of an alignment.
_NUM_OBJECTS = 10_000

_lock = threading.Lock()
_depth = 0
_before = gc.get_threshold()


@contextmanager
def searched_seldom() -> Iterator[None]:
    """Longer intervals within, in all threads; what they were is restored when the last one leaves."""
    global _depth, _before
    with _lock:
        if _depth == 0:
            _before = gc.get_threshold()
            if 0 < _before[0] < _NUM_OBJECTS:
                gc.set_threshold(_NUM_OBJECTS, *_before[1:])
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                gc.set_threshold(*_before)


__all__ = ["searched_seldom"]
