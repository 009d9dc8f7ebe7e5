"""A rank recorded with its leaves only, with the data of the rest: what one run of it gives back bit for bit.

Rows of requests stand in other places in two traces that pair by request, and no sketch tells rows apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dispatch_trace.errors import DispatchTraceError
from dispatch_trace.executable import check_executable
from dispatch_trace.schema import StoredContent
from dispatch_trace.store.mapped import Mapped
from dispatch_trace.store.reader import RankReader
from dispatch_trace.store.view import ReaderView

if TYPE_CHECKING:
    import numpy as np
    import torch

# Values are held up to here; of what would not fit, data stays unknown.
MAX_BYTES = 1 << 30

Progress = Callable[[int, int], None]


class RebuiltReader(ReaderView):
    """A reader that holds data of contents whose data is not in the trace."""

    def __init__(self, reader: RankReader, progress: Progress | None = None) -> None:
        """
        Args:
          reader: the rank, whose open files and caches are shared.
          progress: called with (records run, records in all).
        Raises:
          DispatchTraceError: it cannot be run again, or cannot be read.
        """
        super().__init__(reader)
        self._made: dict[int, torch.Tensor] = {}
        self._run(progress)

    def content(self, id: int) -> StoredContent:
        found = self._whole.content(id)
        return replace(found, has_data=True) if id in self._made else found

    def array(self, id: int) -> np.ndarray[Any, Any] | None:
        return None if id in self._made else self._whole.array(id)

    def mapped(self, id: int) -> Mapped | None:
        return None if id in self._made else self._whole.mapped(id)

    def tensor(self, id: int) -> torch.Tensor:
        found = self._made.get(id)
        return self._whole.tensor(id) if found is None else found

    def _run(self, progress: Progress | None) -> None:
        from dispatch_trace import execute
        from dispatch_trace.store.layouts import content_hash

        left = MAX_BYTES
        for record, values in execute.iterate(self._whole, progress=progress):
            for slot in record.slots:
                value = values.get(slot.name)
                if value is None or slot.role == "in" or slot.content < 0 or slot.content in self._made:
                    continue
                known, size = self._whole.content(slot.content), value.numel() * value.element_size()
                if known.has_data or not known.hash or size > left:
                    continue
                if content_hash(value) == known.hash:
                    left -= size
                    self._made[slot.content] = value.detach().clone()


def rebuilt(reader: RankReader, progress: Progress | None = None) -> RankReader:
    """The rank with the data that a run of it gives back; as it is where it keeps data or cannot be run."""
    options = reader.header.get("options") or {}
    if "leaves" not in {options.get("save"), *(save for _, save in options.get("save_rules", ()))}:
        return reader
    try:
        check_executable(reader)
        return RebuiltReader(reader, progress)
    except DispatchTraceError:
        return reader
