"""Single tensors in `.pt` files, read without unpickling anything else.

A `.pt` file is a pickle, and a pickle can run any code. `torch.load(weights_only=True)` rebuilds tensors and
plain containers only; a file that needs more is refused, never tried in another way. What is merely torn or
corrupt is told apart, because the rest of its dump stays readable.
"""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from pathlib import Path

import torch

from dispatch_trace.errors import TraceFormatError

_ZIP_MAGIC = b"PK\x03\x04"
_PICKLE_MAGIC = b"\x80"
_GLOBAL = re.compile(r"GLOBAL (\S+)")


def load_tensor(path: Path) -> torch.Tensor:
    """The tensor in a file, on the CPU; its memory is the file's where the file allows it.

    Raises:
      TraceFormatError: the file is torn, holds no tensor, or needs unpickling of something else.
    """
    found = try_load(path)
    if isinstance(found, str):
        raise TraceFormatError(f"{path}: {found}")
    return found


def try_load(path: Path) -> torch.Tensor | str:
    """The tensor in a file, or what is wrong with the file.

    Raises:
      TraceFormatError: the file needs unpickling of something else than a tensor.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(len(_ZIP_MAGIC))
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # about pickle protocols and storages; nothing that a user could act on
            # Only the zip form can be mapped; torch writes the older form no more.
            found = torch.load(path, weights_only=True, map_location="cpu", mmap=magic == _ZIP_MAGIC)
    except pickle.UnpicklingError as error:
        if magic != _ZIP_MAGIC and not magic.startswith(_PICKLE_MAGIC):
            return "cannot be read: it is no file of torch.save"
        what = _GLOBAL.search(str(error))
        raise TraceFormatError(
            f"{path} holds something else than a tensor{f' ({what[1]})' if what else ''}, which only "
            "unpickling could read. Unpickling can run any code, so nothing of it was read. "
            "Remove the file, or save the tensor alone."
        ) from None
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    except Exception as error:  # torch raises RuntimeError, EOFError, KeyError and more for broken files
        reason = str(error).partition(". ")[0].partition("\n")[0] or type(error).__name__
        return f"cannot be read: {reason}"
    if not isinstance(found, torch.Tensor):
        return f"holds a {type(found).__name__}, not a tensor"
    return found.detach()


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
