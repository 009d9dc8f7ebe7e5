"""Dumps of other tools, opened as if they were traces: one file a format.

A format module says whether a path is one of its dumps, by what is in it, and opens it as `RankReader`s that
read the foreign files as they are asked for:

    NAME, FORMAT                 for programs and for people
    detect(path) -> str | None   None: not its format; "": its format; else why what looks like it is none
    open_ranks(path)             the ranks, in order

Stands above `store`, which knows nothing of it; whoever opens what a user named calls `open_ranks` here.
Imports no torch until a foreign dump is opened.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dispatch_trace.errors import NotATraceError, TraceFormatError
from dispatch_trace.store import reader
from dispatch_trace.store.reader import RankReader
from dispatch_trace.store.remote import RemotePath, place

_RANK_NAME = re.compile(r"rank\d+")
_MODULES = (
    "vllm_neuron",
    "nxd_inference",
    "sglang",
    "sglang_passes",
    "transformers_debug",
    "msprobe",
    "fastvideo",
    "debug_mode",
    "saved_states",
)


@dataclass(frozen=True, slots=True)
class Format:
    """A foreign dump format.

    Attributes:
      name: as on the command line.
      title: in words.
      open: opens a path of this format as ranks, in order.
    """

    name: str
    title: str
    open: Callable[[Path], list[RankReader]]


def foreign_format(path: str | os.PathLike[str]) -> Format | None:
    """The format of a dump that some other tool wrote; None for anything else, ordinary traces included.

    Raises:
      TraceFormatError: it is of several formats, or looks like one and is none.
    """
    root = Path(path)
    if not root.exists():
        return None
    found: list[Format] = []
    almost: list[str] = []
    for name in _MODULES:
        module = importlib.import_module(f"dispatch_trace.compat.{name}")
        try:
            told = module.detect(root)
        except OSError as error:
            raise TraceFormatError(f"{root} cannot be read: {error.strerror or error}") from error
        if told == "":
            found.append(Format(module.NAME, module.FORMAT, module.open_ranks))
        elif told:
            almost.append(told)
    if len(found) > 1:
        raise TraceFormatError(
            f"{root} holds dumps of {len(found)} formats: {', '.join(f.title for f in found)}. "
            "Give each a directory of its own."
        )
    if not found and almost:
        raise TraceFormatError(" ".join(almost))
    return found[0] if found else None


def open_ranks(path: str | os.PathLike[str]) -> list[RankReader]:
    """The ranks of a trace or of a foreign dump, in order.

    Raises:
      NotATraceError: the path is neither.
      TraceFormatError, SchemaVersionError: it cannot be read, or holds several dumps.
    """
    if isinstance(place(path), RemotePath):
        return reader.open_ranks(path)  # dumps of others are looked for on this machine only
    try:
        ranks = reader.open_ranks(path)
    except NotATraceError as error:
        found = foreign_format(path)
        if found is None:
            if not Path(path).exists():
                raise
            raise NotATraceError(f"{error}, nor is it a dump that is known (docs/foreign.md)") from None
        return found.open(Path(path))
    if all(rank.path.parent == Path(path) for rank in ranks) and (found := _beside(Path(path))) is not None:
        raise TraceFormatError(f"{path} holds a trace and a {found.title}. Give each a directory of its own.")
    return ranks


def _beside(path: Path) -> Format | None:
    """A foreign dump in the directory of a trace."""
    if all(_RANK_NAME.fullmatch(entry.name) for entry in path.iterdir()):
        return None
    try:
        return foreign_format(path)
    except TraceFormatError:
        return None  # what lies beside a trace and is nothing is nobody's business
