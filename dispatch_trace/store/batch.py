"""What goes to the disk together, and how contents come into it: hashed, compared, summarised, packed.

Guarantees: a content is worked on once, whatever number of slots share it; equal values get one number
and are stored once; a tensor that cannot be read costs its own data only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash

from dispatch_trace import kernel
from dispatch_trace.device_stats import DeviceLane, can_summarise
from dispatch_trace.schema import STATISTICS, Content, Figures, NotedRow, RawRecord, StepInfo
from dispatch_trace.sketch import narrow
from dispatch_trace.stats import Summary, accumulate_many, chosen
from dispatch_trace.store import layouts
from dispatch_trace.store.records import ContentRow
from dispatch_trace.store.spent import Spent

OVER_BUDGET = "data beyond max_bytes"
_ROW_BYTES = 32
_RECORD_BYTES = 256  # a record's share of a batch, for the bound on its size
# Only these devices are asked for casts and sums. From any other the value comes to the host first:
# Neuron's casts fail or round (docs/neuron.md), and not every device has a float64.
_ABLE_DEVICES = frozenset({"cpu", "cuda"})
# Of these, statistics are taken where the values are, and fetched together.
LANE_DEVICES = frozenset({"cuda"})


@dataclass(slots=True)
class Batch:
    """One shard at most, the step frames, and one records frame.

    Attributes:
      steps, records: in the order in which they were put.
      amendments: fields for the header.
      contents: rows of the contents that these records were the first to refer to. Until the batch is
        written `row.tensor` counts from the first of `parts`.
      sketches: [k] float32 each; `row.sketch_row` counts them.
      parts: contiguous tensors for the shard.
      digests: of the bytes of ordinary ones, by which the same bytes in another shape are found.
      num_bytes: size, for the bound on a batch.
      unread: contents whose statistics are to be taken, and their values.
      unread_bytes: of snapshots that are held for no more than that.
      pinned_bytes: of snapshots that are held until the batch is written.
      since: when the oldest of it was put, by `time.monotonic`.
    """

    steps: list[StepInfo] = field(default_factory=list)
    records: list[RawRecord | NotedRow] = field(default_factory=list)
    amendments: list[dict[str, Any]] = field(default_factory=list)
    contents: list[ContentRow] = field(default_factory=list)
    sketches: list[np.ndarray[Any, Any]] = field(default_factory=list)
    parts: list[torch.Tensor] = field(default_factory=list)
    digests: dict[tuple[torch.dtype, int, bytes], int] = field(default_factory=dict)
    num_bytes: int = 0
    unread: list[tuple[ContentRow, torch.Tensor]] = field(default_factory=list)
    unread_bytes: int = 0
    pinned_bytes: int = 0
    since: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.records or self.steps or self.amendments)

    def add_record(self, record: RawRecord) -> None:
        self.records.append(record)
        self.num_bytes += _RECORD_BYTES

    def part_like(self, packed: layouts.Packed) -> int | None:
        """The number of a part that holds the bytes of an ordinary tensor; else its own are remembered.

        What an op returned and what its module returned often differ by no more than a view.
        """
        if packed.encoding or len(packed.parts) != 1:
            return None
        part = packed.parts[0]
        key = (part.dtype, part.numel(), xxhash.xxh3_128_digest(layouts.view_bytes(part)))
        found = self.digests.get(key)
        if found is None:
            self.digests[key] = len(self.parts)
        return found

    def add_rows(self, rows: Sequence[NotedRow]) -> None:
        self.records += rows
        self.num_bytes += _ROW_BYTES * len(rows)


class DataBudget:
    """How many more bytes of data may be stored (`max_bytes`); once refused, always refused.

    Attributes:
      exhausted: a tensor was refused.
    """

    def __init__(self, max_bytes: int | None) -> None:
        self._left = max_bytes
        self.exhausted = False

    def spend(self, num_bytes: int) -> bool:
        """Whether the bytes may be stored; if so they are counted."""
        if self._left is not None and not self.exhausted:
            self.exhausted = num_bytes > self._left
            self._left -= num_bytes
        return not self.exhausted


class ContentTaker:
    """Takes contents into batches; keeps what it must know of earlier ones.

    Attributes:
      num_contents: distinct contents so far.
    """

    def __init__(
        self,
        *,
        stats: tuple[str, ...] | None,
        sketch: bool | str,
        budget: DataBudget,
        drop: Callable[[str, Exception | None], None],
        spent: Spent,
        lane_devices: frozenset[str] = LANE_DEVICES,
    ) -> None:
        """
        Args:
          stats, sketch: as for `TraceWriter`.
          lane_devices: types of devices whose values go through a `DeviceLane`.
          budget: of data, shared by all contents of the rank.
          drop: told why a content is kept without its data.
          spent: takes the snapshots that are done with. It may be told that they are free as soon as no call
            of this is in progress.
        """
        self._stats = stats
        self._sketch = bool(sketch)
        self._is_narrow = sketch == "narrow"
        self._budget = budget
        self._drop = drop
        self._spent = spent
        self._known: dict[bytes, tuple[int, bool]] = {}  # digest -> (id, has data)
        self.num_contents = 0
        self._lane_devices = lane_devices
        self._lanes: dict[torch.device, DeviceLane] = {}
        kernel.find()  # makes the build start, where there is none

    def take(self, content: Content, batch: Batch) -> bool:
        """Gives a content its number and lets its tensor go.

        Returns: the batch now pins the content's memory, until `summarise` or until it is written.
        """
        tensor = content.tensor
        content.tensor = None
        try:
            return self._take(content, tensor, batch)
        finally:
            self._spent.add((tensor,))  # the batch may hold it longer, and adds it again

    def _take(self, content: Content, tensor: Any, batch: Batch) -> bool:
        if isinstance(tensor, Figures):
            stats = {name: tensor.stats.get(name) for name in STATISTICS}
            row = ContentRow(self.num_contents, tensor.dtype, tensor.shape, stats=stats)
            return self._enter(row, content, None, None, batch)
        if tensor.device.type in self._lane_devices and can_summarise(tensor):
            try:
                self._send(content, tensor)
                return content.keep_data
            except Exception as error:  # out of device memory: the other way may still go
                self._drop("statistics not taken on the device", error)
        digest = layouts.plain_digest(tensor)
        known_well = None if digest is None else self._known.get(digest)
        if known_well is not None and (known_well[1] or not content.keep_data):
            content.id = known_well[0]
            return False
        row = ContentRow(self.num_contents, layouts.dtype_name(tensor.dtype), ())
        try:
            if tensor.device.type not in _ABLE_DEVICES:
                tensor = tensor.cpu()
            row.shape = layouts.shape_of(tensor)
            known, packed = self._fill(row, content, tensor, batch, digest)
        except Exception as error:  # operations on a foreign tensor fail in ways of their own
            row = ContentRow(row.id, row.dtype, row.shape)
            known, packed = None, None
            self._drop(f"unreadable {row.dtype} tensor", error)
        return self._enter(row, content, known, packed, batch)

    def _enter(
        self,
        row: ContentRow,
        content: Content,
        known: int | None,
        packed: layouts.Packed | None,
        batch: Batch,
    ) -> bool:
        """Puts the row of a content into the batch, or finds the equal one; returns as `take`."""
        if known is not None:
            content.id = known
            return False
        content.id = row.id
        self.num_contents += 1
        if row.hash:
            self._known[row.hash] = (row.id, packed is not None)
        batch.contents.append(row)
        if packed is None:
            waits = bool(batch.unread) and batch.unread[-1][0] is row
            batch.unread_bytes += content.num_bytes if waits else 0
            return waits
        twin = batch.part_like(packed)
        if twin is not None:
            row.encoding, row.tensor = {"form": "reshaped", "shape": list(row.shape)}, twin
            packed.parts.clear()
        else:
            row.encoding, row.tensor = packed.encoding, len(batch.parts)
        batch.parts += packed.parts
        batch.pinned_bytes += content.num_bytes
        batch.num_bytes += content.num_bytes
        return True

    def _send(self, content: Content, tensor: torch.Tensor) -> None:
        """Has a device work on a content; it comes in with `collect`."""
        lane = self._lanes.get(tensor.device)
        if lane is None:
            lane = self._lanes[tensor.device] = DeviceLane(tensor.device, sketch=self._sketch)
        keep = content.keep_data and not self._budget.exhausted
        lane.add(
            (content, layouts.dtype_name(tensor.dtype), layouts.shape_of(tensor)),
            tensor,
            ready=content.ready,
            keep=keep,
            summarise=content.summarise,
        )

    @property
    def is_away(self) -> bool:
        """Whether contents are on devices, to be fetched by `collect`."""
        return any(self._lanes.values())

    def collect(self, batch: Batch) -> int:
        """Fetches what devices work on into the batch whose records refer to it.

        Returns: bytes of snapshots that the batch does not pin.
        """
        freed = 0
        for lane in self._lanes.values():
            for arrival in lane.collect() if lane else ():
                content, dtype, shape = arrival.key
                row, known, packed = ContentRow(self.num_contents, dtype, shape), None, None
                content.summarise = False
                if arrival.host is not None:
                    known, packed = self._fill(row, content, arrival.host, batch)
                elif content.keep_data:
                    self._drop(OVER_BUDGET, None)
                if arrival.summary is not None and known is None:
                    self._fill_stats(row, arrival.summary, batch)
                pinned = self._enter(row, content, known, packed, batch)
                freed += 0 if pinned or not content.keep_data else content.num_bytes
        return freed

    def _fill(
        self,
        row: ContentRow,
        content: Content,
        tensor: torch.Tensor,
        batch: Batch,
        digest: bytes | None = None,
    ) -> tuple[int | None, layouts.Packed | None]:
        """Fills the row. Returns the number of an equal content if that will do, else the data."""
        keep, budget = content.keep_data, self._budget
        packed = layouts.pack(tensor) if keep and not budget.exhausted else None
        if packed is not None or tensor.device.type == "cpu":
            row.hash = digest or layouts.content_digest(tensor, packed)
            known = self._known.get(row.hash)
            if known is not None and (known[1] or packed is None):
                if keep and not known[1]:
                    self._drop(OVER_BUDGET, None)
                return known[0], None
        if keep and (packed is None or not budget.spend(sum(part.nbytes for part in packed.parts))):
            packed = None
            self._drop(OVER_BUDGET, None)
        if content.summarise:
            self._put_off(row, tensor, batch)
        return None, packed

    def _put_off(self, row: ContentRow, tensor: torch.Tensor, batch: Batch) -> None:
        try:
            batch.unread.append((row, layouts.summary_view(tensor)))
        except Exception as error:  # as in `take`; the data may still be sound
            self._drop(f"no statistics of a {row.dtype} tensor", error)

    def summarise(self, batch: Batch) -> int:
        """Takes the statistics of what was taken, all at once: a call costs more than a small tensor.

        Returns: bytes of snapshots that the batch no longer pins.
        """
        unread, freed = batch.unread, batch.unread_bytes
        batch.unread, batch.unread_bytes = [], 0
        found = accumulate_many(
            [tensor for _, tensor in unread], sketch=self._sketch, names=self._stats, kernel=kernel.find()
        )
        for (row, _), summary in zip(unread, found, strict=True):
            if isinstance(summary, Exception):
                self._drop(f"no statistics of a {row.dtype} tensor", summary)
                continue
            self._fill_stats(row, summary, batch)
        self._spent.add(tensor for _, tensor in unread)
        return freed

    def _fill_stats(self, row: ContentRow, summary: Summary, batch: Batch) -> None:
        row.stats = chosen(summary.stats, self._stats)
        if summary.sketch is not None:
            row.sketch_row = len(batch.sketches)
            batch.sketches.append(narrow(summary.sketch) if self._is_narrow else summary.sketch)
            batch.num_bytes += batch.sketches[-1].nbytes
