"""Writes one rank's part of a trace, in the background.

What it must guarantee:

* `put` costs the program an append; hashes and summaries are the worker thread's, encoding and files those
  of a second one (`disk`), so that a batch is put together while the one before it is written. The program
  waits only in `reserve`, while more than `max_pending_bytes` of snapshots are pending or the worker is more
  than `BACKLOG_AGE_S` behind.
* A frame is appended after what it refers to is durable; what was put is on disk 2 s or 64 MiB later.
* No fault of the recorder reaches the program: what cannot be read or written is counted in the end
  frame and reported through `on_fault`, and the queue is drained on.

How the files look is docs/format.md; `batch` and `files` are the two halves of the work, one a thread.

The worker's Python code holds the interpreter lock that the program needs after every op, so it costs
the program about what it costs itself. Hence: no wake-up per record (the worker looks every 50 ms, or
earlier when asked), and all that is heavy runs in calls that let go of the lock.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from dispatch_trace.schema import Content, LaterRecord, NotedRow, RawRecord, StepInfo
from dispatch_trace.store.batch import Batch, ContentTaker, DataBudget
from dispatch_trace.store.disk import Disk
from dispatch_trace.store.files import RankFiles
from dispatch_trace.store.remote import place
from dispatch_trace.store.spent import Spent

BATCH_BYTES = 64 << 20
BATCH_RECORDS = 1 << 13
UNREAD_BYTES = 4 << 20  # of snapshots whose statistics are taken together
UNREAD_CONTENTS = 1 << 8
BATCH_AGE_S = 1.0  # half of what is promised, so that the write itself fits in
BATCH_GAP_S = 0.25  # but no oftener, or a worker that is behind would write frames of one record
QUEUE_RECORDS = 1 << 15
BACKLOG_AGE_S = 1.5
_ROWS_TOGETHER = 64
_POLL_S = 0.05
_KICK_BYTES = 16 << 20
_REST_BYTES = 4 << 20
_REST_S = 0.6


class _Request:
    """Asks the worker to flush, or to end."""

    __slots__ = ("close", "done")

    def __init__(self, *, close: bool) -> None:
        self.close = close
        self.done = threading.Event()


class _Amendment:
    """Fields for the header that were learnt late."""

    __slots__ = ("fields",)

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields


_Item = RawRecord | LaterRecord | list[NotedRow] | StepInfo | _Request | _Amendment


class RowSource(Protocol):
    """Notes rows for the worker to fetch, so that the program need not hand them over.

    Attributes:
      rows: noted and not taken.
      num_taken: rows taken so far.
      last: number of the last record noted.
    """

    rows: list[NotedRow]
    num_taken: int
    last: int

    def move_rows(self, put: Callable[[list[NotedRow]], None]) -> None:
        """Gives them to `put`, if there are any; from any thread, and one after the other."""


# Writers of this process, so that a fork can switch off the child's copies: their thread is not there.
_live: weakref.WeakSet[TraceWriter] = weakref.WeakSet()


def _switch_off_in_child() -> None:
    for writer in list(_live):
        writer._switch_off()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_switch_off_in_child)


class TraceWriter:
    """The one way to disk of every capture path. Methods may be called from any thread.

    Attributes:
      path: the trace directory.
      directory: this rank's directory in it.
      sources: of rows, looked at by the worker.
      max_pending_bytes: bound on snapshots in memory.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        header: dict[str, Any],
        *,
        rank: int = 0,
        overwrite: bool = False,
        stats: tuple[str, ...] | None = None,
        sketch: bool | str = True,
        max_bytes: int | None = None,
        max_pending_bytes: int = 512 << 20,
        on_fault: Callable[[Exception], None] | None = None,
    ) -> None:
        """Creates the rank directory, writes the header and starts the worker.

        Args:
          path: the trace directory, or a URL (`remote`); made where it is missing.
          header: plain values; `schema_version`, `rank` and `start_time_s` are added.
          rank: number of this process.
          overwrite: remove an earlier trace of this rank first. Other ranks are never touched.
          stats: names of the statistics wanted, None for all.
          sketch: take sketches; "narrow" for ones of a quarter of their size.
          max_bytes: of data; the tensor that would pass it and all later ones are stored without.
          max_pending_bytes: bound on snapshots in memory, see `reserve`.
          on_fault: called on the worker's thread with what went wrong, once per kind of fault.

        Raises:
          TraceExistsError: the path is taken.
          CaptureError: the directory cannot be made or written.
        """
        self.path = place(path)
        self.max_pending_bytes = max_pending_bytes
        self._batch_bytes = min(BATCH_BYTES, max(1, max_pending_bytes // 2))
        self._kick_bytes = min(_KICK_BYTES, max(1, max_pending_bytes // 4))
        self._on_fault = on_fault

        self._queue: deque[tuple[float, _Item]] = deque()
        self.sources: list[RowSource] = []
        self._num_rows = 0  # queued ones
        self._fetched_at = time.monotonic()
        self._kick = threading.Event()
        self._room = threading.Condition()  # guards the counters that both sides change
        self._pending_bytes = 0
        self._num_waiting = 0
        self._busy = False
        self._batch = Batch()
        self._written_at = 0.0
        self._dropped: Counter[str] = Counter()
        self._perturbed: list[str] = []
        self._reported: set[str] = set()
        self._failed = False  # nothing can be written any more
        self._accepting = True
        self._aborted = False

        self._files = RankFiles(self.path, rank=rank, overwrite=overwrite, header=header)
        self.directory = self._files.directory
        self._opener = threading.get_ident()
        self._spent, self._written = Spent(), Spent()  # of the worker's thread, of the disk's
        self._taker = ContentTaker(
            stats=stats,
            sketch=sketch,
            budget=DataBudget(max_bytes),
            drop=self._drop_data,
            spent=self._spent,
        )
        self._disk = Disk(self._write_out)
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
        if not self._accepting:
            return
        self._let_go()
        with self._room:
            if self._must_wait(num_bytes):
                self._num_waiting += 1
                try:
                    while self._must_wait(num_bytes):
                        self._kick.set()
                        self._room.wait(_POLL_S)
                        self._let_go()
                finally:
                    self._num_waiting -= 1
            self._pending_bytes += num_bytes
        if self._pending_bytes > self._kick_bytes:
            self._kick.set()

    def _let_go(self) -> None:
        """Gives up the snapshots that are done with, in the thread whose tensors they share memory with."""
        if self.is_opener():
            self._spent.drop()
            self._written.drop()

    def is_opener(self) -> bool:
        """Whether this thread made the writer: there snapshots are given up, see `spent`."""
        return threading.get_ident() == self._opener

    def release(self, num_bytes: int) -> None:
        """Gives back what was reserved for a snapshot that will not be put."""
        if not self._accepting:
            return
        with self._room:
            self._pending_bytes -= num_bytes
            if self._num_waiting:
                self._room.notify_all()

    def put(self, record: RawRecord | LaterRecord) -> None:
        """Hands a record over; the worker reads it later, so it must not change any more."""
        if self._accepting:
            self._queue.append((time.monotonic(), record))
            if len(self._queue) > QUEUE_RECORDS:
                self._wait_for_queue()

    def put_rows_of(self, source: RowSource) -> None:
        """Hands over what a source has noted, which nobody changes any more."""
        if self._accepting:
            self._move_rows(source, time.monotonic())
            if self._num_rows > QUEUE_RECORDS:
                self._wait_for_queue()

    def _move_rows(self, source: RowSource, since: float) -> None:
        """Queues them behind what was put before: the source lets nobody else put its rows meanwhile."""

        def put(rows: list[NotedRow]) -> None:
            with self._room:
                self._num_rows += len(rows)
            self._queue.append((since, rows))

        source.move_rows(put)

    def put_step(self, step: StepInfo) -> None:
        """Hands a step over; a later one with the same number and model replaces it."""
        if self._accepting:
            self._queue.append((time.monotonic(), step))
            self._let_go()

    def amend_header(self, fields: dict[str, Any]) -> None:
        """Adds fields to the header, or replaces them, once more is known."""
        if self._accepting:
            self._queue.append((time.monotonic(), _Amendment(fields)))

    def drop(self, reason: str, count: int = 1) -> None:
        """Counts something that should be in the trace and is not; the trace is then not complete."""
        if self._accepting or self._thread.is_alive():
            with self._room:
                self._dropped[reason] += count

    def mark_perturbed(self, reason: str) -> None:
        """Notes that recording changed what the program computed."""
        self._perturbed.append(reason)

    def flush(self) -> None:
        """Returns when everything put so far is durable (or has failed to become so)."""
        if self._accepting:
            self._request(_Request(close=False))
            self._let_go()

    def close(self, *, aborted: bool = False) -> None:
        """Writes what is pending and the end frame, and ends the worker. Later calls do nothing.

        Args:
          aborted: the program raised; noted in the end frame.
        """
        if not self._accepting:
            return
        self._accepting = False
        self._aborted = aborted
        atexit.unregister(self._close_at_exit)
        self._request(_Request(close=True))
        self._thread.join()
        self._let_go()
        self._files.close()

    @property
    def bytes_written(self) -> int:
        """Bytes in the files of this rank."""
        return self._files.bytes_written

    @property
    def num_records(self) -> int:
        """Records written."""
        return self._files.num_records

    @property
    def num_contents(self) -> int:
        """Distinct contents taken from the queue."""
        return self._taker.num_contents

    def _must_wait(self, num_bytes: int) -> bool:
        if not self._accepting or not (
            self._queue or self._batch or self._busy or self._disk.busy or self._has_rows()
        ):
            return False  # what is pending has not even been put: waiting would be for ever
        if self._pending_bytes and self._pending_bytes + num_bytes > self.max_pending_bytes:
            return True
        return self._age_s() > BACKLOG_AGE_S

    def _has_rows(self) -> bool:
        return any(source.rows for source in self.sources[:])

    def _age_s(self) -> float:
        """Age of the oldest that is not written, at least."""
        since = self._batch.since
        if not since:
            try:
                since = self._queue[0][0]
            except IndexError:
                if not self._has_rows():
                    return 0.0
                since = self._fetched_at
        return time.monotonic() - since

    def _wait_for_queue(self) -> None:
        with self._room:
            self._num_waiting += 1
            try:
                while self._accepting and len(self._queue) + self._num_rows > QUEUE_RECORDS // 2:
                    self._kick.set()
                    self._room.wait(_POLL_S)
            finally:
                self._num_waiting -= 1

    def _request(self, request: _Request) -> None:
        self._queue.append((time.monotonic(), request))
        self._kick.set()
        while not request.done.wait(0.5) and self._thread.is_alive():
            pass

    def _close_at_exit(self) -> None:
        self.close(aborted=True)

    def _switch_off(self) -> None:
        """In the child of a fork: nothing more is taken, and the parent's files are left alone."""
        self._accepting = False
        self._queue.clear()
        atexit.unregister(self._close_at_exit)

    # The worker's side --------------------------------------------------------------------------

    def _work(self) -> None:
        _compute_on_one_core()
        # NumPy's warnings (per thread) are no business of a program that runs with warnings as errors.
        with torch.no_grad(), np.errstate(all="ignore"):
            while True:
                try:
                    if not self._drain():
                        return
                except Exception as error:  # one bad record must not leave the program waiting for room
                    self.drop(f"fault of the writer: {type(error).__name__}")
                    self._report("writer", error)
                    continue
                while not self._kick.wait(_POLL_S) and self._may_rest():
                    pass
                self._kick.clear()

    def _may_rest(self) -> bool:
        """Whether what is queued can wait: little of it, not old, and all of it Python work.

        Working it off at once would take the interpreter lock from the program in between its ops.
        """
        return (
            self._pending_bytes < _REST_BYTES
            and len(self._queue) < BATCH_RECORDS
            and not self._batch
            and not self._num_waiting
            and self._age_s() < _REST_S
            and (not self.sources or self._sources_may_rest())
        )

    def _sources_may_rest(self) -> bool:
        num_rows = sum(len(source.rows) for source in self.sources[:])
        return num_rows < BATCH_RECORDS and time.monotonic() - self._fetched_at < _REST_S

    def _fetch(self) -> None:
        """Takes what the sources have noted; none of it is older than the last time."""
        since, self._fetched_at = self._fetched_at, time.monotonic()
        for source in self.sources[:]:
            self._move_rows(source, since)

    def _take_rows(self, rows: list[NotedRow], since: float) -> None:
        with self._room:
            self._num_rows -= len(rows)
        for start in range(0, len(rows), _ROWS_TOGETHER):
            if not self._batch:
                self._batch.since = since
            part = rows[start : start + _ROWS_TOGETHER]
            self._take_contents([facts[4] for row in part for facts in row[6] or ()])
            self._batch.add_rows(part)
            self._after_taking()

    def _drain(self) -> bool:
        """Works off what is queued; False when asked to end."""
        self._busy = True
        try:
            self._fetch()
            while True:
                try:
                    since, item = self._queue.popleft()
                except IndexError:
                    break
                if isinstance(item, _Request):
                    self._answer(item)
                    if item.close:
                        return False
                    continue
                if not self._batch:
                    self._batch.since = since
                self._take(item)
                if self._taker.is_away and (self._num_waiting or isinstance(item, StepInfo)):
                    self._free(self._taker.collect(self._batch))  # one transfer a step
                self._after_taking()
            if self._batch.unread:
                self._free(self._taker.summarise(self._batch))
            if self._batch and (self._num_waiting or self._is_due()):
                self._write_batch()
        finally:
            self._busy = False
            if self._num_waiting:
                with self._room:
                    self._room.notify_all()
        return True

    def _is_due(self) -> bool:
        now = time.monotonic()
        return now - self._batch.since > BATCH_AGE_S and now - self._written_at > BATCH_GAP_S

    def _take(self, item: RawRecord | LaterRecord | list[NotedRow] | StepInfo | _Amendment) -> None:
        if isinstance(item, RawRecord):
            self._take_record(item)
        elif isinstance(item, list):
            self._take_rows(item, self._batch.since)
        elif isinstance(item, tuple):
            self._take_record(item[0](*item[1:]))
        elif isinstance(item, StepInfo):
            self._batch.steps.append(item)
        else:
            self._batch.amendments.append(item.fields)

    def _after_taking(self) -> None:
        """Takes statistics, and writes, as soon as there is enough for it."""
        batch = self._batch
        if batch.unread_bytes >= UNREAD_BYTES or len(batch.unread) >= UNREAD_CONTENTS:
            self._free(self._taker.summarise(batch))
        if batch.num_bytes >= self._batch_bytes or len(batch.records) >= BATCH_RECORDS or self._is_due():
            self._write_batch()

    def _take_record(self, record: RawRecord) -> None:
        self._take_contents([slot.content for slot in record.slots])
        self._batch.add_record(record)

    def _take_contents(self, contents: list[Content | None]) -> None:
        freed = 0
        for content in contents:
            if content is None or content.tensor is None:
                continue
            if not self._taker.take(content, self._batch):
                freed += content.num_bytes
        self._free(freed)

    def _answer(self, request: _Request) -> None:
        try:
            self._write_batch()
            self._disk.wait()
            if request.close:
                self._write_end()
                self._disk.end()
        finally:
            request.done.set()

    def _write_batch(self) -> None:
        """Hands the batch to the disk; waits where that is still busy with the one before."""
        batch, self._batch = self._batch, Batch()
        if not batch:
            return
        try:
            self._free(self._taker.collect(batch) + self._taker.summarise(batch))
        finally:
            self._disk.put(batch)

    def _write_out(self, batch: Batch) -> None:
        """On the disk's thread."""
        try:
            if self._failed:
                self.drop("records not written", len(batch.records))
            else:
                self._files.write_batch(batch)
        except Exception as error:
            # A full disk stays full, so nothing more is tried; a batch that cannot be encoded is lost alone.
            self._failed = isinstance(error, OSError)
            self.drop("records not written", len(batch.records))
            self._report("write", error)
        finally:
            self._written_at = time.monotonic()
            self._written.add(batch.parts)
            batch.parts.clear()
            self._written.free()
            self._release(batch.pinned_bytes)

    def _write_end(self) -> None:
        fields = {"dropped": dict(self._dropped), "perturbed": self._perturbed, "aborted": self._aborted}
        try:
            # Tried even when the disk was full: the frame is small, and says what is missing.
            self._files.write_end(fields)
        except OSError as error:
            self._report("write", error)

    def _free(self, num_bytes: int) -> None:
        """After each call of the taker: what it is done with may be given up, and other snapshots taken."""
        self._spent.free()
        self._release(num_bytes)

    def _release(self, num_bytes: int) -> None:
        if num_bytes:
            with self._room:
                self._pending_bytes -= num_bytes
                if self._num_waiting:
                    self._room.notify_all()

    def _drop_data(self, reason: str, error: Exception | None) -> None:
        self.drop(reason)
        if error is not None:
            self._report(reason, error)

    def _report(self, kind: str, error: Exception) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            if self._on_fault is not None:
                with contextlib.suppress(Exception):  # there is nobody left to tell
                    self._on_fault(error)


def _compute_on_one_core() -> None:
    """Keeps torch's operations on this thread from competing for the cores that the program computes on.

    `torch.set_num_threads` would change the whole process, and with it the program's results; OpenMP's own
    count is one per thread. Where there is no such function the count stays as it is.
    """
    torch.get_num_threads()  # torch sets a thread's count when it is first asked for; ours must come after
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).omp_set_num_threads(1)
