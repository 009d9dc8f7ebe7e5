"""Two runs of one program: where they differ, an op is not deterministic, and that is said first.

One program is: the same recording options and settings of torch, the same modules, the same ops with the
same arguments in the same order, reading the same leaves and results. The first value that is another one
was then computed from equal inputs.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any, TypeAlias

from dispatch_trace.align.recompute import redrawn
from dispatch_trace.judge.findings import Finding
from dispatch_trace.schema import NO_CALL, StoredRecord, StoredSlot
from dispatch_trace.store.reader import RankReader

# Records of both runs, and the slot of the second.
_Place: TypeAlias = tuple[StoredRecord, StoredRecord, StoredSlot]

# What must agree for two headers to speak of one program in one environment.
_SETTINGS = (
    "options",
    "modules",
    "models",
    "torch_version",
    "num_threads",
    "cpu_capability",
    "processor",
    "onednn",
    "device",
    "grad_enabled",
    "deterministic",
    "float32_matmul_precision",
    "compile_backend",
    "environment",
    "world_size",
)


def first_unrepeated(ref: RankReader, other: RankReader) -> Finding | None:
    """The first op (or module) that gives another result in a second run of one program.

    Returns: a `nondeterministic` finding about `other`, or None: the runs agree, or are not of one program,
      or no hashes tell.
    """
    if any(ref.header.get(name) != other.header.get(name) for name in _SETTINGS):
        return None
    if ref.path.resolve() == other.path.resolve() or not (ref.complete and other.complete):
        return None
    if (ref.header.get("options") or {}).get("inputs") is False:
        return None  # nothing says that both were given the same
    first: _Place | None = None
    for a, b in itertools.zip_longest(ref.records(), other.records()):
        if (
            a is None
            or b is None
            or a.key != b.key
            or a.overload != b.overload
            or len(a.slots) != len(b.slots)
        ):
            return None
        if ref.unfolded is not ref and not _same_shapes(a, b):
            return first_unrepeated(ref.unfolded, other.unfolded)  # what counts is which difference is first
        if first is None and not _same_scalars(a.args, b.args):
            return None
        for mine, theirs in zip(a.slots, b.slots, strict=True):
            if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
                if first is None:
                    return None
                continue
            if first is None and mine.producers != theirs.producers:
                return None  # it reads what another op made, or another part of it
            if mine.content < 0 or theirs.content < 0 or not mine.is_tensor:
                continue
            position = _first_other(ref, mine.content, other, theirs.content)
            if position < 0:
                continue
            if a.kind == "param" or (mine.leaf and not mine.uninitialised):
                return None  # other leaves: another program, or other inputs
            if mine.role != "in":
                found = ref.in_step(a, position), other.in_step(b, position), theirs
                if first is None or found[1].seq < first[1].seq:
                    first = found
    if first is None or _is_redrawn(*first[:2], ref, other):
        return None
    return _finding(*first)


def _is_redrawn(a: StoredRecord, b: StoredRecord, ref: RankReader, other: RankReader) -> bool:
    """Whether one of the runs alone draws other numbers where it computes its forward pass again: a bug."""
    if b.grad_phase != "recompute" or not b.random:
        return False
    again = [redrawn(run.records(), run.content) for run in (ref, other)]
    return (a.seq in again[0]) != (b.seq in again[1])


def _first_other(ref: RankReader, ref_id: int, other: RankReader, other_id: int) -> int:
    """In which of the steps that two contents stand for their hashes first differ; -1 where in none."""
    steps = ref.together(ref_id) or other.together(other_id)
    if steps is None:
        x, y = ref.content(ref_id).hash, other.content(other_id).hash
        return 0 if x and y and x != y else -1
    same = ref.per_step(ref_id, steps).has_hash_of(other.per_step(other_id, steps))
    return -1 if same.all() else int(same.argmin())


def _same_shapes(a: StoredRecord, b: StoredRecord) -> bool:
    shapes = ([(slot.shape, slot.dtype) for slot in record.slots] for record in (a, b))
    return a.args == b.args and operator.eq(*shapes)


def _finding(a: StoredRecord, b: StoredRecord, slot: StoredSlot) -> Finding:
    return Finding(
        module=b.module,
        call=None if b.call == NO_CALL else b.call,
        step=b.step,
        op=b.op or None,
        label="nondeterministic",
        evidence={"output": slot.name, "random": b.random, "kind": b.kind},
        source=None if b.source is None else f"{b.source[0]}:{b.source[1]}",
        fatal=False,
        hint="it drew other random numbers" if b.random else "another result from equal inputs",
        seq=b.seq,
        ref_seq=a.seq,
    )


def _same_scalars(ours: Any, theirs: Any) -> bool:
    """Arguments agree; a number that an op made (`.item()`) may be another one."""
    if isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        return len(ours) == len(theirs) and all(map(_same_scalars, ours, theirs))
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ("item" in ours and "item" in theirs) or ours == theirs
    return bool(ours == theirs) or (ours != ours and theirs != theirs)


__all__ = ["first_unrepeated"]
