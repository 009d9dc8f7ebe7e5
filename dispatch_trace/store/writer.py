"""Writes one rank's part of a trace, in the background.

What it must guarantee:

* `put` costs the program an append; summaries, encoding and disk are the worker thread's. The program
  waits only in `reserve`, while more than `max_pending_bytes` of snapshots (or 2 s of work) are pending.
* A frame is appended after what it refers to is durable; whatever was put is on disk 2 s or 64 MiB later.
* No fault of the recorder reaches the program: what cannot be read or written is counted in the end
  frame and reported through `on_fault`, and the queue is drained on.

How the files look is docs/format.md; what a tensor's bytes look like is `layouts`.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dispatch_trace.errors import CaptureError, TraceExistsError
from dispatch_trace.schema import SCHEMA_VERSION, Content, RawRecord, StepInfo
from dispatch_trace.stats import accumulate
from dispatch_trace.store import layouts
from dispatch_trace.store.columns import pack_plain
from dispatch_trace.store.frames import INDEX_NAME, SHARD_NAME, SegmentWriter
from dispatch_trace.store.records import ContentRow, encode_records
from dispatch_trace.store.shards import ShardTensor, write_shard

BATCH_BYTES = 64 << 20
BATCH_RECORDS = 1 << 14
BATCH_AGE_S = 1.0  # half of what is promised, so that the write itself fits in
QUEUE_RECORDS = 1 << 17
BACKLOG_AGE_S = 1.5
_POLL_S = 0.05
_KICK_BYTES = 16 << 20
_RECORD_BYTES = 256  # a record's share of a batch, for its size bound


@dataclass(slots=True)
class _Batch:
    """What goes to the disk together: at most one shard, the step frames and one records frame."""

    steps: list[StepInfo] = field(default_factory=list)
    records: list[RawRecord] = field(default_factory=list)
    contents: list[ContentRow] = field(default_factory=list)
    sketches: list[np.ndarray[Any, Any]] = field(default_factory=list)
    parts: list[ShardTensor] = field(default_factory=list)
    num_bytes: int = 0
    pinned_bytes: int = 0
    since: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.records or self.steps)


class _Request:
    """Asks the worker to flush; `close` makes it end."""

    __slots__ = ("close", "done")

    def __init__(self, *, close: bool = False) -> None:
        self.close = close
        self.done = threading.Event()


# Writers of this process, so that a fork can switch off the child's copies (their thread is not there).
_live: weakref.WeakSet[TraceWriter] = weakref.WeakSet()


def _forget_writers() -> None:
    for writer in list(_live):
        writer._inert = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_writers)


class TraceWriter:
    """The one way to disk of every capture path. Methods may be called from any thread.

    Attributes:
      path: the trace directory.
      directory: this rank's directory in it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        header: dict[str, Any],
        *,
        rank: int = 0,
        overwrite: bool = False,
        stats: tuple[str, ...] | None = None,
        sketch: bool = True,
        max_bytes: int | None = None,
        max_pending_bytes: int = 512 << 20,
        on_fault: Callable[[Exception], None] | None = None,
    ) -> None:
        """Creates the rank directory, writes the header and starts the worker.

        Args:
          path: the trace directory; made where it is missing.
          header: plain values; `schema_version`, `rank` and `start_time_s` are added.
          rank: number of this process.
          overwrite: remove an earlier trace of this rank first. Other ranks are never touched.
          stats: names of the statistics wanted, None for all.
          sketch: take sketches.
          max_bytes: once this much has been written, data is no longer stored.
          max_pending_bytes: bound on snapshots in memory, see `reserve`.
          on_fault: called from the worker with whatever went wrong, at most once per kind of fault.

        Raises:
          TraceExistsError: the path is taken.
          CaptureError: the directory cannot be made or written.
        """
        self.path = Path(path)
        self.directory = self.path / f"rank{rank}"
        self._stats = stats
        self._sketch = sketch
        self._max_bytes = max_bytes
        self._max_pending_bytes = max_pending_bytes
        self._batch_bytes = min(BATCH_BYTES, max(1, max_pending_bytes // 2))
        self._kick_bytes = min(_KICK_BYTES, max(1, max_pending_bytes // 4))
        self._on_fault = on_fault

        self._queue: deque[tuple[float, RawRecord | StepInfo | _Request]] = deque()
        self._kick = threading.Event()
        self._room = threading.Condition()
        self._pending_bytes = 0
        self._num_waiting = 0
        self._busy = False
        self._batch = _Batch()

        self._known: dict[bytes, tuple[int, bool]] = {}  # hash -> (content id, has data)
        self._num_records = 0
        self._num_contents = 0
        self._num_tensors = 0
        self._num_shards = 0
        self._shard_bytes = 0
        self._dropped: Counter[str] = Counter()
        self._perturbed: list[str] = []
        self._reported: set[str] = set()
        self._storing = True  # False once max_bytes is reached
        self._failed = False  # nothing can be written any more
        self._closed = False
        self._inert = False  # the child of a fork: nobody would drain the queue
        self._aborted = False

        _claim_directory(self.path, self.directory, overwrite=overwrite)
        self._segments = SegmentWriter(self.directory)
        header = {
            "type": "header",
            "schema_version": SCHEMA_VERSION,
            **header,
            "rank": rank,
            "start_time_s": time.time(),
        }
        try:
            self._segments.append(pack_plain(header))
            self._segments.sync()
        except OSError as error:
            raise CaptureError(f"cannot write a trace to {self.directory}: {error}") from error
        self._thread = threading.Thread(target=self._work, name="dispatch_trace writer", daemon=True)
        self._thread.start()
        _live.add(self)
        atexit.register(self._close_at_exit)

    # The program's side -------------------------------------------------------------------------

    def reserve(self, num_bytes: int) -> None:
        """Waits until a snapshot of this size may be taken, and counts it as pending.

        The bytes are released when the content that pins them has been written; what was reserved for
        a snapshot that is never put must be given back by `release`. A single snapshot above the bound
        passes alone.
        """
        if self._inert:
            return
        with self._room:
            if self._must_wait(num_bytes):
                self._num_waiting += 1
                try:
                    while self._must_wait(num_bytes):
                        self._kick.set()
                        self._room.wait(_POLL_S)
                finally:
                    self._num_waiting -= 1
            self._pending_bytes += num_bytes
        if self._pending_bytes > self._kick_bytes:
            self._kick.set()

    def release(self, num_bytes: int) -> None:
        """Gives back what was reserved for a snapshot that will not be put."""
        with self._room:
            self._pending_bytes -= num_bytes
            if self._num_waiting:
                self._room.notify_all()

    def put(self, record: RawRecord) -> None:
        """Hands a record over; it is read by the worker and must not change any more."""
        if self._inert:
            return
        self._queue.append((time.monotonic(), record))
        if len(self._queue) > QUEUE_RECORDS:
            self._wait_for_queue()

    def put_step(self, step: StepInfo) -> None:
        """Hands a step over; a later one with the same number and model replaces it."""
        if not self._inert:
            self._queue.append((time.monotonic(), step))

    def drop(self, reason: str, count: int = 1) -> None:
        """Counts something that should be in the trace and is not; the trace is then not complete."""
        with self._room:
            self._dropped[reason] += count

    def mark_perturbed(self, reason: str) -> None:
        """Notes that recording changed what the program computed."""
        self._perturbed.append(reason)

    def flush(self) -> None:
        """Returns when everything put so far is durable (or has failed to become so)."""
        self._request(_Request())

    def close(self, *, aborted: bool = False) -> None:
        """Writes what is pending and the end frame, and ends the worker. Later calls do nothing.

        Args:
          aborted: the program raised; noted in the end frame.
        """
        if self._closed:
            return
        self._closed = True
        self._aborted = aborted
        atexit.unregister(self._close_at_exit)
        if not self._inert:
            self._request(_Request(close=True))
            self._thread.join()
        self._segments.close()

    @property
    def bytes_written(self) -> int:
        """Bytes in the files of this rank."""
        return self._segments.bytes_written + self._shard_bytes

    @property
    def num_records(self) -> int:
        """Records written."""
        return self._num_records

    @property
    def num_contents(self) -> int:
        """Distinct contents seen."""
        return self._num_contents

    def _must_wait(self, num_bytes: int) -> bool:
        if self._closed or self._inert or not (self._queue or self._batch or self._busy):
            return False  # what is pending has not even been put: waiting would be for ever
        if self._pending_bytes and self._pending_bytes + num_bytes > self._max_pending_bytes:
            return True
        return self._oldest_age_s() > BACKLOG_AGE_S

    def _oldest_age_s(self) -> float:
        since = self._batch.since
        if not since:
            try:
                since = self._queue[0][0]
            except IndexError:
                return 0.0
        return time.monotonic() - since

    def _wait_for_queue(self) -> None:
        with self._room:
            self._num_waiting += 1
            try:
                while len(self._queue) > QUEUE_RECORDS // 2 and self._thread.is_alive():
                    self._kick.set()
                    self._room.wait(_POLL_S)
            finally:
                self._num_waiting -= 1

    def _request(self, request: _Request) -> None:
        if self._inert:
            return
        self._queue.append((time.monotonic(), request))
        self._kick.set()
        while not request.done.wait(0.5):
            if not self._thread.is_alive():
                return

    def _close_at_exit(self) -> None:
        self.close(aborted=True)

    # The worker's side --------------------------------------------------------------------------

    def _work(self) -> None:
        with torch.no_grad():
            while self._drain():
                self._kick.wait(_POLL_S)
                self._kick.clear()

    def _drain(self) -> bool:
        """Works off what is queued; False when asked to end."""
        while True:
            self._busy = True
            try:
                since, item = self._queue.popleft()
            except IndexError:
                if self._batch and (self._num_waiting or time.monotonic() - self._batch.since > BATCH_AGE_S):
                    self._write_batch()
                self._busy = False
                self._wake_waiting()
                return True
            if isinstance(item, _Request):
                self._write_batch()
                if item.close:
                    self._write_end()
                self._busy = False
                item.done.set()
                if item.close:
                    return False
                continue
            batch = self._batch
            if not batch:
                batch.since = since
            if isinstance(item, StepInfo):
                batch.steps.append(item)
            else:
                self._take_record(item)
            if (
                batch.num_bytes >= self._batch_bytes
                or len(batch.records) >= BATCH_RECORDS
                or time.monotonic() - batch.since > BATCH_AGE_S
            ):
                self._write_batch()

    def _wake_waiting(self) -> None:
        if self._num_waiting:
            with self._room:
                self._room.notify_all()

    def _take_record(self, record: RawRecord) -> None:
        batch = self._batch
        for slot in record.slots:
            content = slot.content
            if content is not None and content.id < 0 and content.tensor is not None:
                self._take_content(content)
        batch.records.append(record)
        batch.num_bytes += _RECORD_BYTES

    def _take_content(self, content: Content) -> None:
        """Gives a content its number, and its summary and data a place in the batch."""
        tensor = content.tensor
        row = ContentRow(-1, layouts.dtype_name(tensor.dtype), layouts.shape_of(tensor))
        kept = False
        try:
            kept = self._summarise(content, tensor, row)
        except Exception as error:  # any operation on a foreign tensor may fail in its own way
            self._drop_content(row, f"unreadable {row.dtype} tensor", error)
        if content.id < 0:
            content.id = row.id = self._num_contents
            self._num_contents += 1
            self._batch.contents.append(row)
            if row.hash:
                self._known[row.hash] = (row.id, row.tensor >= 0)
        content.tensor = None
        if kept:
            self._batch.pinned_bytes += content.num_bytes
            self._batch.num_bytes += content.num_bytes
        else:
            self.release(content.num_bytes)

    def _summarise(self, content: Content, tensor: torch.Tensor, row: ContentRow) -> bool:
        """Fills the row, or gives the content the id of an equal one. True when data went into the batch."""
        keep = content.keep_data and self._may_store(content)
        packed = layouts.pack(tensor) if keep else None
        if keep or tensor.device.type == "cpu":
            row.hash = layouts.content_digest(tensor, packed)
            known = self._known.get(row.hash)
            if known is not None and (known[1] or packed is None):
                content.id = known[0]
                return False
        if content.summarise:
            summary = accumulate(layouts.summary_view(tensor), sketch=self._sketch, names=self._stats)
            row.stats = summary.stats
            if summary.sketch is not None:
                row.sketch_row = len(self._batch.sketches)
                self._batch.sketches.append(summary.sketch)
                self._batch.num_bytes += summary.sketch.nbytes
        if packed is None:
            return False
        row.encoding = packed.encoding
        row.tensor = self._num_tensors
        row.shard = self._num_shards
        for part in packed.parts:
            self._batch.parts.append(layouts.shard_tensor(part, self._num_tensors))
            self._num_tensors += 1
        return True

    def _may_store(self, content: Content) -> bool:
        if self._max_bytes is not None and self._storing:
            total = self.bytes_written + self._batch.num_bytes + content.num_bytes
            self._storing = total <= self._max_bytes
        if not self._storing:
            self.drop("data beyond max_bytes")
        return self._storing

    def _drop_content(self, row: ContentRow, reason: str, error: Exception) -> None:
        row.stats, row.encoding = {}, {}
        row.shard = row.tensor = row.sketch_row = -1
        self.drop(reason)
        self._report(reason, error)

    def _report(self, kind: str, error: Exception) -> None:
        if kind in self._reported:
            return
        self._reported.add(kind)
        if self._on_fault is not None:
            self._on_fault(error)

    def _write_batch(self) -> None:
        """Shard, step frames and records frame, in this order; then the snapshots are let go."""
        batch, self._batch = self._batch, _Batch()
        if not batch:
            return
        try:
            if not self._failed:
                self._write_frames(batch)
                self._num_records += len(batch.records)
        except OSError as error:
            self._failed = True
            self._report("write", error)
        if self._failed:
            self.drop("records not written", len(batch.records))
        batch.parts.clear()
        if batch.pinned_bytes:
            self.release(batch.pinned_bytes)

    def _write_frames(self, batch: _Batch) -> None:
        sketch = None
        if batch.sketches:
            table = np.stack(batch.sketches).astype("<f4", copy=False)
            sketch = (self._num_shards, self._num_tensors)
            batch.parts.append(
                ShardTensor(self._num_tensors, "F32", table.shape, 4, memoryview(table).cast("B"))
            )
            self._num_tensors += 1
        if batch.parts:
            info = write_shard(self.directory, self._num_shards, batch.parts)
            self._num_shards += 1
            self._shard_bytes += info.num_bytes
            self._segments.append(
                pack_plain(
                    {
                        "type": "shard",
                        "number": info.number,
                        "file": info.file,
                        "num_bytes": info.num_bytes,
                        "num_tensors": info.num_tensors,
                        "hash": info.hash,
                    }
                )
            )
        for step in batch.steps:
            self._segments.append(
                pack_plain({"type": "step", "step": step.step, "model": step.model, "meta": step.meta})
            )
        if batch.records:
            self._segments.append(encode_records(batch.records, batch.contents, sketch))
        self._segments.sync()

    def _write_end(self) -> None:
        # Tried even after a full disk: the frame is small, and says what is missing.
        try:
            self._segments.append(
                pack_plain(
                    {
                        "type": "end",
                        "num_records": self._num_records,
                        "num_contents": self._num_contents,
                        "num_tensors": self._num_tensors,
                        "num_shards": self._num_shards,
                        "num_bytes": self.bytes_written,
                        "dropped": dict(self._dropped),
                        "perturbed": self._perturbed,
                        "aborted": self._aborted,
                        "end_time_s": time.time(),
                    }
                )
            )
            self._segments.sync()
        except OSError as error:
            self._report("write", error)


def _claim_directory(path: Path, directory: Path, *, overwrite: bool) -> None:
    """Makes the rank directory; removes an earlier trace in it when `overwrite`."""
    if path.exists() and not path.is_dir():
        raise TraceExistsError(f"{path} is a file; a trace is a directory. Give another path.")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        entries = list(directory.iterdir())
        if entries and not overwrite:
            raise TraceExistsError(
                f"{directory} holds a trace already. Pass overwrite=True or give another path."
            )
        for entry in entries:
            name = entry.name.removesuffix(".tmp")
            if INDEX_NAME.fullmatch(name) or SHARD_NAME.fullmatch(name):
                entry.unlink()
    except FileExistsError as error:
        if isinstance(error, TraceExistsError):
            raise
        raise TraceExistsError(f"{directory} is in the way: {error}") from error
    except OSError as error:
        raise CaptureError(f"cannot write a trace to {directory}: {error}") from error
