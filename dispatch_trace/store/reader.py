"""Reads one rank's part of a trace, torch-free until a tensor is asked for.

What it must guarantee: opening decodes no records (an index of a million records opens in about the
time its checksums take); what is whole stays readable, what is not is listed in `problems`; names in a
trace are data and never become paths, but for file names that match the patterns of `frames`.
"""

from __future__ import annotations

import bisect
import math
import os
import re
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

from dispatch_trace.errors import NotATraceError, NotExecutableError, SchemaVersionError, TraceFormatError
from dispatch_trace.schema import SCHEMA_VERSION, StepInfo, StoredContent, StoredRecord
from dispatch_trace.store.dtypes import BYTES_NUMPY, SHARD_DTYPES, array_from_bytes, torch_type
from dispatch_trace.store.frames import SHARD_NAME, SegmentScan, list_segments, shard_name
from dispatch_trace.store.mapped import Mapped, hash_of
from dispatch_trace.store.records import RecordsFrame
from dispatch_trace.store.remote import place
from dispatch_trace.store.shards import Shard, hash_file
from dispatch_trace.store.singly import Singly

if TYPE_CHECKING:
    import torch

_RANK_NAME = re.compile(r"rank(\d+)")
_CACHED_FRAMES = 16


def open_ranks(path: str | os.PathLike[str]) -> list[RankReader]:
    """The ranks of a trace, in order. A single rank's directory is taken as well.

    Raises:
      NotATraceError: the path does not exist, or holds no rank with an index.
      TraceFormatError: a rank has no readable header.
      SchemaVersionError: it was written by a newer version of this package.
    """
    root = place(path)
    try:
        exists = root.exists()
    except OSError as error:  # of a server, say
        raise NotATraceError(f"{root} cannot be reached: {error}") from error
    if not exists:
        raise NotATraceError(f"{root} does not exist")
    if not root.is_dir():
        raise NotATraceError(f"{root} is a file; a trace is a directory with rank0/ in it")
    if list_segments(root) and (match := _RANK_NAME.fullmatch(root.resolve().name)):
        return [RankReader(root, int(match[1]))]
    numbered = [
        (int(match[1]), entry) for entry in root.iterdir() if (match := _RANK_NAME.fullmatch(entry.name))
    ]
    ranks = [(rank, entry) for rank, entry in sorted(numbered) if entry.is_dir() and list_segments(entry)]
    if not ranks:
        raise NotATraceError(
            f"{root} is no trace: it holds no rank directory with an index (rank0/index-00000.msgpack)"
        )
    readers = [RankReader(entry, rank) for rank, entry in ranks]
    for _, entry in sorted(numbered):
        if not any(reader.path == entry for reader in readers):
            readers[0].problems.append(f"{entry.name} has no index")
    return readers


class _FrameEntry:
    """Where a records frame lies, and which records and contents it holds."""

    __slots__ = (
        "first_content",
        "first_seq",
        "last_seq",
        "length",
        "num_contents",
        "num_records",
        "offset",
        "path",
    )

    def __init__(self, path: Path, offset: int, length: int, frame: dict[str, Any]) -> None:
        self.path = path
        self.offset = offset
        self.length = length
        self.num_records: int = frame["num_records"]
        self.num_contents: int = frame["num_contents"]
        self.first_content: int = frame["first_content"]
        self.first_seq: int = frame["first_seq"]
        self.last_seq: int = frame["last_seq"]


