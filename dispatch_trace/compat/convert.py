"""Turns traces into foreign dumps and back: what `dispatch-trace convert` does."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dispatch_trace.compat import foreign_format, open_ranks
from dispatch_trace.compat.vllm_neuron_write import Written, check_free, write_dump
from dispatch_trace.errors import ConfigError, NotExecutableError
from dispatch_trace.schema import Content, Figures, RawRecord, RawSlot, StoredRecord, StoredSlot
from dispatch_trace.store.reader import RankReader
from dispatch_trace.store.writer import TraceWriter

if TYPE_CHECKING:
    import torch

TARGETS = ("vllm-neuron", "trace")


def stored_tensor(reader: RankReader, record: StoredRecord, slot: StoredSlot) -> torch.Tensor:
    """The value of a slot where the trace holds its data.

    Raises:
      NotExecutableError: it does not.
    """
    if slot.content < 0:
        raise NotExecutableError(f"record {record.seq} was recorded without a value of {slot.name}.")
    return reader.tensor(slot.content)


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    to: str,
    tensor_of: Callable[[RankReader, StoredRecord, StoredSlot], torch.Tensor] = stored_tensor,
) -> Written:
    """Writes a trace in another layout, or a foreign dump as a trace.

    Args:
      source: a trace or a foreign dump.
      out: the directory to make.
      to: "vllm-neuron" or "trace".
      tensor_of: the value of a slot; a caller that can run a trace again may offer more than what is stored.
    Returns: what was written, and what was left out.
    Raises:
      ConfigError: `to` is none of these, or the source has that form already.
      TraceExistsError: `out` is there already.
      NotATraceError, TraceFormatError, SchemaVersionError: the source cannot be read.
      NotExecutableError: it holds no data.
      CaptureError: `out` cannot be written.
    """
    if to not in TARGETS:
        raise ConfigError(f"to={to!r}: expected one of {', '.join(TARGETS)}.")
    ranks = open_ranks(source)
    found = foreign_format(source) if to == "trace" else None
    if to == "trace" and found is None:
        raise ConfigError(f"{source} is a trace already.")
    check_free(Path(out))
    if to == "trace":
        return _write_trace(ranks, Path(out))
    return write_dump(ranks, Path(out), tensor_of=tensor_of)


def _write_trace(ranks: list[RankReader], out: Path) -> Written:
    written = Written()
    for reader in ranks:

        def has_data(slot: StoredSlot, reader: RankReader = reader) -> bool:
            return reader.content(slot.content).has_data

        header = {name: value for name, value in reader.header.items() if name != "type"}
        writer = TraceWriter(out, header, rank=reader.rank)
        try:
            for step in reader.steps:
                writer.put_step(step)
            contents: dict[int, Content] = {}
            for record in reader.records():
                writer.put(_raw_record(reader, record, writer, contents))
                written.num_tensors += sum(slot.content >= 0 and has_data(slot) for slot in record.slots)
            for problem in reader.problems:
                writer.drop(problem)
        except BaseException:
            writer.close(aborted=True)
            raise
        writer.close()
        written.left_out += reader.problems
    written.num_steps = len({(step.model, step.step) for reader in ranks for step in reader.steps})
    return written


def _raw_record(
    reader: RankReader, record: StoredRecord, writer: TraceWriter, contents: dict[int, Content]
) -> RawRecord:
    return RawRecord(
        record.seq,
        record.kind,
        step=record.step,
        model=record.model,
        grad_phase=record.grad_phase,
        module=record.module,
        call=record.call,
        op=record.op,
        overload=record.overload,
        name=record.name,
        n=record.n,
        args=list(record.args),
        source=record.source,
        light=record.light,
        opened=record.opened,
        note=record.note,
        slots=[_raw_slot(reader, slot, writer, contents) for slot in record.slots],
    )


def _raw_slot(
    reader: RankReader, slot: StoredSlot, writer: TraceWriter, contents: dict[int, Content]
) -> RawSlot:
    """The same slot; what several of them hold is read once, and figures without data stay what they are."""
    content = contents.get(slot.content)
    stored = None if slot.content < 0 else reader.content(slot.content)
    if content is None and stored is not None and not stored.has_data:
        figures = Figures(stored.dtype, stored.shape, stored.stats)
        content = contents[slot.content] = Content(figures, keep_data=False, summarise=False, num_bytes=0)
    elif content is None and stored is not None:
        tensor = reader.tensor(slot.content)
        num_bytes = tensor.numel() * tensor.element_size() if slot.strides is not None else 0
        writer.reserve(num_bytes)
        content = Content(tensor, keep_data=True, summarise=True, num_bytes=num_bytes)
        contents[slot.content] = content
    return RawSlot(
        slot.name,
        slot.role,
        value=slot.value,
        is_tensor=slot.is_tensor,
        dtype=slot.dtype,
        shape=slot.shape,
        strides=slot.strides,
        device=slot.device,
        layout=slot.layout,
        content=content,
        producers=slot.producers,
        note=slot.note,
    )
