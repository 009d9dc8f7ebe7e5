"""How narrowly a decision fell: the margin of a comparison, choice or rounding that came out otherwise."""

from __future__ import annotations

import numpy as np

from dispatch_trace.align.canon import short
from dispatch_trace.align.pairs import Link
from dispatch_trace.align.row_sums import Array
from dispatch_trace.judge.noise import NoisePass
from dispatch_trace.schema import StoredRecord

_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_CHOICES = frozenset({"argmax", "argmin", "max", "min", "topk", "sort", "argsort"})
_ROUNDINGS = frozenset({"round", "floor", "ceil", "trunc"})


def decision_margin(noise: NoisePass, record: StoredRecord, link: Link) -> float | None:
    """The largest margin by which a decision of the target fell otherwise, from what the target recorded.

    Comparisons: |a - b| where the answers differ. Choices: how far apart, in the target's own scores, what it
    chose and what the reference chose are. Rounding: how far the number is from where the result changes.

    Args:
      record: a discrete op of the target; link: of its result.
    Returns: in units of the root mean square of the first operand; None where it cannot be told.
    """
    comparer, target = noise.pairing.comparer, noise.pairing.target
    name = short(record.op)
    ours, theirs = comparer.array(False, link.target_content), comparer.array(True, link.ref_content)
    reads = target.inputs(record)
    if ours is None or theirs is None or ours.shape != theirs.shape or not reads:
        return None
    contents = [target.held_content(record, slot) for slot in reads]
    operands = [comparer.array(False, content) if content >= 0 else None for content in contents]
    first = operands[0]
    differs = ours != theirs
    if first is None or not differs.any():
        return None
    args = dict(record.args)
    gap: Array | None = None
    if name in _COMPARISONS:
        other = operands[1] if len(operands) > 1 else args.get("other")
        if other is not None and not isinstance(other, dict):
            gap = np.abs(np.broadcast_to(first - other, ours.shape)[differs])
    elif name in _CHOICES:
        gap = _choice_gap(first, ours, theirs, args)
    elif name in _ROUNDINGS and first.shape == ours.shape:
        place = first[differs] - (0.5 if name == "round" else 0.0)
        gap = np.abs(place - np.round(place))
    size = float(np.sqrt(np.mean(np.square(first[np.isfinite(first)])))) if np.isfinite(first).any() else 0.0
    if gap is None or not gap.size or not size or not np.isfinite(gap).any():
        return None
    return float(gap[np.isfinite(gap)].max()) / size


def _choice_gap(scores: Array, ours: Array, theirs: Array, args: dict[str, object]) -> Array | None:
    """|score of our choice - score of theirs|, along the dim of the op."""
    dim = args.get("dim", -1)
    if dim is None:
        flat = scores.reshape(-1)
        apart: Array = np.abs(flat[ours.astype(np.int64)] - flat[theirs.astype(np.int64)])
        return apart.reshape(-1)
    if not isinstance(dim, int) or (ours != np.round(ours)).any():
        return None  # values, not places
    chosen = [x.astype(np.int64) for x in (ours, theirs)]
    if ours.ndim == scores.ndim - 1:
        chosen = [np.expand_dims(x, dim) for x in chosen]
    if chosen[0].ndim != scores.ndim or max(x.max(initial=0) for x in chosen) >= scores.shape[dim]:
        return None  # the reference chose among more
    mine, other = (np.take_along_axis(scores, x, dim) for x in chosen)
    gap: Array = np.abs(mine - other)
    return gap.reshape(-1)


__all__ = ["decision_margin"]
