"""Tensors in files of other tools, read without unpickling anything else.

A `.pt` file is a pickle, and a pickle can run any code. `torch.load(weights_only=True)` rebuilds tensors
and plain containers only; a file that needs more is refused, never tried in another way. So is an array of
objects in a NumPy file. What is merely torn or corrupt is told apart, because the rest of its dump stays
readable.
"""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from dispatch_trace.errors import TraceFormatError

_ZIP_MAGIC = b"PK\x03\x04"
_PICKLE_MAGIC = b"\x80"
_GLOBAL = re.compile(r"GLOBAL (\S+)")
_NO_TENSOR = "holds a {}, not a tensor"


class TensorSource(Protocol):
    """Where one tensor of a dump lies."""

    @property
    def path(self) -> Path:
        """The file."""
        ...

    def look(self) -> torch.Tensor | str:
        """The tensor on the CPU, its memory the file's where the file allows it; or what is wrong.

        Raises:
          TraceFormatError: the file needs unpickling of something else than a tensor.
        """
        ...


@dataclass(frozen=True, slots=True)
class PtTensor:
    """A tensor in a file of `torch.save`; `key` leads to it through dicts, lists and tuples."""

    path: Path
    key: tuple[str | int, ...] = ()

    def look(self) -> torch.Tensor | str:
        found = try_load_object(self.path)
        if isinstance(found, Unreadable):
            return found.why
        for step in self.key:
            try:
                found = found[step]
            except (KeyError, IndexError, TypeError):
                return f"lacks {step!r}"
        if not isinstance(found, torch.Tensor):
            return _NO_TENSOR.format(type(found).__name__)
        return found.detach()


class PtContainer:
    """A file of many tensors, mapped once: unpickling it again for each would cost more than the tensors."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
          TraceFormatError: the file needs unpickling of something else than tensors.
        """
        self.path = path
        loaded = try_load_object(path)
        self.problem = loaded.why if isinstance(loaded, Unreadable) else ""
        self.content: Any = None if isinstance(loaded, Unreadable) else loaded

    def at(self, tensor: torch.Tensor) -> HeldTensor:
        """The source of a tensor found in `content`."""
        return HeldTensor(self.path, tensor.detach())


@dataclass(frozen=True, slots=True, eq=False)
class HeldTensor:
    """A tensor of a container that is open."""

    path: Path
    tensor: torch.Tensor

    def look(self) -> torch.Tensor | str:
        return self.tensor


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    """A tensor in a safetensors file, by name."""

    path: Path
    name: str

    def look(self) -> torch.Tensor | str:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(self.name)
        except OSError as error:
            return f"cannot be read: {error.strerror or error}"
        except (SafetensorError, ValueError, RuntimeError) as error:
            return f"cannot be read: {_short(error)}"
        return tensor


@dataclass(frozen=True, slots=True)
class NpzTensor:
    """An array in a `.npz` file, by name; "" is the array of an `.npy` file."""

    path: Path
    name: str

    def look(self) -> torch.Tensor | str:
        import numpy as np

        try:
            found = np.load(self.path, allow_pickle=False)
            with found if self.name else warnings.catch_warnings():
                array = found[self.name] if self.name else found
            return torch.from_numpy(array)
        except ValueError as error:
            if "allow_pickle" in str(error):
                name = f" ({self.name})" if self.name else ""
                raise TraceFormatError(
                    f"{self.path} holds an array of objects{name}, which only unpickling could read. "
                    "Unpickling can run any code, so nothing of it was read. "
                    "Remove it, or save numbers alone."
                ) from None
            return f"cannot be read: {_short(error)}"
        except TypeError:
            return f"holds a {array.dtype} array, which torch has no dtype for"
        except (OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
            return f"cannot be read: {_short(error)}"


@dataclass(frozen=True, slots=True)
class Unreadable:
    """What is wrong with a file that could not be read."""

    why: str


def load_tensor(source: TensorSource) -> torch.Tensor:
    """The tensor of a source.

    Raises:
      TraceFormatError: the file is torn, holds no tensor, or needs unpickling of something else.
    """
    found = source.look()
    if isinstance(found, str):
        raise TraceFormatError(f"{source.path}: {found}")
    return found


def try_load_object(path: Path) -> Any | Unreadable:
    """What a file of `torch.save` holds: tensors and plain containers; or what is wrong with it.

    Raises:
      TraceFormatError: the file needs unpickling of something else.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(len(_ZIP_MAGIC))
        with warnings.catch_warnings():
            # About pickle protocols and storages; nothing that a user could act on.
            warnings.simplefilter("ignore")
            # Only the zip form can be mapped; torch writes the older form no more.
            return torch.load(path, weights_only=True, map_location="cpu", mmap=magic == _ZIP_MAGIC)
    except pickle.UnpicklingError as error:
        if magic != _ZIP_MAGIC and not magic.startswith(_PICKLE_MAGIC):
            return Unreadable("cannot be read: it is no file of torch.save")
        what = _GLOBAL.search(str(error))
        raise TraceFormatError(
            f"{path} holds something else than a tensor{f' ({what[1]})' if what else ''}, which only "
            "unpickling could read. Unpickling can run any code, so nothing of it was read. "
            "Remove the file, or save the tensor alone."
        ) from None
    except OSError as error:
        return Unreadable(f"cannot be read: {error.strerror or error}")
    except Exception as error:  # torch raises RuntimeError, EOFError, KeyError and more for broken files
        return Unreadable(f"cannot be read: {_short(error)}")


def _short(error: Exception) -> str:
    return str(error).partition(". ")[0].partition("\n")[0] or type(error).__name__


def check_bytes(path: Path) -> str:
    """What is wrong with the bytes of a file: reads all of it and compares the checksums; "" when sound."""
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except zipfile.BadZipFile:
        return ""  # the older form has no checksums
    except (OSError, EOFError, ValueError, RuntimeError) as error:
        return f"cannot be read: {error}"
    return f"is corrupt: {bad} does not match its checksum" if bad else ""
