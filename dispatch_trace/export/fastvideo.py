"""JSON lines in the form of FastVideo's activation trace, so that a `diff` of two files works as before.

    {"module": "blocks.0", "tensor": "out", "step": 3, "abs_mean": 0.1, "sum": -3.5, "max": 2, "shape": [8]}

One line a tensor that a module returned in a forward pass, in the order of the run; the form is that of
FastVideo's docs/contributing/activation_trace.md. `compat.fastvideo` reads it back.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dispatch_trace.errors import ConfigError
from dispatch_trace.export.rows import Exported
from dispatch_trace.export.tables import whole_file
from dispatch_trace.metrics import derived
from dispatch_trace.report.facts import jsonable
from dispatch_trace.schema import StoredRecord, StoredSlot
from dispatch_trace.store.reader import RankReader

STATS = ("abs_mean", "sum", "min", "max", "mean", "std", "shape", "dtype")
DEFAULT_STATS = ("abs_mean", "sum", "max", "shape")


def write_lines(ranks: Sequence[RankReader], path: Path, *, stats: Sequence[str] | None = None) -> Exported:
    """Writes the first rank's module outputs.

    Args:
      stats: which of `STATS`, in this order; None for `DEFAULT_STATS`.
    Raises:
      ConfigError: a name is none of them.
      OSError: the file cannot be written.
    """
    names = tuple(stats) if stats is not None else DEFAULT_STATS
    for name in names:
        if name not in STATS:
            raise ConfigError(f"stats={name!r}: expected one of {', '.join(STATS)}.")
    reader, done, left = ranks[0], Exported(), Counter[str]()
    if len(ranks) > 1:
        left["ranks"] = len(ranks) - 1
    with whole_file(path) as file:
        for record in reader.records():
            if record.kind != "module" or record.grad_phase != "fwd":
                left["backward or recomputed" if record.kind == "module" else record.kind] += 1
                continue
            for slot in record.slots:
                if slot.role != "out" or not slot.is_tensor:
                    left["inputs and plain values of modules"] += 1
                    continue
                file.write(json.dumps(_line(reader, record, slot, names), allow_nan=False) + "\n")
                done.num_rows += 1
    done.left_out = [f"{count} {_WORDS.get(what, what)}" for what, count in left.items()]
    return done


_WORDS = {"op": "records of ops", "param": "parameters", "inline": "inline captures", "ranks": "other ranks"}


def _line(reader: RankReader, record: StoredRecord, slot: StoredSlot, names: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {} if slot.content < 0 else dict(reader.content(slot.content).stats)
    found |= derived(found) if found else {}
    found |= {"shape": list(slot.shape), "dtype": f"torch.{slot.dtype}"}
    module = ".".join(filter(None, (record.model, record.module)))
    line = {"module": module, "tensor": slot.name, "step": record.step}
    values: dict[str, Any] = jsonable({name: found[name] for name in names if found.get(name) is not None})
    return line | values
