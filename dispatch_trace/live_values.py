"""Values of a running program, held against a recording as they are made.

`LiveContents` stands where a reader of the target's trace would stand, so that the aligner's comparison and
the judges' estimates serve unchanged; nothing has been written yet when they are asked.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from dispatch_trace.align.content import Comparer, Difference, unknown
from dispatch_trace.align.graph import Program
from dispatch_trace.judge.magnitudes import Magnitude, magnitude_of
from dispatch_trace.metrics import as_numpy
from dispatch_trace.schema import Content, RawSlot, StoredContent, StoredRecord, StoredSlot
from dispatch_trace.stats import accumulate
from dispatch_trace.store import layouts
from dispatch_trace.store.reader import RankReader
from dispatch_trace.store.singly import Singly

_KEPT = 4096  # values whose statistics are remembered; an input is seldom older


class LiveContents(Singly):
    """The values seen so far, by number: statistics, hash and sketch, and the data while it is there."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Content, int]] = {}
        self._contents: dict[int, StoredContent] = {}
        self._sketches: dict[int, np.ndarray[Any, Any] | None] = {}
        self._tensors: dict[int, torch.Tensor] = {}
        self._next = 0

    def number(self, slot: RawSlot) -> int:
        """The number of what a slot holds, -1 where it holds nothing that can be looked at."""
        content = slot.content
        if content is None:
            return -1
        known = self._known.get(id(content))
        if known is not None:
            return known[1]
        tensor = content.tensor
        if tensor is None:
            return -1
        number = self._next
        self._next += 1
        seen = tensor if tensor.device.type in ("cpu", "cuda") else tensor.cpu()
        summary = accumulate(layouts.summary_view(seen))
        digest = layouts.content_digest(seen).hex() if seen.device.type == "cpu" else ""
        self._contents[number] = StoredContent(
            id=number,
            dtype=slot.dtype,
            shape=tuple(tensor.shape),
            hash=digest,
            stats=summary.stats,
            has_sketch=summary.sketch is not None,
        )
        self._sketches[number] = summary.sketch
        self._tensors[number] = seen
        self._known[id(content)] = (content, number)
        while len(self._known) > _KEPT:
            _, old = self._known.pop(next(iter(self._known)))
            del self._contents[old], self._sketches[old]
        return number

    def forget_data(self) -> None:
        """Lets go of the tensors; what is known of them stays."""
        self._tensors.clear()

    def content(self, number: int) -> StoredContent:
        found = self._contents.get(number) or StoredContent(id=number, dtype="float32", shape=(-1,))
        return replace(found, has_data=True) if number in self._tensors else found

    def sketch(self, number: int) -> np.ndarray[Any, Any] | None:
        return self._sketches.get(number)

    def tensor(self, number: int) -> torch.Tensor | None:
        return self._tensors.get(number)

    def array(self, number: int) -> np.ndarray[Any, Any] | None:
        tensor = self._tensors.get(number)
        return None if tensor is None or tensor.layout is not torch.strided else as_numpy(tensor)

    def magnitude(self, record: StoredRecord, slot: StoredSlot) -> Magnitude:
        """As `Magnitudes.of_slot`."""
        return magnitude_of(self.content(slot.content)) if slot.content >= 0 else Magnitude(None)


class LiveComparer(Comparer):
    """Compares values of a recording with those of a running program."""

    def __init__(self, ref: RankReader, live: LiveContents) -> None:
        super().__init__(ref, cast(RankReader, live))
        self._live = live

    def compare(self, ref_id: int, target_id: int) -> Difference:
        if target_id < 0 or ref_id < 0:
            return unknown("no value was recorded")
        found = self._compare(ref_id, target_id)
        self._arrays.clear()
        return found


class LiveProgram:
    """What the estimates ask of a program, about one record."""

    def inputs(self, record: StoredRecord) -> list[StoredSlot]:
        return [slot for slot in record.slots if slot.role == "in" and slot.is_tensor]

    def outputs(self, record: StoredRecord) -> list[StoredSlot]:
        return [slot for slot in record.slots if slot.role != "in" and slot.is_tensor]

    def origins(self, record: StoredRecord, slot: StoredSlot) -> tuple[Any, ...]:
        return ()

    def as_program(self) -> Program:
        return cast(Program, self)


__all__ = ["LiveComparer", "LiveContents", "LiveProgram"]
