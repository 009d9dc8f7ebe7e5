"""A trace whose values are those of the recorded program in float64, for everything that reads a trace.

The recorded op graph runs once (`execute.iterate`); of each value a fingerprint stays, the value itself is
freed when its last reader has run. What comes out has the records of the recording, slot for slot, with
float64 for every float dtype and contents of its own numbering; it is lined up and judged like any trace.

Where a value is not the program's alone (an op that had to take its recorded result, or ran in the recorded
precision) the record is *clouded*, with the reason: nothing behind it can be held against the target.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dispatch_trace import execute
from dispatch_trace.errors import DispatchTraceError
from dispatch_trace.execute_memory import HELD_AS, assign, geometry, has_geometry
from dispatch_trace.execute_ops import REASON_RANDOM, why_taken
from dispatch_trace.execute_run import Execution, Values
from dispatch_trace.judge.twin_values import SMALL, Fingerprint, fingerprint, plain
from dispatch_trace.schema import StepInfo, StoredContent, StoredRecord, StoredSlot
from dispatch_trace.store.reader import RankReader
from dispatch_trace.store.singly import Singly

# Data that is kept beside fingerprints, at most.
KEPT_BYTES = 1 << 28

Place = tuple[int, int]  # (seq, slot index)
Leaf = Callable[[int], torch.Tensor | None]
Progress = Callable[[int, int], None]


class TwinTrace(Singly):
    """One rank's program in float64; reads like a `RankReader`.

    Attributes:
      path, rank, header, steps, complete, problems, num_records: of the recording.
      cloudy: why the values of a record are not the program's alone, by seq.
      execution: what ran and what did not.
    """

    def __init__(self, reader: RankReader, leaf: Leaf, hash: Callable[[int, str], str]) -> None:
        """
        Args:
          reader: the recording.
          leaf: what the run reads in place of a recorded content, None for what was recorded.
          hash: the hash of what it reads, from the content and its recorded hash; "" for none.
        """
        self.path: Path = reader.path
        self.rank = reader.rank
        self.header: dict[str, Any] = reader.header
        self.end = reader.end
        self.steps: list[StepInfo] = reader.steps
        self.problems = reader.problems
        self.complete = reader.complete
        self.closed = reader.closed
        self.num_records = reader.num_records
        self.cloudy: dict[int, str] = {}
        self.execution = Execution()
        self._reader = reader
        self._leaf = leaf
        self._hash = hash
        self._records: list[StoredRecord] = []
        self._values: list[Fingerprint | int] = []  # of a leaf its recorded content, until it is asked for
        self._leaves: dict[int, int] = {}
        self._leaf_contents: dict[int, int] = {}
        self._known: dict[tuple[Any, int], int] = {}
        self._versions: defaultdict[int, int] = defaultdict(int)
        self._contents: dict[Place, int] = {}
        self._kept_bytes = 0
        self._adopted: Mapping[Place, Fingerprint] = {}

    # Running ----------------------------------------------------------------------------------------

    def run(
        self,
        *,
        keep: frozenset[Place] = frozenset(),
        put: Callable[[Place], torch.Tensor | None] | None = None,
        seen: Callable[[Place, torch.Tensor | None, Fingerprint], None] | None = None,
        records: Iterable[StoredRecord] | None = None,
        known: Mapping[Place, Fingerprint] | None = None,
        all_known: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """Executes the recording.

        Args:
          keep: slots whose values are kept whole.
          put: a value to put in the place of what an op made, before anything reads it.
          seen: called with every value that an op made; the value is None where nothing ran.
          records: of the recording, where somebody has read them already.
          known: fingerprints of slots that need not be taken again.
          all_known: they are those of all values: nothing runs.
          progress: called with (records done, records in all).
        """
        execution = self.execution
        counts = _Counts(execution)
        self._adopted = known or {}
        records = list(self._reader.records() if records is None else records)
        runs = (
            _unexecuted(records, execution)
            if all_known
            else execute.iterate(
                self._reader,
                dtype=torch.float64,
                execution=execution,
                inputs=True,
                leaf=lambda content, _: self._leaf(content),
                resizes=True,
                records=records,
                progress=progress,
            )
        )
        for record, values in runs:
            why = counts.changed()
            if why:
                self.cloudy[record.seq] = why
            elif record.kind == "module" and any(s.leaf and s.role == "out" for s in record.slots):
                self.cloudy[record.seq] = record.note or "what it returned was not recorded as it was made"
            if put is not None and record.kind == "op":
                _put(record, values, put)
            self._take(record, values, keep, seen)

    def _take(
        self,
        record: StoredRecord,
        values: Values,
        keep: frozenset[Place],
        seen: Callable[[Place, torch.Tensor | None, Fingerprint], None] | None,
    ) -> None:
        slots: list[StoredSlot] = []
        for slot in record.slots:
            if slot.role == "written" and slot.storage >= 0:
                self._versions[slot.storage] += 1
        written = {"in." + s.name.removeprefix("out.") for s in record.slots if s.role == "written"}
        for slot in record.slots:
            if not slot.is_tensor:
                slots.append(slot)
                continue
            place = (record.seq, slot.index)
            content = -1
            if slot.content >= 0:
                content = self._number(place, slot, values.get(slot.name), keep, slot.name in written)
                made = slot.role != "in" and record.kind == "op" and not record.light
                if seen is not None and made and content >= 0:
                    found = self._values[content]
                    if isinstance(found, Fingerprint) and (slot.name in values or place in self._adopted):
                        seen(place, values.get(slot.name), found)
            self._contents[place] = content
            slots.append(replace(slot, dtype=HELD_AS.get(slot.dtype, slot.dtype), content=content))
        self._records.append(replace(record, slots=tuple(slots)))

    def _number(
        self,
        place: Place,
        slot: StoredSlot,
        value: torch.Tensor | None,
        keep: frozenset[Place],
        overwritten: bool,
    ) -> int:
        """The number of a slot's content; -1 where nothing is known of it."""
        if slot.leaf and slot.role == "in":
            return self._number_leaf(slot.content)
        adopted = self._adopted.get(place)
        if adopted is None and value is None and slot.role == "out" and not slot.producers:
            return self._number_leaf(slot.content)  # a parameter record
        version = self._versions[slot.storage] - (1 if overwritten else 0)
        key = (geometry(slot), version) if has_geometry(slot) else None
        if key is not None and key in self._known:
            return self._known[key]
        found = adopted if value is None or place not in keep else None
        if found is None and value is None:
            return -1
        if found is None:
            assert value is not None
            limit = value.numel() if place in keep else SMALL
            found = fingerprint(value, keep=limit if self._kept_bytes < KEPT_BYTES else 0)
        if found is None:
            return -1
        if found.data is not None and found is not adopted:
            self._kept_bytes += found.data.nbytes
        number = len(self._values)
        self._values.append(found)
        if key is not None:
            self._known[key] = number
        return number

    def _number_leaf(self, content: int) -> int:
        if not self._reader.content(content).has_data:
            return -1
        number = self._leaves.get(content)
        if number is None:
            number = self._leaves[content] = len(self._values)
            self._leaf_contents[number] = content
            self._values.append(content)
        return number

    # Reading ----------------------------------------------------------------------------------------

    def records(self, **where: Any) -> Iterator[StoredRecord]:
        for record in self._records:
            if all(getattr(record, name) == wanted for name, wanted in where.items()):
                yield record

    def value(self, number: int) -> Fingerprint | None:
        """The fingerprint of a content."""
        found = self._values[number]
        if isinstance(found, int):
            whole = self._leaf_value(found)
            made = None if whole is None else fingerprint(whole)
            if made is None:
                return None
            self._values[number] = found = made
        return found

    def _leaf_value(self, content: int) -> torch.Tensor | None:
        replaced = self._leaf(content)
        if replaced is not None:
            return replaced
        try:
            return self._reader.tensor(content)
        except DispatchTraceError:
            return None

    def at(self, place: Place) -> int:
        """The number of the content at a slot, -1 where it has none."""
        return self._contents.get(place, -1)

    def made(self) -> Iterator[tuple[Place, Fingerprint]]:
        """The fingerprints of all slots that are the program's alone, leaves aside."""
        for place, number in self._contents.items():
            found = self._values[number] if number >= 0 else None
            if isinstance(found, Fingerprint) and place[0] not in self.cloudy:
                yield place, found

    def computed(self) -> Iterator[tuple[int, Fingerprint]]:
        """All values so far that are no leaves."""
        for number, found in enumerate(self._values):
            if isinstance(found, Fingerprint):
                yield number, found

    def content(self, number: int) -> StoredContent:
        recorded = self._values[number]
        if isinstance(recorded, int):
            # What was recorded of a leaf is near enough, and costs no second look at every weight.
            known = self._reader.content(recorded)
            return replace(known, id=number, dtype="float64", hash=self._hash(recorded, known.hash))
        found = self.value(number)
        if found is None:
            return StoredContent(id=number, dtype="float64", shape=())
        return StoredContent(
            id=number,
            dtype="float64",
            shape=found.shape,
            stats=dict(found.stats),
            has_sketch=True,
            has_data=found.data is not None,
        )

    def sketch(self, number: int) -> npt.NDArray[Any] | None:
        found = self.value(number)
        return None if found is None else found.sketch

    def array(self, number: int) -> npt.NDArray[Any] | None:
        """What is compared: masks of any size are one number."""
        found = self.value(number)
        return None if found is None else found.compared

    def elements(self, number: int) -> npt.NDArray[Any] | None:
        """The elements as they came out, those of masks too."""
        found = self.value(number)
        return None if found is None else found.data

    def whole(self, number: int) -> npt.NDArray[Any] | None:
        """All elements, of leaves too."""
        content = self._leaf_contents.get(number)
        value = None if content is None else self._leaf_value(content)
        numbers = None if value is None else plain(value)
        return self.array(number) if numbers is None else numbers.numpy()

    def tensor(self, number: int) -> torch.Tensor:
        data = self.elements(number)
        if data is None:
            raise DispatchTraceError(f"value {number} of the float64 run was not kept")
        return torch.from_numpy(np.ascontiguousarray(data))


