"""The rows of an alignment, packed for the HTML report: columns of numbers, texts by number.

20,000 rows must stay a page of a few megabytes, so a text stands once however often it occurs, and figures
keep six digits. Statistics come from the readers where the traces are still there; no tensor is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from dispatch_trace.align.lens import STRIDE
from dispatch_trace.align.pairs import Pair, main_slots
from dispatch_trace.errors import DispatchTraceError
from dispatch_trace.judge.findings import Finding, row_of
from dispatch_trace.report.listing import argument, stats_of, what
from dispatch_trace.report.table import shorten
from dispatch_trace.schema import StoredRecord, StoredSlot
from dispatch_trace.store.reader import RankReader

Readers: TypeAlias = Mapping[int, RankReader]
Side: TypeAlias = tuple[StoredRecord, StoredSlot | None]

STATS = ("n", "nan", "posinf", "neginf", "zeros", "min", "max", "mean", "std", "abs_mean", "rms", "l2")
MAX_ARGUMENT = 160
MAX_LINKS = 24


class Texts:
    """Texts by number, each once."""

    def __init__(self) -> None:
        self.all: list[str] = [""]
        self._known = {"": 0}

    def __call__(self, text: str) -> int:
        number = self._known.get(text)
        if number is None:
            number = self._known[text] = len(self.all)
            self.all.append(text)
        return number


class Rows:
    """Rows as columns.

    Attributes:
      columns: by name one entry a row; what each holds stands in docs/report.md.
      texts: what numbers in columns of texts stand for.
    """

    def __init__(
        self, pairs: Sequence[Pair], findings: Sequence[Finding], ref: Readers, target: Readers
    ) -> None:
        self.texts = Texts()
        self.pairs = pairs
        self._readers = (ref, target)
        self.by_seq = _by_seq(pairs)
        self.finding_rows = [row_of(pairs, finding) for finding in findings]
        self._about: dict[int, Finding] = {}
        for row, finding in zip(self.finding_rows, findings, strict=True):
            if row is not None:
                self._about.setdefault(row, finding)
        self.columns: dict[str, list[Any]] = {}
        for number, pair in enumerate(pairs):
            for name, value in self._row(number, pair).items():
                self.columns.setdefault(name, []).append(value)

    def sides(self, number: int) -> tuple[Side | None, Side | None]:
        """Record and main output of both sides; the reference's is the finding's where the pair has none."""
        pair = self.pairs[number]
        ref, target = pair.ref, pair.target
        finding = self._about.get(number)
        if ref is None and finding is not None and target is not None:
            row = self.by_seq.get((0, target.rank, finding.ref_seq))
            ref = None if row is None else self.pairs[row].ref
        slots = main_slots(ref, target)
        first, second = (
            None if record is None else (record, slot)
            for record, slot in zip((ref, target), slots, strict=True)
        )
        return first, second

    def links(self, number: int) -> list[tuple[str, int]]:
        """(slot, row) of what the row's record read."""
        pair = self.pairs[number]
        record = pair.target or pair.ref
        assert record is not None, "a pair has at least one side"
        side = 0 if pair.target is None else 1
        found: list[tuple[str, int]] = []
        for slot in record.slots:
            for seq, _ in slot.producers if slot.role == "in" else ():
                row = self.by_seq.get((side, record.rank, seq))
                if row is not None and row != number and len(found) < MAX_LINKS:
                    found.append((slot.name, row))
        row = self.by_seq.get((side, record.rank, record.producer)) if record.kind == "module" else None
        return found if row is None else [*found, ("out", row)]

    # ----------------------------------------------------------------------------------------------

    def _row(self, number: int, pair: Pair) -> dict[str, Any]:
        texts = self.texts
        record = pair.target or pair.ref
        assert record is not None, "a pair has at least one side"
        finding = self._about.get(number)
        known = finding.evidence if finding is not None and pair.error is None else {}
        sides = self.sides(number)
        stats = [self._stats(i, side) for i, side in enumerate(sides)]
        slots = [None if side is None else side[1] for side in sides]
        moves = record.light or record.kind == "param" or pair.outcome == "deselected"
        return {
            "ref": None if pair.ref is None else pair.ref.seq,
            "target": None if pair.target is None else pair.target.seq,
            "step": record.step,
            "rank": record.rank,
            "model": texts(record.model),
            "module": texts(record.module),
            "ref_module": texts(pair.ref.module if pair.ref is not None else record.module),
            "call": record.call,
            "kind": texts(record.kind),
            "what": texts(what(record).removeprefix("aten.")),
            "op": texts(record.op),
            "outcome": texts(pair.outcome),
            "method": texts(pair.method),
            "confidence": figure(pair.confidence),
            "error": figure(known.get("error", pair.error)),
            "band": figure(known.get("band", pair.band)),
            "label": texts(finding.label if finding is not None else pair.label),
            "dtypes": [texts("" if slot is None else slot.dtype) for slot in slots],
            "shapes": [texts("" if slot is None else _shape(slot)) for slot in slots],
            "sources": [texts(_source(r)) for r in (pair.ref, pair.target)],
            "quiet": int(moves and not pair.label and finding is None),
            "worst_row": None if pair.worst_row is None else [*pair.worst_row[0], figure(pair.worst_row[1])],
            "notes": [texts(note) for note in pair.notes],
            "up": [[texts(slot), row] for slot, row in self.links(number)],
            "args": [self._arguments(r) for r in (pair.ref, pair.target)],
            "stats": [stats[0], None if stats[0] == stats[1] else stats[1]],
            "slot": texts("" if slots[1] is None else slots[1].name),
        }

    def _arguments(self, record: StoredRecord | None) -> list[list[int]]:
        """(name, text) by number: tensors by dtype and shape, which is what can differ."""
        if record is None:
            return []
        found = []
        for name, value in record.args:
            text = argument(value, record.slots)
            if isinstance(value, dict) and set(value) == {"ref"}:
                index = value["ref"]
                if isinstance(index, int) and 0 <= index < len(record.slots):
                    text = f"{record.slots[index].dtype} {_shape(record.slots[index])}"
            found.append([self.texts(name), self.texts(shorten(text, MAX_ARGUMENT))])
        return found

    def _stats(self, number: int, side: Side | None) -> list[Any] | None:
        """`STATS` of the main output; None where none were taken, or where the trace is gone."""
        if side is None or side[1] is None or side[1].content < 0:
            return None
        reader = self._readers[number].get(side[0].rank)
        if reader is None:
            return None
        try:
            stats = stats_of(reader, side[1].content % STRIDE)
        except (DispatchTraceError, KeyError):
            return None
        return [figure(stats.get(name)) for name in STATS] if stats else None


def _by_seq(pairs: Sequence[Pair]) -> dict[tuple[int, int, int], int]:
    """(side, rank, seq) -> row; a record that stands in several rows is found in the first."""
    found: dict[tuple[int, int, int], int] = {}
    for number, pair in enumerate(pairs):
        for side, record in enumerate((pair.ref, pair.target)):
            if record is not None:
                found.setdefault((side, record.rank, record.seq), number)
    return found


def _shape(slot: StoredSlot) -> str:
    return "[" + ", ".join(map(str, slot.shape)) + "]"


def _source(record: StoredRecord | None) -> str:
    return "" if record is None or record.source is None else f"{record.source[0]}:{record.source[1]}"


def figure(value: Any) -> Any:
    """Six digits; whole numbers as they are, and numbers that JSON lacks as text."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
        rounded = float(f"{value:.6g}")
        return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
    return value
