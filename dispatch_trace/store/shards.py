"""Shards: ordinary safetensors files, written durably and read without any tensor library.

The writer is our own because the bytes come from snapshots of any layout, are hashed on their way, and
a full disk must surface as OSError. The format is public: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from dispatch_trace.errors import TraceFormatError
from dispatch_trace.store.frames import shard_name, sync_directory
from dispatch_trace.store.remote import RemotePath

_BEGIN_BYTES = 8 << 20
_SYNC_FILE_RANGE_WRITE = 2
_HEADER_LIMIT = 100_000_000  # the limit of the safetensors library


@dataclass(frozen=True, slots=True)
class ShardTensor:
    """One tensor on its way into a shard.

    Attributes:
      number: its name in the file, in decimal.
      dtype, shape: as safetensors has them.
      itemsize: bytes per element, for alignment.
      data: the contiguous bytes (any buffer).
      owner: keeps the memory behind `data` alive.
    """

    number: int
    dtype: str
    shape: tuple[int, ...]
    itemsize: int
    data: Any
    owner: Any = None


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """What the index says of a shard."""

    number: int
    file: str
    num_bytes: int
    num_tensors: int
    hash: str


def write_shard(directory: Path, number: int, tensors: Sequence[ShardTensor]) -> ShardInfo:
    """Writes a shard under a temporary name, flushes it to the disk, and renames it.

    Raises:
      OSError: nothing was written under the final name.
    """
    # Descending alignment, as the library orders them: each tensor then starts aligned to its elements.
    ordered = sorted(tensors, key=lambda tensor: (-tensor.itemsize, tensor.number))
    header: dict[str, Any] = {}
    offset = 0
    for tensor in ordered:
        end = offset + memoryview(tensor.data).nbytes
        header[str(tensor.number)] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    hasher = xxhash.xxh3_128()
    name = shard_name(number)
    parts = [len(text).to_bytes(8, "little"), text, *(tensor.data for tensor in ordered)]
    if isinstance(directory, RemotePath):
        directory.write_parts(name, _hashed(parts, hasher))
    else:
        _write_durably(directory, name, _hashed(parts, hasher))
    return ShardInfo(number, name, 8 + len(text) + offset, len(ordered), hasher.hexdigest())


def _hashed(parts: Iterable[Any], hasher: Any) -> Iterator[memoryview]:
    for data in parts:
        view = memoryview(data)
        if view.nbytes:
            view = view.cast("B")
            hasher.update(view)
            yield view


def _write_durably(directory: Path, name: str, parts: Iterable[memoryview]) -> None:
    temporary = directory / f"{name}.tmp"
    written = begun = 0
    try:
        with temporary.open("wb", buffering=1 << 20) as file:
            for view in parts:
                file.write(view)
                written += view.nbytes
                if written - begun >= _BEGIN_BYTES:
                    file.flush()
                    _begin_writing(file.fileno(), begun, written - begun)
                    begun = written
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(directory / name)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(directory)


def _begin_writing(descriptor: int, offset: int, num_bytes: int) -> None:
    """Lets the disk begin with what was written, where the system can: else it would idle until the flush."""
    begin = _range_syncer()
    if begin is not None:
        begin(descriptor, offset, num_bytes, _SYNC_FILE_RANGE_WRITE)


@cache
def _range_syncer() -> Any:
    """`sync_file_range` of Linux, which Python lacks; None elsewhere."""
    try:
        found = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError, TypeError):
        return None
    found.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return found


class Shard:
    """Reads tensors of one safetensors file as bytes.

    Raises (all methods):
      TraceFormatError: the file is missing, is no safetensors file or lacks the tensor.
    """

    def __init__(self, path: Path, num_bytes: int | None = None) -> None:
        self.path = path
        self._mapped: np.ndarray[Any, Any] | None = None
        try:
            size = path.stat().st_size
            if num_bytes is not None and size != num_bytes:
                raise TraceFormatError(f"{path} has {size} bytes; the index says {num_bytes}")
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if length > min(size - 8, _HEADER_LIMIT):
                    raise TraceFormatError(f"{path} is corrupt: its header cannot be {length} bytes long")
                self._start = 8 + length
                self._header = _check_header(path, json.loads(file.read(length)), size - self._start)
        except FileNotFoundError as error:
            raise TraceFormatError(f"{path} is missing") from error
        except OSError as error:
            raise TraceFormatError(f"{path} cannot be read: {error}") from error
        except ValueError as error:
            if isinstance(error, TraceFormatError):
                raise
            raise TraceFormatError(f"{path} is corrupt: {error}") from error

    def __contains__(self, number: int) -> bool:
        return str(number) in self._header

    def __len__(self) -> int:
        return len(self._header)

    def entry(self, number: int) -> tuple[str, tuple[int, ...], int]:
        """safetensors dtype, shape and size in bytes of a tensor."""
        dtype, shape, begin, end = self._entry(number)
        return dtype, shape, end - begin

    def read(self, number: int) -> bytearray:
        """The bytes of a tensor."""
        _, _, begin, end = self._entry(number)
        data = bytearray(end - begin)
        self.read_into(number, data)
        return data

    def read_into(self, number: int, buffer: Any) -> None:
        """Fills a writable buffer of exactly the tensor's size."""
        _, _, begin, end = self._entry(number)
        view = memoryview(buffer).cast("B") if end > begin else memoryview(b"")
        if view.nbytes != end - begin:
            raise TraceFormatError(f"{self.path}: tensor {number} has {end - begin} bytes, not {view.nbytes}")
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self._start + begin)
                while view.nbytes:
                    count = file.readinto(view)
                    if not count:
                        raise TraceFormatError(f"{self.path} ends inside tensor {number}")
                    view = view[count:]
        except OSError as error:
            raise TraceFormatError(f"{self.path} cannot be read: {error}") from error

    def map_floats(self, number: int) -> np.ndarray[Any, Any]:
        """A float32 tensor as a read-only array that is paged in as it is used."""
        dtype, shape, begin, end = self._entry(number)
        if dtype != "F32" or end - begin != 4 * math.prod(shape):
            raise TraceFormatError(f"{self.path}: tensor {number} is not float32 {list(shape)}")
        return self.map_bytes(number).view("<f4").reshape(shape)

    def map_bytes(self, number: int) -> np.ndarray[Any, Any]:
        """The bytes of a tensor as a read-only array that is paged in as it is used; read from URLs."""
        _, _, begin, end = self._entry(number)
        if begin == end:
            return np.empty(0, dtype=np.uint8)
        try:
            if isinstance(self.path, RemotePath):
                return np.frombuffer(self.read(number), dtype=np.uint8)
            if self._mapped is None:
                whole = np.memmap(self.path, dtype=np.uint8, mode="r")
                self._mapped = whole.view(np.ndarray)  # rows of a memmap cost ten times those of an array
            return self._mapped[self._start + begin : self._start + end]
        except (OSError, ValueError) as error:
            raise TraceFormatError(f"{self.path} cannot be read: {error}") from error

    def _entry(self, number: int) -> tuple[str, tuple[int, ...], int, int]:
        entry = self._header.get(str(number))
        if entry is None:
            raise TraceFormatError(f"{self.path} holds no tensor {number}")
        begin, end = entry["data_offsets"]
        return entry["dtype"], tuple(entry["shape"]), begin, end


def _check_header(path: Path, header: Any, data_bytes: int) -> dict[str, dict[str, Any]]:
    if not isinstance(header, dict):
        raise TraceFormatError(f"{path} is corrupt: its header is no object")
    header.pop("__metadata__", None)
    for name, entry in header.items():
        try:
            begin, end = entry["data_offsets"]
            sound = 0 <= begin <= end <= data_bytes and isinstance(entry["dtype"], str)
            sound = sound and all(isinstance(size, int) and size >= 0 for size in entry["shape"])
        except (KeyError, TypeError, ValueError):
            sound = False
        if not sound:
            raise TraceFormatError(f"{path} is corrupt: no such place for tensor {name!r}")
    return header


def hash_file(path: Path) -> str:
    """xxh3-128 of a whole file, in hexadecimal."""
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            hasher.update(block)
    return hasher.hexdigest()
