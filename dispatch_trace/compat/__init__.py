"""Dumps of other tools, opened as if they were traces: one file a format.

A format module says whether a directory is one of its dumps and opens it as `RankReader`s that read the
foreign files as they are asked for. Stands above `store`, which knows nothing of it; whoever opens what a
user named calls `open_ranks` here. Imports no torch until a foreign dump is opened.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dispatch_trace.errors import NotATraceError
from dispatch_trace.store import reader
from dispatch_trace.store.reader import RankReader


@dataclass(frozen=True, slots=True)
class Format:
    """A foreign dump format.

    Attributes:
      name: as on the command line.
      open: opens a directory of this format as ranks, in order.
    """

    name: str
    open: Callable[[Path], list[RankReader]]


def foreign_format(path: str | os.PathLike[str]) -> Format | None:
    """The format of a dump that some other tool wrote; None for anything else, ordinary traces included."""
    import dispatch_trace.compat.vllm_neuron as vllm_neuron

    root = Path(path)
    if root.is_dir() and vllm_neuron.is_dump(root):
        return Format("vllm-neuron", vllm_neuron.open_ranks)
    return None


def open_ranks(path: str | os.PathLike[str]) -> list[RankReader]:
    """The ranks of a trace or of a foreign dump, in order.

    Raises:
      NotATraceError: the path is neither.
      TraceFormatError, SchemaVersionError: it cannot be read.
    """
    try:
        return reader.open_ranks(path)
    except NotATraceError:
        found = foreign_format(path)
        if found is None:
            raise
    return found.open(Path(path))
