"""A rank seen otherwise than it was written: the base of readers that rename, leave out or add."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch_trace.schema import StoredContent, StoredRecord
from dispatch_trace.store.mapped import Mapped
from dispatch_trace.store.reader import RankReader

if TYPE_CHECKING:
    import torch


class ReaderView(RankReader):
    """A view of a rank. What a subclass does not change is the whole rank's; nothing is read again."""

    def __init__(self, whole: RankReader) -> None:
        """
        Args:
          whole: the rank, whose open files and caches are shared.
        """
        self.__dict__.update(whole.__dict__)
        self._whole = whole

    def records(self, **where: Any) -> Iterator[StoredRecord]:
        return self._whole.records(**where)

    def record(self, seq: int) -> StoredRecord:
        return self._whole.record(seq)

    def content(self, id: int) -> StoredContent:
        return self._whole.content(id)

    def contents(self) -> Iterator[StoredContent]:
        return self._whole.contents()

    def sketch(self, id: int) -> np.ndarray[Any, Any] | None:
        return self._whole.sketch(id)

    def array(self, id: int) -> np.ndarray[Any, Any] | None:
        return self._whole.array(id)

    def mapped(self, id: int) -> Mapped | None:
        return self._whole.mapped(id)

    def tensor(self, id: int) -> torch.Tensor:
        return self._whole.tensor(id)

    def verify(self) -> list[str]:
        return self._whole.verify()


__all__ = ["ReaderView"]
