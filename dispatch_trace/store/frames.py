"""Index segments: appending frames durably, and reading them back up to the last whole one.

A segment is a plain msgpack stream of `[crc32, payload]` pairs, `payload` a bin that holds one frame
(a msgpack map with a "type"). Frames never straddle segments and depend on no earlier frame.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack

SEGMENT_BYTES = 64 << 20
INDEX_NAME = re.compile(r"index-(\d{5,})\.msgpack")
SHARD_NAME = re.compile(r"shard-(\d{5,})\.safetensors")


def index_name(number: int) -> str:
    return f"index-{number:05d}.msgpack"


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def sync_directory(directory: Path) -> None:
    """Makes renames and new names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """`os.write` until all is written.

    Raises:
      OSError: as `os.write`.
    """
    view = memoryview(data)
    while view.nbytes:
        view = view[os.write(descriptor, view) :]


class SegmentWriter:
    """Appends frames to the segments of one rank directory.

    A frame that could not be written whole is cut off again, so that the segment ends with a whole frame.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._number = -1
        self._descriptor = -1
        self._size = 0
        self.bytes_written = 0

    def append(self, payload: bytes) -> None:
        """Appends one frame. Durable only after `sync`.

        Raises:
          OSError: the frame could not be written; the segment is as before.
        """
        pair = msgpack.packb([zlib.crc32(payload), payload])
        if self._descriptor < 0 or (self._size and self._size + len(pair) > SEGMENT_BYTES):
            self._open_next()
        try:
            write_all(self._descriptor, pair)
        except OSError:
            os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(pair)
        self.bytes_written += len(pair)

    def sync(self) -> None:
        if self._descriptor >= 0:
            os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open_next(self) -> None:
        path = self._directory / index_name(self._number + 1)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        if self._descriptor >= 0:
            os.fsync(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = descriptor
        self._number += 1
        self._size = 0
        sync_directory(self._directory)


def list_segments(directory: Path) -> list[Path]:
    """The index segments of a rank directory, in order."""
    numbered = [
        (int(match[1]), entry) for entry in directory.iterdir() if (match := INDEX_NAME.fullmatch(entry.name))
    ]
    return [path for _, path in sorted(numbered)]


class SegmentScan:
    """Iterates over the whole frames of one segment: (offset and length of the payload, payload).

    Attributes:
      problems: what was wrong, filled while iterating. A frame whose checksum fails is passed over; a
        broken pair ends the segment.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[str] = []

    def __iter__(self) -> Iterator[tuple[int, int, bytes]]:
        size = self.path.stat().st_size
        whole = 0
        with self.path.open("rb") as file:
            unpacker = msgpack.Unpacker(file, max_buffer_size=max(size, 1), raw=False)
            while True:
                try:
                    pair: Any = unpacker.unpack()
                except msgpack.OutOfData:
                    break
                except Exception as error:  # msgpack raises many kinds on garbage, ValueError among them
                    self.problems.append(f"{self.path.name}: broken at byte {whole} ({type(error).__name__})")
                    return
                if not _is_pair(pair):
                    self.problems.append(f"{self.path.name}: broken at byte {whole} (no frame)")
                    return
                whole = unpacker.tell()
                checksum, payload = pair
                if zlib.crc32(payload) != checksum:
                    self.problems.append(f"{self.path.name}: the frame that ends at byte {whole} is corrupt")
                    continue
                yield whole - len(payload), len(payload), payload
        if whole != size:
            self.problems.append(f"{self.path.name}: torn, {size - whole} bytes after the last whole frame")


def _is_pair(pair: Any) -> bool:
    return (
        isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], int) and isinstance(pair[1], bytes)
    )
