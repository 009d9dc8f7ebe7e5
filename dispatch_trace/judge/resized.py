"""Where sizes follow a decision, and where the program was laid out by it.

Behind a decision that falls otherwise (a router's choice, a mask) an op may give another number of elements
(`nonzero`, say). A float64 run makes such sizes anew, whichever way the decision falls there. What it cannot
make anew is what the program did with them outside of tensors: a number read back and handed to an op as its
argument, or a branch. Those are the recorded ones, and fit the recorded decision alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from dispatch_trace.align.canon import short
from dispatch_trace.align.pairs import Pairing
from dispatch_trace.schema import StoredRecord

# Arguments that number dims: no size, and no place among what was chosen.
_DIMS = frozenset({"dim", "dims", "dim0", "dim1", "axis"})
# Ops that hand numbers to the program.
_READ_BACK = frozenset({"_local_scalar_dense", "item", "equal", "is_nonzero"})


def sized_otherwise(pairing: Pairing) -> list[int]:
    """The target's first op of each call whose result has another size than the reference's same op."""
    found = []
    for ref, target in _bodies(pairing):
        for ours, theirs in zip(ref, target, strict=False):
            if ours.op != theirs.op:
                break
            if _sizes(ours) != _sizes(theirs):
                found.append(theirs.seq)
                break
    return found


def laid_out_otherwise(pairing: Pairing, first: int) -> int:
    """The target's first call, from one of its ops on, whose program took another way than the reference's
    because sizes differ: its first op there; 0 where none did.

    Other numbers as arguments of ops that both run as often, more or fewer numbers read back, more or fewer
    results of one op, and nothing in place of something: each may be a branch or a size that the program took
    from the decision. Ops that only one side has are none of these.
    """
    found = []
    for ref, target in _bodies(pairing):
        behind = [record for record in target if record.seq >= first]
        if behind and _differ(ref, target):
            found.append(behind[0].seq)
    return min(found, default=0)


def _differ(ref: Sequence[StoredRecord], target: Sequence[StoredRecord]) -> bool:
    ours, theirs = _by_name(ref), _by_name(target)
    for name in ours.keys() | theirs.keys():
        mine, other = ours[name], theirs[name]
        if len(mine) != len(other):
            if name in _READ_BACK:
                return True
        elif Counter(map(_form, mine)) != Counter(map(_form, other)):
            return True
    return False


def _by_name(records: Sequence[StoredRecord]) -> dict[str, list[StoredRecord]]:
    found: dict[str, list[StoredRecord]] = defaultdict(list)
    for record in records:
        found[short(record.op)].append(record)
    return found


def _form(record: StoredRecord) -> tuple[str, int, bool]:
    """What an op was told in numbers, how many results it has, and whether they are empty."""
    outs = _sizes(record)
    told = [_numbers(value) for name, value in record.args if name not in _DIMS]
    return repr(told), len(outs), any(0 in shape for shape in outs)


def _numbers(value: Any) -> Any:
    """What of an argument may be a size or a place: its integers, those that were read back too."""
    if isinstance(value, Mapping):
        return _numbers(value["item"][0]) if "item" in value else None
    if isinstance(value, (list, tuple)):
        return [_numbers(v) for v in value]
    return value if type(value) is int else None


def _sizes(record: StoredRecord) -> list[tuple[int, ...]]:
    return [slot.shape for slot in record.slots if slot.role == "out"]


def _bodies(pairing: Pairing) -> Iterator[tuple[list[StoredRecord], list[StoredRecord]]]:
    """The ops of paired calls, in order."""
    for key, other in pairing.calls.items():
        calls = pairing.ref.calls[key], pairing.target.calls[other]
        ref, target = (sorted(chain(*call.ops.values()), key=lambda r: r.seq) for call in calls)
        yield ref, target


__all__ = ["laid_out_otherwise", "sized_otherwise"]