class RankReader(Singly):
    """One rank of a trace.

    Attributes:
      path: the rank's directory.
      rank: its number.
      header: the header frame.
      end: the end frame, None when the trace was never closed.
      problems: what is wrong with the files, in words; empty when nothing is.
      steps: the steps, by number and model.
      num_records, num_contents: how many can be read.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        self.rank = rank
        self.header: dict[str, Any] = {}
        self.end: dict[str, Any] | None = None
        self.problems: list[str] = []
        self._entries: list[_FrameEntry] = []
        self._shards: dict[int, dict[str, Any]] = {}
        self._opened: dict[int, Shard] = {}
        self._frames: OrderedDict[int, RecordsFrame] = OrderedDict()
        self._sketches: dict[int, np.ndarray[Any, Any]] = {}
        self._sound: set[int] = set()  # contents whose data was found to be what its hash says
        steps: dict[tuple[int, str], StepInfo] = {}
        for number, segment in enumerate(list_segments(path)):
            if segment.name != f"index-{number:05d}.msgpack":
                self.problems.append(f"index-{number:05d}.msgpack is missing")
                break
            try:
                self._scan(segment, steps)
            except OSError as error:
                self.problems.append(f"{segment.name} cannot be read: {error.strerror}")
        if not self.header:
            raise TraceFormatError(
                f"{path} has no readable header: {'; '.join(self.problems) or 'no frames'}"
            )
        self._model_names = _model_names(self.header)
        named = [
            replace(step, model=self._model_names.get(step.model, step.model)) for step in steps.values()
        ]
        self.steps = sorted(named, key=lambda step: (step.step, step.model))
        self.num_records = sum(entry.num_records for entry in self._entries)
        self.num_contents = sum(entry.num_contents for entry in self._entries)
        self._by_content = sorted(
            (entry.first_content, index) for index, entry in enumerate(self._entries) if entry.num_contents
        )
        self._check_shards()

    def __repr__(self) -> str:
        state = "complete" if self.complete else "closed" if self.closed else "open"
        return f"RankReader({str(self.path)!r}, rank {self.rank}, {self.num_records} records, {state})"

    @property
    def closed(self) -> bool:
        """The trace has its end frame."""
        return self.end is not None

    @property
    def complete(self) -> bool:
        """Closed, nothing dropped, nothing wrong with the files."""
        return self.end is not None and not self.end.get("dropped") and not self.problems

    @property
    def num_bytes(self) -> int:
        """Size of this rank's files."""
        return sum(file.stat().st_size for file in self.path.iterdir() if file.is_file())

    # Records --------------------------------------------------------------------------------------

    def records(self, **where: Any) -> Iterator[StoredRecord]:
        """The records in the order of writing.

        Args:
          where: values that columns of the record must equal (kind, step, model, grad_phase, module,
            call, op, n, overload, name, note, seq, producer, opened, thread); checked before records are
            built.
        """
        for index in range(len(self._entries)):
            frame = self._frame(index)
            yield from frame.records(frame.rows(where))

    def record(self, seq: int) -> StoredRecord:
        """The record with this sequence number.

        Raises:
          KeyError: there is none.
        """
        for index, entry in enumerate(self._entries):
            if entry.first_seq <= seq <= entry.last_seq:
                frame = self._frame(index)
                row = frame.row_of(seq)
                if row is not None:
                    return frame.record(row)
        raise KeyError(f"rank {self.rank} holds no record {seq}")

    # Contents -------------------------------------------------------------------------------------

    def content(self, id: int) -> StoredContent:
        """What is known of a content.

        Raises:
          KeyError: there is none with this number.
        """
        return self._frame_of(id).content(id)

    def has_hash(self, id: int) -> bool:
        """Whether a hash of a content was taken."""
        return bool(self.content(id).hash)

    def contents(self) -> Iterator[StoredContent]:
        """All contents in the order of writing."""
        for index, entry in enumerate(self._entries):
            frame = self._frame(index)
            for offset in range(entry.num_contents):
                yield frame.content(entry.first_content + offset)

    def sketch(self, id: int) -> np.ndarray[Any, Any] | None:
        """[k] float32, or None where none was taken.

        Raises:
          TraceFormatError: the shard that holds it is missing or corrupt.
        """
        frame = self._frame_of(id)
        row = frame.sketch_row(id)
        if row < 0 or frame.sketch is None:
            return None
        table = self._sketch_table(*frame.sketch)
        if row >= len(table):
            raise TraceFormatError(f"{self.path}: content {id} has no row in its table of sketches")
        sketch: np.ndarray[Any, Any] = table[row].copy()
        return sketch

    def sketch_table(self, place: tuple[int, int, int] | None) -> np.ndarray[Any, Any]:
        """[m, k] float32: the sketches of a frame, from where its `sketch` says that they lie.

        Raises:
          TraceFormatError: the shard that holds them is missing or corrupt, or there is none.
        """
        if place is None:
            raise TraceFormatError(f"{self.path}: a frame has contents with sketches, and no table of them")
        return self._sketch_table(*place)

    def frames(self) -> Iterator[RecordsFrame]:
        """The frames of records and contents, in the order of writing.

        Raises:
          TraceFormatError: one cannot be read.
        """
        return map(self._frame, range(len(self._entries)))

    @property
    def model_names(self) -> dict[str, str]:
        """Models by the names that they got after some records had been written."""
        return self._model_names

    def array(self, id: int) -> np.ndarray[Any, Any] | None:
        """The data as NumPy has it (bfloat16 widened to float32), without torch.

        Returns: None without data, and for dtypes and layouts that NumPy lacks. Read-only when expanded.
        Raises:
          TraceFormatError: the shard that holds it is missing or corrupt.
        """
        frame = self._frame_of(id)
        content = frame.content(id)
        if not content.has_data:
            return None
        encoding, core_shape = content.encoding, content.shape
        shard_number, number = frame.place(id)
        shard = self._shard(shard_number)
        expanded = encoding.get("form") == "expanded"
        if expanded:
            encoding = encoding["of"]
            core_shape = tuple(encoding["shape"]) if encoding else shard.entry(number)[1]
        form = encoding.get("form")
        if form not in (None, "bytes", "reshaped") or (form == "bytes" and content.dtype not in BYTES_NUMPY):
            return None
        data = shard.read(number)
        if not expanded:
            hasher = hash_of(content.dtype, content.shape)
            hasher.update(data)
            self._check_hash(content, hasher.hexdigest(), shard)
        try:
            array = array_from_bytes(data, content.dtype, core_shape)
        except ValueError as error:
            raise TraceFormatError(f"{shard.path}: content {id} cannot be read: {error}") from error
        return np.broadcast_to(array, content.shape) if expanded and array is not None else array

    def mapped(self, id: int) -> Mapped | None:
        """The data as it lies in the shard, None where it is not there, or not in this form.

        Raises:
          TraceFormatError: the shard that holds it is missing or corrupt.
        """
        frame = self._frame_of(id)
        content = frame.content(id)
        entry = SHARD_DTYPES.get(content.dtype)
        if not content.has_data or entry is None or content.encoding.get("form") not in (None, "reshaped"):
            return None
        shard_number, number = frame.place(id)
        shard = self._shard(shard_number)
        data = shard.map_bytes(number)
        if data.size != math.prod(content.shape) * entry.itemsize:
            raise TraceFormatError(f"{shard.path}: content {id} has {data.size} bytes")
        return Mapped(
            dtype=content.dtype,
            shape=content.shape,
            data=data,
            hash="" if id in self._sound else content.hash,
            where=f"{shard.path}, content {id}",
            sound=partial(self._sound.add, id),
        )

    def tensor(self, id: int) -> torch.Tensor:
        """The data, bit-exact, in its dtype and layout, on the CPU. Imports torch.

        Raises:
          NotExecutableError: no data was kept.
          TraceFormatError: the shard that holds it is missing or corrupt.
        """
        from dispatch_trace.store.layouts import content_hash
        from dispatch_trace.store.unpack import empty_part, num_parts, unpack

        frame = self._frame_of(id)
        content = frame.content(id)
        if not content.has_data:
            raise NotExecutableError(
                f"content {id} ({content.dtype} {list(content.shape)}) was recorded without data. "
                "Record with save='tensors' or, for leaves, save='leaves'."
            )
        shard_number, number = frame.place(id)
        shard = self._shard(shard_number)
        parts = []
        for offset in range(num_parts(content.encoding)):
            dtype, shape, num_bytes = shard.entry(number + offset)
            part, memory = empty_part(*torch_type(dtype, shape), num_bytes)
            shard.read_into(number + offset, memory)
            parts.append(part)
        tensor = unpack(parts, content.encoding)
        self._check_hash(content, content_hash(tensor), shard)
        return tensor

    # Soundness ------------------------------------------------------------------------------------

    def verify(self) -> list[str]:
        """Everything that is wrong with the files: frames, records, shards, hashes of all data, counts.

        Returns: problems in words, empty when the trace is sound. An unclosed trace is a problem.
        """
        problems = list(self.problems)
        if self.end is None:
            problems.append("no end frame: the trace was not closed")
        for number, info in sorted(self._shards.items()):
            try:
                self._shard(number)
                if hash_file(self.path / info["file"]) != info["hash"]:
                    problems.append(f"{info['file']} is corrupt: its bytes do not match the index")
            except (TraceFormatError, OSError) as error:
                problems.append(str(error))
        for index in range(len(self._entries)):
            problems += self._verify_frame(index)
        if self.end is not None:
            for key, count in (("num_records", self.num_records), ("num_contents", self.num_contents)):
                if self.end.get(key) != count:
                    problems.append(f"the end frame counts {key}={self.end.get(key)}; {count} can be read")
        return list(dict.fromkeys(problems))

    def _verify_frame(self, index: int) -> list[str]:
        problems = []
        entry = self._entries[index]
        try:
            frame = self._frame(index)
            for record in frame.records(range(entry.num_records)):
                for slot in record.slots:
                    if slot.content >= 0:
                        self._frame_of(slot.content)
        except (TraceFormatError, KeyError) as error:
            problems.append(f"{entry.path.name}, frame at byte {entry.offset}: {error}")
        for id in range(entry.first_content, entry.first_content + entry.num_contents):
            try:
                self.sketch(id)
                if self.content(id).has_data:
                    self.tensor(id)
            except (TraceFormatError, KeyError) as error:
                problems.append(str(error))
        return problems

    # Files ----------------------------------------------------------------------------------------

    def _scan(self, segment: Path, steps: dict[tuple[int, str], StepInfo]) -> None:
        scan = SegmentScan(segment)
        for offset, length, payload in scan:
            try:
                frame = msgpack.unpackb(payload, strict_map_key=False)
                self._take_frame(segment, offset, length, frame, steps)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                if isinstance(error, SchemaVersionError):
                    raise
                self.problems.append(f"{segment.name}: the frame at byte {offset} cannot be read ({error})")
        self.problems += scan.problems

    def _take_frame(
        self,
        segment: Path,
        offset: int,
        length: int,
        frame: dict[str, Any],
        steps: dict[tuple[int, str], StepInfo],
    ) -> None:
        kind = frame["type"]
        if kind == "header":
            version = frame["schema_version"]
            if version > SCHEMA_VERSION:
                raise SchemaVersionError(
                    f"{self.path} has schema version {version}; this package reads up to {SCHEMA_VERSION}. "
                    "Upgrade dispatch_trace."
                )
            self.header = frame
        elif kind == "amend":
            self.header |= frame["header"]
        elif kind == "records":
            self._entries.append(_FrameEntry(segment, offset, length, frame))
        elif kind == "shard":
            if not SHARD_NAME.fullmatch(frame["file"]):
                raise TraceFormatError(f"{frame['file']!r} is no name of a shard")
            self._shards[frame["number"]] = frame
        elif kind == "step":
            step = StepInfo(step=frame["step"], model=frame["model"], meta=frame["meta"])
            steps[(step.step, step.model)] = step
        elif kind == "end":
            self.end = frame

    def _check_shards(self) -> None:
        for info in self._shards.values():
            try:
                size = (self.path / info["file"]).stat().st_size
            except OSError:
                self.problems.append(f"{info['file']} is missing")
                continue
            if size != info["num_bytes"]:
                self.problems.append(f"{info['file']} has {size} bytes; the index says {info['num_bytes']}")

    def _shard(self, number: int) -> Shard:
        shard = self._opened.get(number)
        if shard is None:
            info = self._shards.get(number)
            if info is not None:
                shard = Shard(self.path / info["file"], info["num_bytes"])
            else:  # the frame that lists it is lost; hashes of the contents still guard what is in it
                shard = Shard(self.path / shard_name(number))
            self._opened[number] = shard
        return shard

    def _sketch_table(self, shard_number: int, number: int, checksum: int) -> np.ndarray[Any, Any]:
        table = self._sketches.get(number)
        if table is None:
            shard = self._shard(shard_number)
            table = shard.map_floats(number)
            if zlib.crc32(table.data) != checksum:
                raise TraceFormatError(f"{shard.path} is corrupt: its sketches do not match the index")
            self._sketches[number] = table
        return table

    def _check_hash(self, content: StoredContent, found: str, shard: Shard) -> None:
        if content.hash and found != content.hash:
            raise TraceFormatError(f"{shard.path} is corrupt: content {content.id} does not match its hash")

    def _frame(self, index: int) -> RecordsFrame:
        frame = self._frames.get(index)
        if frame is not None:
            self._frames.move_to_end(index)
            return frame
        entry = self._entries[index]
        try:
            with entry.path.open("rb") as file:
                file.seek(entry.offset)
                frame = RecordsFrame(
                    msgpack.unpackb(file.read(entry.length), strict_map_key=False),
                    self.rank,
                    self._model_names,
                )
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise TraceFormatError(
                f"{entry.path}: the frame at byte {entry.offset} cannot be read: {error}"
            ) from error
        self._frames[index] = frame
        if len(self._frames) > _CACHED_FRAMES:
            self._frames.popitem(last=False)
        return frame

    def _frame_of(self, id: int) -> RecordsFrame:
        position = bisect.bisect_right(self._by_content, (id, len(self._entries))) - 1
        if position >= 0:
            index = self._by_content[position][1]
            entry = self._entries[index]
            if entry.first_content <= id < entry.first_content + entry.num_contents:
                return self._frame(index)
        raise KeyError(f"rank {self.rank} holds no content {id}")


def _model_names(header: dict[str, Any]) -> dict[str, str]:
    """Models that were given their name once the program had called a second one (docs/format.md)."""
    names = header.get("model_names") or {}
    if not isinstance(names, dict) or not all(isinstance(n, str) for pair in names.items() for n in pair):
        raise TraceFormatError(f"the header's model_names are no map of names: {names!r}")
    return names
