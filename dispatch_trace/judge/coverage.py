"""Every record of both traces in one row each, and what share of them was compared."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from dispatch_trace.align.canon import is_empty
from dispatch_trace.align.graph import Program, Value, slot_numel
from dispatch_trace.align.named import keeps_last_call
from dispatch_trace.align.pairs import Outcome, Pair, Pairing, paired_slots
from dispatch_trace.judge.findings import Finding
from dispatch_trace.judge.noise import NoisePass
from dispatch_trace.per_step import chosen, greatest, is_smaller, per_step_of, total
from dispatch_trace.schema import StoredRecord

OUTCOMES: tuple[Outcome, ...] = ("matched", "absorbed", "ref-only", "target-only", "no-data", "deselected")
_WORST_FIRST: tuple[Outcome, ...] = (
    "ref-only",
    "target-only",
    "no-data",
    "matched",
    "absorbed",
    "deselected",
)
_WIDTHS = {"64": 8, "32": 4, "16": 2, "8": 1, "128": 16}


def make_pairs(pairing: Pairing, noise: NoisePass, findings: Iterable[Finding]) -> list[Pair]:
    """One row for each record of both traces, in the order of the target."""
    return _Rows(pairing, noise, findings).rows()


class _Rows:
    def __init__(self, pairing: Pairing, noise: NoisePass, findings: Iterable[Finding]) -> None:
        self._pairing = pairing
        self._noise = noise
        self._labels: dict[int, str] = {}
        self._weights = {pair.target.seq: pair for pair in pairing.weights}
        for finding in findings:
            self._labels.setdefault(finding.seq, finding.label)
        self._ref_absorbed: dict[Value, bool] = {}
        self._target_absorbed: dict[Value, bool] = {}
        self._dormant = self._deselected()
        self._kept = (self._kept_calls(pairing.target), self._kept_calls(pairing.ref))

    def rows(self) -> list[Pair]:
        pairing = self._pairing
        partners: dict[int, StoredRecord] = {t: pairing.ref.records[p.ref] for t, p in pairing.ops.items()}
        partners |= {target.seq: ref for ref, target in pairing.modules}
        partners |= self._params()
        used = {record.seq for record in partners.values()}
        rows: list[tuple[tuple[int, int], Pair]] = []
        last = {ref.seq: target for target, ref in partners.items()}
        for record in pairing.target.records.values():
            ref = partners.get(record.seq)
            row = self._matched(ref, record) if ref is not None else self._lone(pairing.target, record)
            rows.append(((record.seq, 0), row))
        place = -1
        for record in pairing.ref.records.values():
            place = max(place, last.get(record.seq, place)) if record.seq in used else place
            if record.seq not in used:
                rows.append(((place, record.seq + 1), self._lone(pairing.ref, record)))
        return [row for _, row in sorted(rows, key=lambda item: item[0])]

    def _params(self) -> dict[int, StoredRecord]:
        found: dict[int, StoredRecord] = {}
        pairing = self._pairing
        for (model, path, name), versions in pairing.ref.params.items():
            key = (pairing.models.get(model, model), pairing.renames.apply(path), name)
            for ref, target in zip(versions, pairing.target.params.get(key, ()), strict=False):
                found[target.seq] = ref
        for pair in pairing.weights:
            found[pair.target.seq] = pair.ref[0]
        return found

    def _matched(self, ref: StoredRecord, target: StoredRecord) -> Pair:
        label = self._labels.get(target.seq, "")
        if target.kind == "op":
            pair = self._pairing.ops[target.seq]
            row = Pair(
                ref=ref, target=target, outcome="matched", method=pair.method, confidence=pair.confidence
            )
        else:
            row = Pair(ref=ref, target=target, outcome="matched", method="path", confidence=1.0)
            weight = self._weights.get(target.seq)
            if weight is not None:
                row.method, row.confidence = f"content ({weight.method})", weight.confidence
            elif self._pairing.renames.found.get(ref.module, ref.module) != ref.module:
                row.method, row.confidence = "structure", 0.8
        row.label = label
        self._measure(row, ref, target)
        if row.error is None and target.kind == "op" and self._pairing.target.is_edge(target):
            row.outcome, row.method = "absorbed", "edge"
        elif row.error is None and not row.notes and target.kind == "module" and not _tensors(target):
            row.outcome = "matched"
        elif row.error is None and self._settled(ref, target):
            row.outcome = "absorbed"
        elif row.error is None:
            row.outcome = "no-data"
        return row

    def _settled(self, ref: StoredRecord, target: StoredRecord) -> bool:
        """Whether values that rows kept from comparison were compared where they are read (a cache, say)."""
        if self._pairing.plan is None or target.kind != "op" or ref.kind != "op":
            return False
        used = (self._pairing.target.consumers.get((target.seq, s.index)) for s in target.slots)
        return (
            any(used)
            and self._is_absorbed(self._pairing.target, target)
            and self._is_absorbed(self._pairing.ref, ref)
        )

    def _measure(self, row: Pair, ref: StoredRecord, target: StoredRecord) -> None:
        """The worst difference of outputs that somebody reads."""
        theirs = [s for s in ref.slots if s.role != "in" and s.is_tensor]
        outputs = [s for s in target.slots if s.role != "in" and s.is_tensor]
        for twin, slot in paired_slots(ref, theirs, target, outputs):
            unread = (
                target.kind == "op"
                and len(outputs) > 1
                and not self._pairing.target.consumers.get((target.seq, slot.index))
            )
            difference = self._pairing.compare_slots(ref, twin, target, slot)
            if target.seq in self._weights:
                laid_out = self._pairing.links.get((target.seq, slot.index), ())
                difference = next(map(self._pairing.compare, laid_out), difference)
            if not difference.known:
                if not unread:
                    row.notes.append(f"{slot.name}: {difference.why}")
                continue
            state = self._noise.states.get((target.seq, slot.index))
            if unread and row.error is not None:
                continue
            band = self._noise.band(state.predicted, difference) if state is not None else None
            steps = per_step_of(row.error, difference.rho)
            if steps is not None and row.error is not None and row.band is not None and band is not None:
                larger = is_smaller(row.error, difference.rho, steps)
                row.band = chosen(larger, band, row.band, steps)
                row.error = greatest(row.error, difference.rho)
            elif row.error is None or difference.rho > row.error:
                row.error, row.worst_row, row.band = difference.rho, difference.worst, band
            if difference.transform:
                row.notes.append(f"{slot.name} {difference.transform}")
            if state is not None and state.wrong and not row.label and not unread:
                row.label = "inherited" if state.tainted else "suspect"
            if state is not None:
                row.notes += state.notes
        if row.error is None and outputs and all(slot_numel(s) == 0 for s in outputs):
            row.error = 0.0

    def _lone(self, program: Program, record: StoredRecord) -> Pair:
        ours = program is self._pairing.target
        row = Pair(
            ref=None if ours else record,
            target=record if ours else None,
            outcome="target-only" if ours else "ref-only",
            label=self._labels.get(record.seq, "") if ours else "",
        )
        if self._left_out(program, record):
            row.outcome = "deselected"
        elif record.kind == "op" and program.is_edge(record):
            row.outcome, row.method = "absorbed", "edge"
        elif record.kind == "op" and self._is_absorbed(program, record):
            row.outcome, row.method = "absorbed", "region"
        return row

    def _is_absorbed(self, program: Program, record: StoredRecord) -> bool:
        """Whether every use of an unpaired op ends in a value that was found right, or in none."""
        outputs = [(record.seq, slot.index) for slot in program.outputs(record)]
        return all(self._value_absorbed(program, value) for value in outputs)

    def _value_absorbed(self, program: Program, value: Value) -> bool:
        known = self._target_absorbed if program is self._pairing.target else self._ref_absorbed
        todo = [value]
        while todo:
            current = todo[-1]
            if current in known:
                todo.pop()
                continue
            verdict = self._compared(program, current)
            if verdict is None:
                later = [
                    (seq, slot.index)
                    for seq, _ in program.consumers.get(current, ())
                    for slot in program.outputs(program.records[seq])
                ]
                waiting = [v for v in later if v not in known and v not in todo]
                if waiting:
                    todo += waiting
                    continue
                verdict = all(known.get(v, True) for v in later)
            known[current] = verdict
            todo.pop()
        return known[value]

    def _compared(self, program: Program, value: Value) -> bool | None:
        """True or False where the value was compared, None where only its readers tell."""
        pairing = self._pairing
        if program is pairing.target:
            state = self._noise.states.get(value)
            if state is None or (state.wrong and program.consumers.get(value)):
                return None  # what is wrong inside may be right again in the end: its readers tell
            return state.explained
        links = [link for link in pairing.ref_links.get(value, ()) if pairing.compare(link).known]
        if not links or (
            program.consumers.get(value) and all(self._noise.state(k.target).wrong for k in links)
        ):
            return None
        return any(self._noise.state(link.target).explained is not False for link in links)

    def _left_out(self, program: Program, record: StoredRecord) -> bool:
        side = 0 if program is self._pairing.ref else 1
        if record.kind in self._dormant[side]:
            return True
        kept = self._kept[side]
        if kept is None or record.kind != "module":
            return False
        path = self._pairing.renames.apply(record.module) if side == 0 else record.module
        return record.call < kept.get(path, record.call + 1)

    def _kept_calls(self, program: Program) -> dict[str, int] | None:
        """By path (of the target) the one call that a dump keeps of a module; None for ordinary traces."""
        if not keeps_last_call(program.reader):
            return None
        rename = self._pairing.renames.apply if program is self._pairing.ref else str
        return {rename(r.module): r.call for r in program.records.values() if r.kind == "module"}

    def _deselected(self) -> tuple[frozenset[str], frozenset[str]]:
        """Kinds of records that the *other* trace left out by choice."""
        left_out = []
        for program in (self._pairing.ref, self._pairing.target):
            options = program.reader.header.get("options") or {}
            kinds = set()
            if options.get("level") == "module":
                kinds.add("op")
            if options.get("params") == "none":
                kinds.add("param")
            left_out.append(frozenset(kinds))
        return left_out[1], left_out[0]


def count_coverage(pairs: Iterable[Pair], pairing: Pairing) -> dict[str, Any]:
    """Counts of records by outcome and side, and the share of compute bytes that was compared.

    Returns: {"records": {outcome: count}, "share": of all records, "compute_bytes": {"total", "covered",
      "deselected", "share"}, "not_compared": {why: count}}. A matched pair counts two records, and a record
      counts once, however many partners it has.
    """
    counts: Counter[str] = Counter()
    in_all = covered = deselected = 0
    why: Counter[str] = Counter()
    # With steps that have several partners a record stands in several rows: the worst outcome is its own.
    outcomes: dict[tuple[bool, int], Outcome] = {}
    records: dict[tuple[bool, int], tuple[StoredRecord, Program]] = {}
    for pair in pairs:
        for record, is_ref in ((pair.ref, True), (pair.target, False)):
            if record is None:
                continue
            key = (is_ref, record.seq)
            known = outcomes.get(key)
            if known is None or _WORST_FIRST.index(pair.outcome) < _WORST_FIRST.index(known):
                outcomes[key] = pair.outcome
            if known is None:
                home = pairing.ref if is_ref else pairing.target
                for one in pairing.others:
                    program = one.ref if is_ref else one.target
                    if record.seq not in home.records and record.seq in program.records:
                        home = program
                records[key] = record, home
    for key, outcome in outcomes.items():
        record, program = records[key]
        repeats = program.reader.repeats(record)
        counts[outcome] += repeats
        size = total(_compute_bytes(program, record), repeats)
        if outcome == "deselected":
            deselected += size
            continue
        in_all += size
        if outcome in ("matched", "absorbed"):
            covered += size
        else:
            why[outcome] += repeats
    left_out = pairing.ref.deselected + pairing.target.deselected
    if left_out:
        counts["deselected"] += left_out
    compared = counts["matched"] + counts["absorbed"]
    number = sum(counts.values()) - counts["deselected"]
    return {
        "records": {outcome: counts[outcome] for outcome in OUTCOMES},
        "share": compared / number if number else 0.0,
        "compute_bytes": {
            "total": in_all,
            "covered": covered,
            "deselected": deselected,
            "share": covered / in_all if in_all else (1.0 if compared else 0.0),
        },
        "not_compared": dict(why),
    }


def _compute_bytes(program: Program, record: StoredRecord) -> int:
    """Bytes that a record's op computed; what only moves or allocates counts nothing."""
    if record.kind != "op" or is_empty(record) or record.light or program.is_edge(record):
        return 0
    return sum(slot_numel(s) * _itemsize(s.dtype) for s in program.outputs(record))


def _itemsize(dtype: str) -> int:
    digits = "".join(c for c in dtype.partition("_")[0] if c.isdigit())
    return _WIDTHS.get(digits, 1 if dtype == "bool" else max(1, math.ceil(int(digits or 8) / 8)))


def _tensors(record: StoredRecord) -> bool:
    return any(slot.is_tensor for slot in record.slots if slot.role != "in")
