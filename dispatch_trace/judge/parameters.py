"""Parameters of one name that differ by more than a change of dtype explains.

In lower precision a weight may be another one and its effect still drown in the noise of every value it
reaches: a row of zeros in a bfloat16 weight changes the output less than rounding does. Values cannot show
it then, but the weights themselves can: rounded to the coarser of the two dtypes they must be equal, up to
one unit in the last place where somebody rounded twice (BLAME.md, sections 1.2 and 4).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dispatch_trace.align.pairs import Link, Pairing
from dispatch_trace.align.row_sums import CHUNK, Array
from dispatch_trace.metrics import FLOAT_FORMATS, coarser, round_to, unit_roundoff
from dispatch_trace.schema import StoredRecord

# One unit in the last place, as large as it gets relative to a value, is owed to rounding twice.
_ROUNDED_TWICE = 2.0 * (1 + 1e-9)


@dataclass(frozen=True, slots=True)
class ChangedParameter:
    """A parameter that is another one than the reference's.

    Attributes:
      ref, target: the parameter records.
      reader: the first op of the target that reads it.
      num_elements, num_changed: of the parameter, and of them those beyond rounding.
      error: ||target - ref|| / ||ref|| after rounding both to the coarser dtype.
    """

    ref: StoredRecord
    target: StoredRecord
    reader: StoredRecord
    num_elements: int
    num_changed: int
    error: float


def changed_parameters(pairing: Pairing) -> Iterator[ChangedParameter]:
    """Parameters of both traces, with data and of two float dtypes, that are not one value rounded."""
    for links in list(pairing.links.values()):
        for link in links:
            found = _changed(pairing, link) if link.method == "param" else None
            if found is not None:
                yield found


def _round_alike(coarse: Array, fine: Array) -> bool:
    """Whether bfloat16 numbers, as float32, are certainly those that float32 ones round to.

    By bits, in a tenth of the time that arithmetic takes; False where that does not settle it.
    """
    if coarse.dtype != np.float32 or fine.dtype != np.float32:
        return False
    half, odd = np.uint32(0x7FFF), np.uint32(1)
    a, b = coarse.reshape(-1), fine.reshape(-1)
    for start in range(0, a.size, CHUNK):
        bits = b[start : start + CHUNK].view(np.uint32)
        rounded = bits >> np.uint32(16)
        rounded &= odd
        rounded += half
        rounded += bits
        rounded ^= a[start : start + CHUNK].view(np.uint32)
        if int(rounded.max()) > 0xFFFF or not np.isfinite(a[start : start + CHUNK]).all():
            return False
    return True


def _changed(pairing: Pairing, link: Link) -> ChangedParameter | None:
    readers = pairing.target.consumers.get(link.target)
    if not readers or link.ref_content < 0 or link.target_content < 0:
        return None
    if pairing.comparer.layout(link.ref_content) is not None:
        return None
    if pairing.comparer.target.together(link.target_content) is not None:
        return None  # several, none of which has data
    a = pairing.comparer.ref.content(link.ref_content)
    b = pairing.comparer.target.content(link.target_content)
    if a.dtype == b.dtype or a.shape != b.shape or not {a.dtype, b.dtype} <= FLOAT_FORMATS.keys():
        return None
    theirs = pairing.comparer.array(True, link.ref_content)
    ours = pairing.comparer.array(False, link.target_content)
    if theirs is None or ours is None:
        return None
    common = coarser(a.dtype, b.dtype)
    if common == "bfloat16" and _round_alike(*((ours, theirs) if b.dtype == common else (theirs, ours))):
        return None
    ref, target = round_to(theirs, common), round_to(ours, common)
    if np.array_equal(ref, target):
        return None
    finite = np.isfinite(ref) & np.isfinite(target)
    step = _ROUNDED_TWICE * unit_roundoff(common) * np.maximum(np.abs(ref), np.abs(target))
    changed = finite & (np.abs(target - ref) > step)
    count = int(changed.sum())
    norm = float(np.linalg.norm(ref[finite]))
    if not count or not norm:
        return None
    error = float(np.linalg.norm((target - ref)[finite])) / norm
    records = pairing.target.records
    return ChangedParameter(
        ref=pairing.ref.records[link.ref[0]],
        target=records[link.target[0]],
        reader=records[readers[0][0]],
        num_elements=ref.size,
        num_changed=count,
        error=error,
    )
