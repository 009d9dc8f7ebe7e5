"""Traces at any URL that fsspec knows: `s3://bucket/run.trace`, `memory://run.trace`, `gs://...`.

A `RemotePath` is a `pathlib.Path` whose files lie elsewhere, so that what reads and writes a trace need not
know. Guarantees: whatever a file system raises comes out as OSError; an object appears under its name only
when it is whole. How to reach a server (keys, endpoints) is for fsspec's own configuration and the
environment.

Objects cannot be appended to: an index gets a new segment with each flush, which the format allows
(docs/format.md), and shards are written under their final names.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack

_Local: Any = type(Path())


def place(path: str | os.PathLike[str]) -> Path:
    """Where a trace lies: a local path, or a `RemotePath` for a URL; `file://` is local."""
    if isinstance(path, Path):
        return path
    text = os.fspath(path)
    scheme, found, rest = text.partition("://")
    if not found:
        return Path(text)
    if scheme == "file":
        return Path(rest)
    remote: Path = RemotePath(text)
    return remote


@cache
def _file_system(protocol: str) -> Any:
    """Raises OSError where the package that talks to it is missing."""
    import fsspec  # comes with torch

    try:
        return fsspec.url_to_fs(protocol + "://")[0]
    except (ImportError, ValueError) as error:
        raise OSError(f"{protocol}:// cannot be used: {error}") from error


@contextlib.contextmanager
def _as_os_error(url: str) -> Iterator[None]:
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # each file system has errors of its own
        raise OSError(f"{url}: {type(error).__name__}: {error}") from error


class RemotePath(_Local):  # type: ignore[misc]
    """A path below a URL. pathlib folds its `//` into one slash; `str` gives it back."""

    def __str__(self) -> str:
        folded: str = super().__str__()
        return folded.replace(":/", "://", 1)

    def __fspath__(self) -> str:
        return str(self)

    def __hash__(self) -> int:
        return hash(str(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and str(self) == str(other)

    @property
    def fs(self) -> Any:
        """Its fsspec file system."""
        return _file_system(str(self).partition("://")[0])

    def _info(self) -> dict[str, Any] | None:
        with _as_os_error(str(self)):
            try:
                found: dict[str, Any] = self.fs.info(str(self))
                return found
            except FileNotFoundError:
                return None

    def exists(self, **_: Any) -> bool:
        return self._info() is not None

    def is_dir(self, **_: Any) -> bool:
        info = self._info()
        return info is not None and info["type"] == "directory"

    def is_file(self, **_: Any) -> bool:
        info = self._info()
        return info is not None and info["type"] == "file"

    def stat(self, **_: Any) -> Any:
        info = self._info()
        if info is None:
            raise FileNotFoundError(f"{self} does not exist")
        return SimpleNamespace(st_size=int(info["size"] or 0))

    def iterdir(self) -> Iterator[RemotePath]:
        with _as_os_error(str(self)):
            self.fs.invalidate_cache(str(self))
            try:
                found = self.fs.ls(str(self), detail=False)
            except FileNotFoundError:
                found = []
        own = str(self).partition("://")[2].strip("/")
        for entry in found:
            name = entry.strip("/").rpartition("/")[2]
            if entry.strip("/") != own and name:
                yield self / name

    def open(self, mode: str = "r", *_: Any, **__: Any) -> Any:
        with _as_os_error(str(self)):
            return self.fs.open(str(self), mode)

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        with _as_os_error(str(self)):
            self.fs.makedirs(str(self), exist_ok=exist_ok)

    def unlink(self, missing_ok: bool = False) -> None:
        with _as_os_error(str(self)):
            try:
                self.fs.rm_file(str(self))
            except FileNotFoundError:
                if not missing_ok:
                    raise

    def write_whole(self, data: bytes) -> None:
        """Writes a small object in one go."""
        with _as_os_error(str(self)):
            self.fs.pipe_file(str(self), data)

    def write_parts(self, name: str, parts: Iterable[memoryview]) -> None:
        """Writes an object of this directory, a part after the other."""
        with _as_os_error(f"{self}/{name}"):
            file = self.fs.open(f"{self}/{name}", "wb")
            try:
                for part in parts:
                    file.write(part)
            except BaseException:
                with contextlib.suppress(Exception):
                    file.discard()
                raise
            file.close()

    def resolve(self, strict: bool = False) -> RemotePath:
        return self


class RemoteSegments:
    """The segments of an index where nothing can be appended: a new one with each `sync`.

    Attributes:
      bytes_written: in all segments.
    """

    def __init__(self, directory: RemotePath) -> None:
        self._directory = directory
        self._number = 0
        self._pending: list[bytes] = []
        self.bytes_written = 0

    def append(self, payload: bytes) -> None:
        """Appends one frame, in memory until `sync`."""
        self._pending.append(msgpack.packb([zlib.crc32(payload), payload]))

    def sync(self) -> None:
        """Raises OSError; what was appended is then tried again by the next one."""
        data = b"".join(self._pending)
        if not data:
            return
        path: RemotePath = self._directory / f"index-{self._number:05d}.msgpack"
        path.write_whole(data)
        self._pending.clear()
        self._number += 1
        self.bytes_written += len(data)

    def close(self) -> None:
        """Nothing stays open."""
