"""Ways out: traces and alignments in the forms that other tools read (docs/export.md).

Every form is written to a file under another name and renamed when it is whole, and what it has no place
for is counted and returned. Imports no torch, but for the vLLM-Neuron layout, which is made of `.pt`
files.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dispatch_trace.errors import CaptureError, ConfigError, TraceExistsError
from dispatch_trace.export.rows import Exported

if TYPE_CHECKING:
    from dispatch_trace.alignment import Alignment

RECORD_FORMS = ("csv", "parquet", "fastvideo", "vllm-neuron")
PAIR_FORMS = ("csv", "parquet", "model-explorer")
FORMS = tuple(dict.fromkeys((*RECORD_FORMS, *PAIR_FORMS)))


def export(
    source: str | os.PathLike[str] | Alignment,
    out: str | os.PathLike[str],
    *,
    to: str,
    stats: Sequence[str] | None = None,
) -> Exported:
    """Writes a trace, or an alignment of two, for another tool.

    Args:
      source: a trace (or a foreign dump), or what `align` returned.
      out: the file to make; a directory for "vllm-neuron".
      to: "csv" or "parquet" (a row for each tensor, or for each pair of an alignment), "fastvideo" (JSON
        lines, a line for each tensor that a module returned), "vllm-neuron" (a dump), "model-explorer"
        (of an alignment: its graph, and in a file beside it the error of each node).
      stats: names of the statistics in "fastvideo".
    Returns: how many rows were written, and what the form has no place for.
    Raises:
      ConfigError: the form does not exist, is not one of this source, or needs a package that is missing.
      TraceExistsError: `out` is there already.
      NotATraceError, TraceFormatError, SchemaVersionError: the source cannot be read.
      NotExecutableError: "vllm-neuron", of a trace without data.
      CaptureError: `out` cannot be written.
    """
    path = Path(out)
    is_trace = isinstance(source, (str, os.PathLike))
    forms = RECORD_FORMS if is_trace else PAIR_FORMS
    if to not in forms:
        what = "a trace" if is_trace else "an alignment"
        raise ConfigError(f"to={to!r}: {what} can be written as {', '.join(forms)}.")
    if path.exists():
        raise TraceExistsError(f"{path} is there already. Give another path.")
    try:
        if is_trace:
            return _export_trace(source, path, to, stats)  # type: ignore[arg-type]
        return _export_alignment(source, path, to)  # type: ignore[arg-type]
    except OSError as error:
        raise CaptureError(f"cannot write {path}: {error}") from error


def _export_trace(
    source: str | os.PathLike[str], path: Path, to: str, stats: Sequence[str] | None
) -> Exported:
    from dispatch_trace.compat import open_ranks

    if to == "vllm-neuron":
        from dispatch_trace import session
        from dispatch_trace.compat.convert import convert

        written = convert(
            source,
            path,
            to=to,
            tensor_of=lambda reader, record, slot: session.Record(reader, record).tensor(slot.name),
        )
        return Exported(num_rows=written.num_tensors, left_out=written.left_out)
    ranks = open_ranks(source)
    if to == "fastvideo":
        from dispatch_trace.export.fastvideo import write_lines

        return write_lines(ranks, path, stats=stats)
    from dispatch_trace.export.rows import RECORD_COLUMNS, record_rows
    from dispatch_trace.export.tables import write_table

    return write_table(record_rows(ranks), RECORD_COLUMNS, path, to=to)


def _export_alignment(found: Alignment, path: Path, to: str) -> Exported:
    if to == "model-explorer":
        from dispatch_trace.export.explorer import write_graph

        return write_graph(found.pairs, path)
    from dispatch_trace.export.rows import PAIR_COLUMNS, pair_rows
    from dispatch_trace.export.tables import write_table

    return write_table(pair_rows(found.pairs), PAIR_COLUMNS, path, to=to)


__all__ = ["FORMS", "PAIR_FORMS", "RECORD_FORMS", "Exported", "export"]
