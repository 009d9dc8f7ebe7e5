"""The thread that a writer's batches reach the disk on.

Guarantees: batches are written one at a time, in order; at most one waits for the disk, so that what is held
in memory stays bounded. While one is written the next is put together: neither the disk nor a core is idle.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from dispatch_trace.store.batch import Batch


class Disk:
    """Writes batches in the background.

    Attributes:
      busy: a batch is being written.
    """

    def __init__(self, write: Callable[[Batch], None]) -> None:
        """Starts the thread.

        Args:
          write: called on it with each batch; lets no exception out.
        """
        self._write = write
        self._batch: Batch | None = None
        self._ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="dispatch_trace disk", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._batch is not None

    def put(self, batch: Batch) -> None:
        """Hands a batch over, once the one before is written."""
        with self._changed:
            self._changed.wait_for(self._is_idle)
            self._batch = batch
            self._changed.notify_all()

    def wait(self) -> None:
        """Returns when all is written."""
        with self._changed:
            self._changed.wait_for(self._is_idle)

    def end(self) -> None:
        """Writes what was put, and ends the thread."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join()

    def _is_idle(self) -> bool:
        return self._batch is None

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._batch is not None or self._ended)
                batch = self._batch
            if batch is None:
                return
            try:
                self._write(batch)
            finally:
                with self._changed:
                    self._batch = None
                    self._changed.notify_all()
