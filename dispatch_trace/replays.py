"""Ops that are paired, run again on what each of them read: how well either side computes.

Each op runs alone in float64 on its own recorded inputs, so that pairs can go to any executor; what
comes out does not depend on which.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import lru_cache

from dispatch_trace.align.pairs import Pair
from dispatch_trace.errors import DispatchTraceError
from dispatch_trace.schema import StoredRecord
from dispatch_trace.store.reader import RankReader
from dispatch_trace.store.remote import place
from dispatch_trace.workers import LocalProcesses

WORTHWHILE_PAIRS = 1000  # from which on processes are started: each of them imports torch
_BATCH = 64

Side = tuple[str, int]
Errors = tuple[float | None, float | None, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What came of one pair.

    Attributes:
      pair: the pair.
      ref_error, target_error: relative L2 error of the first recorded output against the same op in float64
        on the same recorded inputs; None where it could not be run.
      why: why one of them could not, "" where both were.
    """

    pair: Pair
    ref_error: float | None
    target_error: float | None
    why: str = ""

    @property
    def ratio(self) -> float | None:
        """How many times the reference's error the target makes; inf where only the reference makes none."""
        if self.ref_error is None or self.target_error is None:
            return None
        if self.ref_error == 0.0:
            return 1.0 if self.target_error == 0.0 else math.inf
        return self.target_error / self.ref_error


def replay_pairs(
    pairs: Sequence[Pair],
    ref: RankReader,
    target: RankReader,
    *,
    executor: Executor | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Replayed]:
    """Runs the ops of pairs again; pairs that are not of two ops are left out.

    Args:
      ref, target: the ranks that the pairs are of.
      executor: where to run them; its workers open the traces by path or URL. None: processes of this
        machine where there are many pairs, else this one.
      progress: called with (pairs done, pairs in all).
    """
    chosen = [(pair, _seqs(pair)) for pair in pairs]
    ops = [(pair, seqs) for pair, seqs in chosen if seqs is not None]
    batches = [[seqs for _, seqs in ops[at : at + _BATCH]] for at in range(0, len(ops), _BATCH)]
    sides = (str(ref.path), ref.rank), (str(target.path), target.rank)
    if executor is None and len(ops) >= WORTHWHILE_PAIRS and (os.cpu_count() or 1) > 1:
        with LocalProcesses() as processes:
            found = _run(batches, sides, processes, len(ops), progress)
    else:
        found = _run(batches, sides, executor, len(ops), progress)
    return [
        Replayed(pair=pair, ref_error=a, target_error=b, why=why)
        for (pair, _), (a, b, why) in zip(ops, found, strict=True)
    ]


def _run(
    batches: Sequence[list[tuple[int, int]]],
    sides: tuple[Side, Side],
    executor: Executor | None,
    total: int,
    progress: Callable[[int, int], None] | None,
) -> list[Errors]:
    futures = None if executor is None else [executor.submit(replay_batch, *sides, b) for b in batches]
    found: list[Errors] = []
    for number, batch in enumerate(batches):
        found += replay_batch(*sides, batch) if futures is None else futures[number].result()
        if progress is not None:
            progress(len(found), total)
    return found


def replay_batch(ref: Side, target: Side, seqs: Sequence[tuple[int, int]]) -> list[Errors]:
    """Runs in a worker: errors of pairs of op records, in order.

    Args:
      ref, target: directory of a rank, and its number.
      seqs: of the reference's record, and of the target's.
    """
    readers = _reader(*ref), _reader(*target)
    found: list[Errors] = []
    for pair in seqs:
        errors: list[float | None] = []
        reasons = []
        for name, reader, seq in zip(("reference", "target"), readers, pair, strict=True):
            try:
                errors.append(_error(reader, seq))
            except (DispatchTraceError, RuntimeError, TypeError) as error:  # torch says no in many ways
                errors.append(None)
                reasons.append(f"{name}: {error}")
        found.append((errors[0], errors[1], "; ".join(reasons)))
    return found


def _error(reader: RankReader, seq: int) -> float:
    from dispatch_trace import execute  # it needs torch
    from dispatch_trace.metrics import relative_l2

    record = reader.record(seq)
    truth = execute.execute_record(reader, seq)
    slot = next(s for s in record.slots if s.role != "in" and s.is_tensor)
    recorded = execute.tensor(reader, seq, slot.name)
    return relative_l2(recorded.double(), truth[slot.name].double())


def _seqs(pair: Pair) -> tuple[int, int] | None:
    if pair.outcome != "matched" or not (_computes(pair.ref) and _computes(pair.target)):
        return None
    assert pair.ref is not None and pair.target is not None
    return pair.ref.seq, pair.target.seq


def _computes(record: StoredRecord | None) -> bool:
    """An op whose first output is floating point and no view."""
    if record is None or record.kind != "op" or record.light or record.random:
        return False
    outputs = [slot for slot in record.slots if slot.role != "in" and slot.is_tensor]
    return bool(outputs) and outputs[0].dtype.startswith(("float", "bfloat"))


@lru_cache(maxsize=4)
def _reader(path: str, rank: int) -> RankReader:
    return RankReader(place(path), rank)
