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

from dispatch_trace.align.canon import SIZED_BY_VALUES, WRITE_INTO, short
from dispatch_trace.align.steps import StepKey
from dispatch_trace.schema import StoredContent, StoredRecord, StoredSlot
from dispatch_trace.store.mapped import Mapped
from dispatch_trace.store.reader import RankReader
from dispatch_trace.store.view import ReaderView

if TYPE_CHECKING:
    import torch

STRIDE = 1 << 40


class StepLens(ReaderView):
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
        super().__init__(reader)
        self._shown = frozenset(shown)
        self._leaving = frozenset(left_out)
        self._outside = outside
        self._parts: dict[StepKey, int] = {}
        self._keys: list[StepKey] = []
        self._of_parameters = frozenset(
            slot.content for record in reader.records(kind="param") for slot in record.slots
        )
        self._cache_dims: dict[int, int] = {}
        self._picked: set[int] = set()
        self._picked_storages: set[int] = set()
        self.left_out = 0

    @property
    def whole(self) -> RankReader:
        """The rank with all of its steps."""
        return self._whole

    def records(self, **where: Any) -> Iterator[StoredRecord]:
        for record in self._whole.records(**where):
            key = (record.model, record.step)
            if record.kind == "param":
                yield record
            elif key in self._shown or (self._outside and record.step < 0):
                seen = replace(record, slots=tuple(self._slot(key, slot) for slot in record.slots))
                self._note_cache(seen)
                self._note_picked(seen)
                yield seen
            elif key in self._leaving:
                self.left_out += 1

    def step_of(self, content: int) -> StepKey | None:
        """The step that a content number of this lens belongs to; None for parameters."""
        part = content // STRIDE
        return self._keys[part - 1] if part else None

    def cache_dim(self, content: int) -> int | None:
        """The dim of the keys, where a content is a cache that is written in place, or rows of one."""
        return self._cache_dims.get(content)

    def is_picked(self, content: int) -> bool:
        """Whether values of the step, those of all its tokens, say which elements a content holds."""
        return content in self._picked

    def content(self, id: int) -> StoredContent:
        return replace(self._whole.content(id % STRIDE), id=id)

    def sketch(self, id: int) -> np.ndarray[Any, Any] | None:
        return self._whole.sketch(id % STRIDE)

    def array(self, id: int) -> np.ndarray[Any, Any] | None:
        return self._whole.array(id % STRIDE)

    def mapped(self, id: int) -> Mapped | None:
        return self._whole.mapped(id % STRIDE)

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

    def _note_cache(self, record: StoredRecord) -> None:
        """Caches show by what writes them: a part, along one dim besides the rows'."""
        name = short(record.op)
        if record.kind != "op" or name not in _CACHE_OPS:
            return
        slots = {slot.name: slot for slot in record.slots if slot.is_tensor}
        source = slots.get("in.self")
        if source is None:
            return
        dim = self._cache_dims.get(source.content)
        if name in ("index_put", "index_copy"):
            dim = _written_dim(record)
        if dim is None:
            return
        for slot in slots.values():
            if slot.content >= 0 and len(slot.shape) == len(source.shape) and slot.name in _CACHE_SLOTS:
                self._cache_dims[slot.content] = dim

    def _note_picked(self, record: StoredRecord) -> None:
        """Elements that values picked (`nonzero`), and what is made of them until they are put in place."""
        name = short(record.op)
        if record.kind != "op":
            return
        reads = [slot for slot in record.slots if slot.role == "in" and slot.storage >= 0]
        reads = reads[:1] if name in WRITE_INTO else reads
        if name not in SIZED_BY_VALUES and not any(s.storage in self._picked_storages for s in reads):
            return
        for slot in record.slots:
            if slot.role != "in" and slot.storage >= 0:
                self._picked.add(slot.content)
                self._picked_storages.add(slot.storage)


def whole_of(reader: RankReader) -> RankReader:
    """The rank behind a lens, which is a program and can be run again; any other reader as it is."""
    return reader.whole if isinstance(reader, StepLens) else reader


_CACHE_OPS = frozenset({"index_put", "index_copy", "index", "index_select", "clone"})
_CACHE_SLOTS = frozenset({"in.self", "out", "out.self"})


def _written_dim(record: StoredRecord) -> int | None:
    """The dim along which an op writes part of a tensor, the rows' dim aside."""
    arguments = dict(record.args)
    if short(record.op) == "index_copy":
        dim = arguments.get("dim")
        return dim if isinstance(dim, int) and dim > 0 else None
    given = arguments.get("indices")
    if not isinstance(given, list | tuple):
        return None
    dims = [d for d, index in enumerate(given) if d > 0 and index is not None]
    return dims[0] if len(dims) == 1 else None