def _unexecuted(
    records: Iterable[StoredRecord], execution: Execution
) -> Iterator[tuple[StoredRecord, Values]]:
    """Records of which nothing runs; what would have been taken from the recording is counted."""
    for record in records:
        if record.kind == "op" and why_taken(record):
            execution.taken[record.overload, why_taken(record)] += 1
        yield record, {}


class _Counts:
    """Tells what became of the record that ran last, from the counts of its execution."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self._before = self._now()

    def _now(self) -> tuple[int, int, int, int]:
        execution = self._execution
        taken = sum(n for (_, reason), n in execution.taken.items() if reason != REASON_RANDOM)
        return (
            taken,
            execution.narrowed.total(),
            execution.skipped.total(),
            len(execution.failed),
        )

    def changed(self) -> str:
        before, self._before = self._before, self._now()
        kinds = ("its result is the recorded one", "it ran in the recorded precision", "it was not run")
        for why, old, new in zip((*kinds, "it failed"), before, self._before, strict=True):
            if new != old:
                return why
        return ""


def _put(record: StoredRecord, values: Values, put: Callable[[Place], torch.Tensor | None]) -> None:
    for slot in record.slots:
        if slot.role != "in" and slot.name in values:
            value = put((record.seq, slot.index))
            own = values[slot.name]
            if value is not None and value.numel() == own.numel():
                assign(own, value.reshape(own.shape).to(own.dtype))
