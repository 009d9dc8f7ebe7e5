"""A rank seen through the steps of one round: other records do not show, and contents know their step.

Equal contents are stored once, so a content alone does not say in which step it stands; but which of its
rows are real depends on the step. Here contents get numbers of their own for each step: `part * STRIDE + id`.
Parameters keep theirs: they belong to no step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch_trace.align.steps import StepKey
from dispatch_trace.schema import StoredContent, StoredRecord, StoredSlot
from dispatch_trace.store.reader import RankReader

if TYPE_CHECKING:
    import torch

STRIDE = 1 << 40


class StepLens(RankReader):
    """A reader of the records of some steps.

    Attributes:
      left_out: how many records no round shows, by rule.
    """

    def __init__(
        self, reader: RankReader, shown: Collection[StepKey], left_out: Collection[StepKey], *, outside: bool
    ) -> None:
        """
        Args:
          reader: the whole rank, whose open files and caches are shared.
          shown: (model, number) of the steps that show; parameters always do.
          left_out: steps whose records are counted as left out by rule.
          outside: records before the first step show.
        """
        self.__dict__.update(reader.__dict__)  # a view: nothing is scanned again
        self._whole = reader
        self._shown = frozenset(shown)
        self._leaving = frozenset(left_out)
        self._outside = outside
        self._parts: dict[StepKey, int] = {}
        self._keys: list[StepKey] = []
        self._of_parameters = frozenset(
            slot.content for record in reader.records(kind="param") for slot in record.slots
        )
        self.left_out = 0

    def records(self, **where: Any) -> Iterator[StoredRecord]:
        for record in self._whole.records(**where):
            key = (record.model, record.step)
            if record.kind == "param":
                yield record
            elif key in self._shown or (self._outside and record.step < 0):
                yield replace(record, slots=tuple(self._slot(key, slot) for slot in record.slots))
            elif key in self._leaving:
                self.left_out += 1

    def step_of(self, content: int) -> StepKey | None:
        """The step that a content number of this lens belongs to; None for parameters."""
        part = content // STRIDE
        return self._keys[part - 1] if part else None

    def content(self, id: int) -> StoredContent:
        return replace(self._whole.content(id % STRIDE), id=id)

    def sketch(self, id: int) -> np.ndarray[Any, Any] | None:
        return self._whole.sketch(id % STRIDE)

    def array(self, id: int) -> np.ndarray[Any, Any] | None:
        return self._whole.array(id % STRIDE)

    def tensor(self, id: int) -> torch.Tensor:
        return self._whole.tensor(id % STRIDE)

    def _slot(self, key: StepKey, slot: StoredSlot) -> StoredSlot:
        if slot.content < 0 or slot.content in self._of_parameters:
            return slot
        part = self._parts.get(key)
        if part is None:
            self._keys.append(key)
            part = self._parts[key] = len(self._keys)
        return replace(slot, content=part * STRIDE + slot.content)
