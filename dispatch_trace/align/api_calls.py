"""Calls of torch's Python API in a dump, held against the ops of the trace beside it.

A dump of API calls (`Functional.linear`, `Tensor.__add__`; msprobe's level L1) knows no module and no op. The
other trace has the ops that such calls led to. Both are sequences of results in the order of the run: a call is
the op of its family that returns as many numbers, in that order (the longest common sequence; values never
count), where both sides have as many of that kind. The op's result then stands in the other trace once more, as the inline capture of that name and number
that the dump has, and pairs with it. Calls that only look at a tensor otherwise have no op of their own.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeAlias

from rapidfuzz.distance import LCSseq

from dispatch_trace.align.canon import edge_input, family, is_empty
from dispatch_trace.schema import NO_CALL, StoredRecord, StoredSlot
from dispatch_trace.store.reader import RankReader
from dispatch_trace.store.view import ReaderView

# (family, number of elements, size of the last dim)
_Token: TypeAlias = tuple[str, int, int]
_DUNDER = re.compile(r"__(?:[ir](?=[a-z]{3}))?([a-z]+)__")


def placed_calls(ref: RankReader, target: RankReader) -> tuple[RankReader, RankReader, list[str]]:
    """Both ranks, with the ops of one named as the API calls of the other; and notices."""
    if _is_api(target) and not _is_api(ref):
        view, notices = _named(ref, target)
        return view, target, notices
    if _is_api(ref) and not _is_api(target):
        view, notices = _named(target, ref)
        return ref, view, notices
    return ref, target, []


def family_of_call(name: str) -> str:
    """`linear` for `Functional.linear` and `Torch.matmul`, `add` for `Tensor.__iadd__`, as ops have it."""
    last = name.rpartition(".")[2]
    dunder = _DUNDER.fullmatch(last)
    plain = dunder[1] if dunder else last.strip("_")
    return family({"truediv": "div", "pow": "pow", "neg": "neg"}.get(plain, plain))


def _is_api(reader: RankReader) -> bool:
    return bool((reader.header.get("options") or {}).get("api"))


def _named(ours: RankReader, dump: RankReader) -> tuple[RankReader, list[str]]:
    calls: dict[int, list[tuple[_Token, StoredRecord]]] = defaultdict(list)
    for record in dump.records(kind="inline"):
        calls[record.step].append((_token(family_of_call(record.name), record.slots[0]), record))
    ops: dict[int, list[tuple[_Token, StoredRecord, StoredSlot]]] = defaultdict(list)
    for record in ours.records(kind="op", grad_phase="fwd"):
        slot = next((s for s in record.slots if s.role != "in" and s.is_tensor and s.content >= 0), None)
        if slot is not None and edge_input(record) is None and not is_empty(record):
            ops[record.step].append((_token(family(record.op), slot), record, slot))
    number = 1 + max((record.seq for record in ours.records()), default=-1)
    found: list[StoredRecord] = []
    for step, given in sorted(calls.items()):
        # Where one side has more of a kind, nothing tells which of them have no counterpart.
        counts = Counter(token for token, _ in given), Counter(token for token, *_ in ops.get(step, []))
        mine = [each for each in given if counts[0][each[0]] == counts[1][each[0]]]
        theirs = [each for each in ops.get(step, []) if counts[0][each[0]] == counts[1][each[0]]]
        blocks = LCSseq.opcodes([token for token, _ in mine], [token for token, *_ in theirs])
        for block in blocks:
            if block.tag != "equal":
                continue
            for at in range(block.src_end - block.src_start):
                call, (_, op, slot) = mine[block.src_start + at][1], theirs[block.dest_start + at]
                found.append(_as_call(call, op, slot, number + len(found)))
    total = sum(map(len, calls.values()))
    notices = [f"{len(found)} of {total} API calls were held against ops, by family, size and order"]
    return (_WithCalls(ours, found) if found else ours), notices


def _token(name: str, slot: StoredSlot) -> _Token:
    return name, math.prod(slot.shape), slot.shape[-1] if slot.shape else 1


def _as_call(call: StoredRecord, op: StoredRecord, slot: StoredSlot, seq: int) -> StoredRecord:
    """The op's result, as the capture that the dump has of it."""
    shown = replace(slot, name="out", role="out", index=0, producers=((op.seq, slot.index),))
    return replace(
        op,
        kind="inline",
        seq=seq,
        module="",
        call=NO_CALL,
        op="",
        overload="",
        name=call.name,
        n=call.n,
        args=(),
        slots=(shown,),
        opened=seq,
        light=False,
        random=False,
    )


class _WithCalls(ReaderView):
    """A view of a rank with API calls behind its own records."""

    def __init__(self, whole: RankReader, calls: list[StoredRecord]) -> None:
        super().__init__(whole)
        self._calls = {record.seq: record for record in calls}
        self.num_records = whole.num_records + len(calls)

    def records(self, **where: Any) -> Iterator[StoredRecord]:
        yield from self._whole.records(**where)
        for record in self._calls.values():
            if all(getattr(record, name) == value for name, value in where.items()):
                yield record

    def record(self, seq: int) -> StoredRecord:
        return self._calls[seq] if seq in self._calls else self._whole.record(seq)


__all__ = ["family_of_call", "placed_calls"]
