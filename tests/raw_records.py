"""Raw records and contents for the tests of the store, made without any capture path."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from dispatch_trace.schema import Content, RawRecord, RawSlot
from dispatch_trace.store.reader import RankReader, open_ranks
from dispatch_trace.store.writer import TraceWriter


def content(
    tensor: torch.Tensor, *, keep_data: bool = True, summarise: bool = True, num_bytes: int | None = None
) -> Content:
    if num_bytes is None:
        strided = tensor.layout is torch.strided and not tensor.is_nested
        num_bytes = tensor.untyped_storage().nbytes() if strided else 64
    return Content(tensor, keep_data=keep_data, summarise=summarise, num_bytes=num_bytes)


def op_record(seq: int, *contents: Content, **fields: Any) -> RawRecord:
    """An op record with one output slot a content."""
    slots = [RawSlot(f"out[{index}]", "out", content=content) for index, content in enumerate(contents)]
    return RawRecord(seq, "op", step=0, op="aten.mm", overload="aten.mm.default", slots=slots, **fields)


def reserve_and_put(writer: TraceWriter, record: RawRecord) -> None:
    """What a capture path does."""
    for slot in record.slots:
        if slot.content is not None and slot.content.tensor is not None:
            writer.reserve(slot.content.num_bytes)
    writer.put(record)


def write_trace(path: Path, tensors: Iterable[torch.Tensor], **options: Any) -> RankReader:
    """A closed trace with one record a tensor; the content ids are in the slots."""
    writer = TraceWriter(path, {"torch": torch.__version__}, **options)
    for seq, tensor in enumerate(tensors):
        reserve_and_put(writer, op_record(seq, content(tensor)))
    writer.close()
    return open_rank(path)


def open_rank(path: Path) -> RankReader:
    (reader,) = open_ranks(path)
    return reader


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equal dtype, shape and bytes of two strided tensors, by means other than the store's."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(first.element_size())
    if carrier is None:  # complex128
        first, second = torch.view_as_real(first.resolve_conj()), torch.view_as_real(second.resolve_conj())
        return same_bits(first.contiguous(), second.contiguous())
    if first.is_conj() or first.is_neg():
        first = first.resolve_conj().resolve_neg()
    return torch.equal(first.contiguous().view(carrier), second.contiguous().view(carrier))
