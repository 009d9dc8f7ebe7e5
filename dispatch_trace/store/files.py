"""The files of one rank as the writer sees them: frames and shards, each durable before it is referred to.

Single-threaded: the disk's thread owns it. Any fault surfaces as OSError and leaves whole frames behind.
"""

from __future__ import annotations

import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from dispatch_trace.errors import CaptureError, TraceExistsError
from dispatch_trace.schema import SCHEMA_VERSION, StepInfo
from dispatch_trace.store import layouts
from dispatch_trace.store.batch import Batch
from dispatch_trace.store.columns import pack_plain
from dispatch_trace.store.frames import INDEX_NAME, SHARD_NAME, SegmentWriter
from dispatch_trace.store.noted import encode_batch
from dispatch_trace.store.remote import RemotePath, RemoteSegments
from dispatch_trace.store.shards import ShardTensor, write_shard


class RankFiles:
    """Writes one rank directory.

    Attributes:
      directory: `rank{N}/` of the trace.
      num_records, num_contents, num_tensors, num_shards: written so far.
    """

    def __init__(self, path: Path, *, rank: int, overwrite: bool, header: dict[str, Any]) -> None:
        """Claims the directory and writes the header.

        Raises:
          TraceExistsError: the path is taken.
          CaptureError: the directory cannot be made or written.
        """
        self.directory = path / f"rank{rank}"
        self.num_records = 0
        self.num_contents = 0
        self.num_tensors = 0
        self.num_shards = 0
        self._shard_bytes = 0
        _claim(path, self.directory, overwrite=overwrite)
        self._segments = (
            RemoteSegments(self.directory)
            if isinstance(self.directory, RemotePath)
            else SegmentWriter(self.directory)
        )
        frame = {
            "type": "header",
            "schema_version": SCHEMA_VERSION,
            "rank": rank,
            "start_time_s": time.time(),
        }
        try:
            self._append(frame | header)
            self._segments.sync()
        except OSError as error:
            raise CaptureError(f"cannot write a trace to {self.directory}: {error}") from error

    @property
    def bytes_written(self) -> int:
        """Bytes in the files so far."""
        return self._segments.bytes_written + self._shard_bytes

    def write_batch(self, batch: Batch) -> None:
        """Amendments, shard, then step frames, then the records frame.

        Raises:
          OSError: not all could be written; what was appended is whole.
        """
        for fields in batch.amendments:
            self._append({"type": "amend", "header": fields})
        sketch = self._write_shard(batch)
        for step in batch.steps:
            self._write_step(step)
        if batch.records:
            self._segments.append(encode_batch(batch.records, batch.contents, sketch))
        self._segments.sync()
        self.num_records += len(batch.records)
        self.num_contents += len(batch.contents)

    def write_end(self, fields: dict[str, Any]) -> None:
        """The last frame.

        Args:
          fields: dropped, perturbed, aborted.
        Raises:
          OSError: it could not be written.
        """
        counts = {
            "num_records": self.num_records,
            "num_contents": self.num_contents,
            "num_tensors": self.num_tensors,
            "num_shards": self.num_shards,
            "num_bytes": self.bytes_written,
            "end_time_s": time.time(),
        }
        self._append({"type": "end"} | counts | fields)
        self._segments.sync()

    def close(self) -> None:
        self._segments.close()

    def _append(self, frame: dict[str, Any]) -> None:
        self._segments.append(pack_plain(frame))

    def _write_step(self, step: StepInfo) -> None:
        self._append({"type": "step", "step": step.step, "model": step.model, "meta": step.meta})

    def _write_shard(self, batch: Batch) -> tuple[int, int, int] | None:
        """Numbers and writes the data of a batch; returns (shard, tensor, crc32) of its sketches."""
        number, first = self.num_shards, self.num_tensors
        for row in batch.contents:
            if row.tensor >= 0:
                row.shard = number
                row.tensor += first
        tensors = [layouts.shard_tensor(part, first + index) for index, part in enumerate(batch.parts)]
        sketch = None
        if batch.sketches:
            table = np.stack(batch.sketches).astype("<f4", copy=False)
            sketch = (number, first + len(tensors), zlib.crc32(table.data))
            tensors.append(ShardTensor(sketch[1], "F32", table.shape, 4, table.view(np.uint8)))
        if not tensors:
            return None
        info = write_shard(self.directory, number, tensors)
        self.num_shards += 1
        self.num_tensors += len(tensors)
        self._shard_bytes += info.num_bytes
        self._append(
            {
                "type": "shard",
                "number": info.number,
                "file": info.file,
                "num_bytes": info.num_bytes,
                "num_tensors": info.num_tensors,
                "hash": info.hash,
            }
        )
        return sketch


def _claim(path: Path, directory: Path, *, overwrite: bool) -> None:
    """Makes the rank directory, or empties it of an earlier trace when `overwrite`."""
    try:
        for taken in (path, directory):
            if taken.exists() and not taken.is_dir():
                raise TraceExistsError(f"{taken} is a file; a trace is a directory. Give another path.")
        directory.mkdir(parents=True, exist_ok=True)
        entries = list(directory.iterdir())
        if entries and not overwrite:
            raise TraceExistsError(
                f"{directory} is not empty: it holds {entries[0].name}. "
                "Pass overwrite=True or give another path."
            )
        for entry in entries:
            name = entry.name.removesuffix(".tmp")
            if INDEX_NAME.fullmatch(name) or SHARD_NAME.fullmatch(name):
                entry.unlink()
    except TraceExistsError:
        raise
    except OSError as error:
        raise CaptureError(f"cannot write a trace to {directory}: {error}") from error
