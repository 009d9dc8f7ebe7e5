"""Two runs of one program: where they differ, an op is not deterministic, and that is said first.

One program is: the same recording options and settings of torch, the same modules, the same ops with the
same arguments in the same order, reading the same leaves. The first value that is another one was then
computed from equal inputs.
"""

from __future__ import annotations

import itertools
from typing import Any

from dispatch_trace.judge.findings import Finding
from dispatch_trace.schema import NO_CALL, StoredRecord, StoredSlot
from dispatch_trace.store.reader import RankReader

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
    first: tuple[StoredRecord, StoredRecord, StoredSlot] | None = None
    for a, b in itertools.zip_longest(ref.records(), other.records()):
        if (
            a is None
            or b is None
            or a.key != b.key
            or a.overload != b.overload
            or len(a.slots) != len(b.slots)
        ):
            return None
        if first is None and not _same_scalars(a.args, b.args):
            return None
        for mine, theirs in zip(a.slots, b.slots, strict=True):
            if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
                if first is None:
                    return None
                continue
            if mine.content < 0 or theirs.content < 0 or not mine.is_tensor:
                continue
            x, y = ref.content(mine.content).hash, other.content(theirs.content).hash
            if not x or not y or x == y:
                continue
            if a.kind == "param" or (mine.leaf and not mine.uninitialised):
                return None  # other leaves: another program, or other inputs
            if first is None and mine.role != "in":
                first = a, b, theirs
    return None if first is None else _finding(*first)


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
