"""Records and pairs as flat rows: one name, one type, one value a column."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dispatch_trace.align.pairs import Pair
from dispatch_trace.metrics import derived
from dispatch_trace.report.facts import site_of
from dispatch_trace.schema import DERIVED_STATISTICS, STATISTICS
from dispatch_trace.store.reader import RankReader

_SITE = {
    "seq": "BIGINT",
    "kind": "VARCHAR",
    "step": "BIGINT",
    "rank": "BIGINT",
    "model": "VARCHAR",
    "grad_phase": "VARCHAR",
    "module": "VARCHAR",
    "call": "BIGINT",
    "op": "VARCHAR",
    "n": "BIGINT",
    "name": "VARCHAR",
    "source": "VARCHAR",
}
_WHOLE = ("n", "nan", "posinf", "neginf", "zeros")

# Columns of a table and their SQL types. A statistic `n` is `numel`: `n` is part of the site key.
RECORD_COLUMNS = {
    **_SITE,
    "overload": "VARCHAR",
    "note": "VARCHAR",
    "light": "BOOLEAN",
    "random": "BOOLEAN",
    "slot": "VARCHAR",
    "role": "VARCHAR",
    "dtype": "VARCHAR",
    "shape": "VARCHAR",
    "device": "VARCHAR",
    "leaf": "BOOLEAN",
    "hash": "VARCHAR",
    **{("numel" if name == "n" else name): "BIGINT" if name in _WHOLE else "DOUBLE" for name in STATISTICS},
    **{name: "DOUBLE" for name in DERIVED_STATISTICS},
}
PAIR_COLUMNS = {
    **{f"ref_{name}": kind for name, kind in _SITE.items()},
    **{f"target_{name}": kind for name, kind in _SITE.items()},
    "outcome": "VARCHAR",
    "method": "VARCHAR",
    "confidence": "DOUBLE",
    "error": "DOUBLE",
    "band": "DOUBLE",
    "label": "VARCHAR",
    "worst_row": "VARCHAR",
    "worst_row_error": "DOUBLE",
    "notes": "VARCHAR",
}


@dataclass(slots=True)
class Exported:
    """What became of a trace.

    Attributes:
      num_rows: written.
      left_out: in words, what the form has no place for.
      files: written besides.
    """

    num_rows: int = 0
    left_out: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)


def record_rows(ranks: Sequence[RankReader]) -> Iterator[dict[str, Any]]:
    """A row for each tensor of each record; a record without one has a single row without a slot."""
    for reader in ranks:
        for record in reader.records():
            about = {
                **site_of(record),
                "overload": record.overload,
                "note": record.note,
                "light": record.light,
                "random": record.random,
            }
            slots = [slot for slot in record.slots if slot.is_tensor]
            for slot in slots:
                row = {
                    **about,
                    "slot": slot.name,
                    "role": slot.role,
                    "dtype": slot.dtype,
                    "shape": json.dumps(list(slot.shape)),
                    "device": slot.device,
                    "leaf": slot.leaf,
                }
                if slot.content >= 0:
                    content = reader.content(slot.content)
                    stats = dict(content.stats)
                    row["hash"] = content.hash
                    row |= {("numel" if name == "n" else name): value for name, value in stats.items()}
                    row |= derived(stats) if stats else {}
                yield row
            if not slots:
                yield about


def pair_rows(pairs: Iterable[Pair]) -> Iterator[dict[str, Any]]:
    """A row for each pair, and for each record without a partner."""
    return map(flat_pair, pairs)


def flat_pair(pair: Pair) -> dict[str, Any]:
    """A pair as one row: the sites of both sides, each name with its side in front, then what was found."""
    row: dict[str, Any] = {}
    for side, record in (("ref", pair.ref), ("target", pair.target)):
        if record is not None:
            row |= {f"{side}_{name}": value for name, value in site_of(record).items()}
    worst = pair.worst_row
    return row | {
        "outcome": pair.outcome,
        "method": pair.method,
        "confidence": pair.confidence,
        "error": pair.error,
        "band": pair.band,
        "label": pair.label,
        "worst_row": None if worst is None else json.dumps([int(index) for index in worst[0]]),
        "worst_row_error": None if worst is None else worst[1],
        "notes": "; ".join(pair.notes),
    }
