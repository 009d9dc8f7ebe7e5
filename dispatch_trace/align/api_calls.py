"""Calls of torch's Python API in a dump, held against the ops of the trace beside it.

A dump of API calls (`Functional.linear`, `Tensor.__add__`; msprobe's level L1) knows no module and no op.
The other trace has the ops that such calls led to. Both are sequences of results in the order of the run: a
call is the op of its family that returns as many numbers, in that order (the longest common sequence; values
never count), where both sides have as many of that kind. Where the dump is the reference, the results of
those ops stand in the target once more, as the captures that the dump has; where it is the target, its calls
become those ops, with the views between them. Calls that only look at a tensor otherwise have no op.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

from rapidfuzz.distance import LCSseq

from dispatch_trace.align.canon import edge_input, family, is_empty
from dispatch_trace.schema import StoredRecord, StoredSlot
from dispatch_trace.store.reader import RankReader
from dispatch_trace.store.view import ReaderView

# (family, number of elements, size of the last dim)
_Token: TypeAlias = tuple[str, int, int]
_Pair: TypeAlias = tuple[StoredRecord, StoredRecord]  # a call of the dump, and its op
_DUNDER = re.compile(r"__(?:[ir](?=[a-z]{3}))?([a-z]+)__")


def placed_calls(ref: RankReader, target: RankReader) -> tuple[RankReader, RankReader, list[str]]:
    """Both ranks, with API calls and ops alike where only one of them has ops; and notices."""
    if _is_api(ref) and not _is_api(target):
        pairs, notices = _paired(ref, target)
        return ref, _WithCalls(target, pairs), notices
    if _is_api(target) and not _is_api(ref):
        pairs, notices = _paired(target, ref)
        return ref, _AsOps(target, ref, pairs), notices
    return ref, target, []


def family_of_call(name: str) -> str:
    """`linear` for `Functional.linear` and `Torch.matmul`, `add` for `Tensor.__iadd__`, as ops have it."""
    last = name.rpartition(".")[2]
    dunder = _DUNDER.fullmatch(last)
    plain = dunder[1] if dunder else last.strip("_")
    return family({"truediv": "div", "pow": "pow", "neg": "neg"}.get(plain, plain))


def _is_api(reader: RankReader) -> bool:
    return bool((reader.header.get("options") or {}).get("api"))


def _paired(dump: RankReader, ours: RankReader) -> tuple[list[_Pair], list[str]]:
    calls: dict[int, list[tuple[_Token, StoredRecord]]] = defaultdict(list)
    for record in dump.records(kind="inline"):
        calls[record.step].append((_token(family_of_call(record.name), record.slots[0]), record))
    ops: dict[int, list[tuple[_Token, StoredRecord]]] = defaultdict(list)
    for record in ours.records(kind="op", grad_phase="fwd"):
        slot = _result(record)
        if slot is not None and edge_input(record) is None and not is_empty(record):
            ops[record.step].append((_token(family(record.op), slot), record))
    found: list[_Pair] = []
    for step, given in sorted(calls.items()):
        # Where one side has more of a kind, nothing tells which of them have no counterpart.
        counts = Counter(token for token, _ in given), Counter(token for token, _ in ops[step])
        sides = [
            [each for each in side if counts[0][each[0]] == counts[1][each[0]]] for side in (given, ops[step])
        ]
        tokens = [[token for token, _ in side] for side in sides]
        for block in LCSseq.opcodes(*tokens):
            if block.tag == "equal":
                length = block.src_end - block.src_start
                found += (
                    (sides[0][block.src_start + i][1], sides[1][block.dest_start + i][1])
                    for i in range(length)
                )
    total = sum(map(len, calls.values()))
    return found, [f"{len(found)} of {total} API calls were held against ops, by family, size and order"]


def _result(record: StoredRecord) -> StoredSlot | None:
    return next((s for s in record.slots if s.role != "in" and s.is_tensor and s.content >= 0), None)


def _token(name: str, slot: StoredSlot) -> _Token:
    return name, math.prod(slot.shape), slot.shape[-1] if slot.shape else 1


class _Records(ReaderView):
    """A view of a rank whose records are given, those of the rank among them."""

    def __init__(self, whole: RankReader, records: Iterable[StoredRecord]) -> None:
        super().__init__(whole)
        self._here = {record.seq: record for record in records}
        self.num_records = len(self._here)

    def records(self, **where: Any) -> Iterator[StoredRecord]:
        for record in self._here.values():
            if all(getattr(record, name) == value for name, value in where.items()):
                yield record

    def record(self, seq: int) -> StoredRecord:
        return self._here[seq]


class _WithCalls(_Records):
    """Ops, and behind them the result of each that a call has, as the capture that the dump has of it."""

    def __init__(self, ours: RankReader, pairs: list[_Pair]) -> None:
        records = list(ours.records())
        number = 1 + max((record.seq for record in records), default=-1)
        for seq, (call, op) in enumerate(pairs, start=number):
            slot = _result(op)
            assert slot is not None
            shown = replace(slot, name="out", role="out", index=0, producers=((op.seq, slot.index),))
            records.append(replace(call, seq=seq, opened=seq, step=op.step, rank=op.rank, slots=(shown,)))
        super().__init__(ours, records)


class _AsOps(_Records):
    """A dump's calls as the ops that they are, where the other trace has them, with views between them."""

    def __init__(self, dump: RankReader, ours: RankReader, pairs: list[_Pair]) -> None:
        calls = {op.seq: call for call, op in pairs}
        steps = {op.step: call.step for call, op in pairs}
        kept = [r for r in ours.records(kind="op") if r.step in steps and (r.seq in calls or edge_input(r))]
        seqs = {record.seq for record in kept}
        records = [
            replace(
                record,
                rank=dump.rank,
                step=steps[record.step],
                slots=tuple(_without_data(record, calls.get(record.seq), seqs)),
            )
            for record in kept
        ]
        number = 1 + max(seqs, default=-1)
        placed = {call.seq for call, _ in pairs}
        others = (record for record in dump.records() if record.seq not in placed)
        records += (replace(record, seq=seq, opened=seq) for seq, record in enumerate(others, start=number))
        super().__init__(dump, records)
        options = {**(dump.header.get("options") or {}), "level": "op", "inputs": True}
        self.header = {**dump.header, "options": options}


def _without_data(record: StoredRecord, call: StoredRecord | None, seqs: set[int]) -> Iterator[StoredSlot]:
    """The slots of an op as the dump knows them: its result, and which calls it read."""
    result = _result(record)
    for slot in record.slots:
        if call is not None and slot is result:
            yield replace(call.slots[0], name=slot.name, role=slot.role, index=slot.index)
        elif slot.is_tensor:
            producers = tuple(p for p in slot.producers if p[0] in seqs)
            yield replace(slot, content=-1, producers=producers, leaf=slot.role == "in" and not producers)
        else:
            yield slot


__all__ = ["family_of_call", "placed_calls"]
