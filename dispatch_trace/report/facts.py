"""An alignment as plain data for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dispatch_trace.align.pairs import Pair
from dispatch_trace.schema import NO_CALL, StoredRecord


def pair_row(pair: Pair) -> dict[str, Any]:
    """A row of the alignment: both sites, outcome, error and band."""
    return {
        "ref": None if pair.ref is None else site_of(pair.ref),
        "target": None if pair.target is None else site_of(pair.target),
        "outcome": pair.outcome,
        "method": pair.method,
        "confidence": pair.confidence,
        "error": pair.error,
        "band": pair.band,
        "label": pair.label,
        "worst_row": None if pair.worst_row is None else [list(pair.worst_row[0]), pair.worst_row[1]],
        "notes": pair.notes,
    }


def site_of(record: StoredRecord) -> dict[str, Any]:
    """The site key of a record and where it stands in the trace."""
    return {
        "seq": record.seq,
        "kind": record.kind,
        "step": record.step,
        "rank": record.rank,
        "model": record.model,
        "grad_phase": record.grad_phase,
        "module": record.module,
        "call": None if record.call == NO_CALL else record.call,
        "op": record.op or None,
        "n": record.n,
        "name": record.name,
        "source": None if record.source is None else f"{record.source[0]}:{record.source[1]}",
    }


def jsonable(value: Any) -> Any:
    """Plain data; numbers that JSON lacks become "inf", "-inf" and "nan"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(v) for v in value]
    if isinstance(value, np.generic):
        return jsonable(value.item())
    return value
