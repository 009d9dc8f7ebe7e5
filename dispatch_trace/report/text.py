"""An alignment on one screen: verdict, coverage, the first finding, and the rows around it.

Guarantees: under 40 lines with the default options, whatever the traces hold; nothing is passed over in
silence, what does not fit is counted. Takes the alignment as plain data (`session` stands above), so it
imports neither `session` nor torch.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from dispatch_trace.align.folded_pairs import kept, row_with, shares_of_band
from dispatch_trace.align.pairs import Pair
from dispatch_trace.judge.findings import Finding, row_of
from dispatch_trace.report.listing import what
from dispatch_trace.report.table import WIDTH, columns, module_name, number, plain, plural, share, shorten

ROWS_BEFORE, ROWS_AFTER = 5, 4
MAX_EVIDENCE = 7
MAX_NOTICES = 4


class AlignmentLike(Protocol):
    """What `alignment` shows, as `session.Alignment`."""

    @property
    def verdict(self) -> str: ...
    @property
    def first(self) -> Finding | None: ...
    @property
    def findings(self) -> Sequence[Finding]: ...
    @property
    def pairs(self) -> Sequence[Pair]: ...
    @property
    def coverage(self) -> Mapping[str, Any]: ...
    @property
    def notices(self) -> Sequence[str]: ...
    @property
    def reasons(self) -> Sequence[str]: ...


def alignment(found: AlignmentLike, *, ref: str, target: str, top: int = 3) -> str:
    """The first screen.

    Args:
      ref, target: the two traces, as the user wrote them.
      top: how many findings are listed.
    """
    lines = [*_verdict_lines(found, ref, target), "", *_coverage_lines(found.coverage)]
    lines += _notice_lines(found.reasons, found.notices)
    first = found.first or next(iter(found.findings), None)
    if first is not None:
        lines += ["", *_finding_lines(first, parameter_of(found, first))]
    lines += _rows_around(found, first)
    lines += _other_findings(found, first, top)
    return "\n".join(plain(line) for line in lines)


def _verdict_lines(found: AlignmentLike, ref: str, target: str) -> list[str]:
    return [
        f"{found.verdict.upper()}  {verdict_said(found)}",
        f"  ref     {shorten(ref, WIDTH - 10)}",
        f"  target  {shorten(target, WIDTH - 10)}",
    ]


def verdict_said(found: AlignmentLike) -> str:
    """What a verdict means, in a few words."""
    said = {
        "match": "equal within noise",
        "diverged": plural(sum(finding.fatal for finding in found.findings), "fatal finding"),
        "inconclusive": "neither a match nor a divergence could be shown",
    }
    return said.get(found.verdict, "")


def _coverage_lines(coverage: Mapping[str, Any]) -> list[str]:
    """How much was compared; what was not, and why, is always said."""
    records = {outcome: count for outcome, count in coverage["records"].items() if count}
    total = sum(records.values())
    compared = records.pop("matched", 0), records.pop("absorbed", 0)
    left = ", ".join(f"{outcome} {count}" for outcome, count in records.items())
    missing = f"          not compared: {plural(total - sum(compared), 'record')}" + (
        f" ({left})" if left else ""
    )
    return [
        f"coverage  {share(coverage['compute_bytes']['share'])} of the computed bytes; of {total} records "
        f"{compared[0]} matched, {compared[1]} absorbed",
        *textwrap.wrap(missing, WIDTH, subsequent_indent=" " * 12),
    ]


def _notice_lines(reasons: Sequence[str], notices: Sequence[str]) -> list[str]:
    """Why the verdict is inconclusive comes first; the notices repeat it."""
    said = [("because", reason) for reason in reasons]
    said += [("notice", notice) for notice in notices if notice not in reasons]
    lines = [f"{kind:<8}  {shorten(notice, WIDTH - 10)}" for kind, notice in said[:MAX_NOTICES]]
    if len(said) > MAX_NOTICES:
        lines.append(f"          ... and {len(said) - MAX_NOTICES} more (--json lists all)")
    return lines


# --- one finding ------------------------------------------------------------------------------------


def parameter_of(found: AlignmentLike, finding: Finding) -> str | None:
    """Name of the parameter that the finding is about: it differs, or the wrong value stands for it."""
    named = finding.evidence.get("parameter")
    if named is not None:
        return str(named)
    row = row_with(found.pairs, finding.ref_seq, of_ref=True)
    ref = None if row is None else found.pairs[row].ref
    return f"{ref.module}.{ref.name}".lstrip(".") if ref is not None and ref.kind == "param" else None


def _finding_lines(finding: Finding, parameter: str | None) -> list[str]:
    title = "first finding" if finding.fatal else "not fatal"
    model = f"model {finding.model}, " if finding.model else ""
    site = f"{model}step {finding.step}" + (f", call {finding.call}" if finding.call else "")
    rows = [["module", f"{shorten(module_name(finding.module), 70)}  ({site})"]]
    if parameter is not None:
        rows.append(["parameter", shorten(parameter, WIDTH - 20)])
    if finding.op:
        rows.append(["op", finding.op])
    if finding.source:
        rows.append(["source", shorten(finding.source, WIDTH - 20)])
    if finding.hint:
        rows.append(["hint", finding.hint])
    evidence = [
        [str(key), evidence_text(key, value)] for key, value in finding.evidence.items() if key != "parameter"
    ]
    rows += evidence[:MAX_EVIDENCE]
    lines = [f"{title}  {finding.label}  (by {finding.judge})"]
    lines += [line[:WIDTH] for line in columns(rows, indent="  ")]
    if len(evidence) > MAX_EVIDENCE:
        lines.append(f"  ... and {len(evidence) - MAX_EVIDENCE} more facts (--json lists all)")
    return lines


def evidence_text(key: str, value: Any) -> str:
    """A fact in one line: nested values without quotes and braces where they can be missed."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {evidence_text(key, inner)}" for name, inner in value.items())
    if isinstance(value, list | tuple):
        if key == "arguments" and len(value) == 2:  # as the reference had it, as the target has it
            return " -> ".join(evidence_text("", side) for side in value)
        return "[" + ", ".join(evidence_text("", item) for item in value) + "]"
    return number(value)


def _other_findings(found: AlignmentLike, first: Finding | None, top: int) -> list[str]:
    others = [finding for finding in found.findings if finding is not first]
    shown = others[: max(0, top - 1)]
    if not others:
        return []
    rows = [
        [
            finding.label,
            "fatal" if finding.fatal else "-",
            str(finding.step),
            shorten(module_name(finding.module), 40),
            shorten(finding.op or "-", 30),
        ]
        for finding in shown
    ]
    lines = ["", "other findings", *columns(rows, indent="  ")]
    if len(others) > len(shown):
        counts: dict[str, int] = {}
        for finding in others[len(shown) :]:
            counts[finding.label] = counts.get(finding.label, 0) + 1
        rest = ", ".join(f"{label} {count}" for label, count in counts.items())
        lines.append(f"  ... and {len(others) - len(shown)} more: {rest}  (--top {len(others) + 1})")
    return lines


# --- the rows around it -----------------------------------------------------------------------------

_HEADINGS = ["", "seq", "module", "what", "error", "band", ""]
_RIGHT = frozenset({1, 4, 5})
_MODULE = 2


def _rows_around(found: AlignmentLike, first: Finding | None) -> list[str]:
    """The pairs around the finding, in execution order; without one, those nearest to their band."""
    shown = kept(found.pairs, _is_shown)
    if first is None:
        return _nearest_rows(shown)
    at = row_of(shown, first)
    if at is None:
        return []
    begin = max(0, at - ROWS_BEFORE)
    window = shown[begin : at + ROWS_AFTER + 1]
    rows = [_row(pair, first if begin + i == at else None) for i, pair in enumerate(window)]
    return ["", "around it, in execution order", *_fitted(rows)]


def _nearest_rows(shown: Sequence[Pair]) -> list[str]:
    shares = shares_of_band(shown)
    judged = sorted((row for row, share in enumerate(shares) if share), key=lambda row: -shares[row])
    if not judged:
        return []
    rows = [_row(shown[row], None) for row in judged[:ROWS_BEFORE]]
    return ["", "nearest to their noise band", *_fitted(rows)]


def _fitted(rows: list[list[str]]) -> list[str]:
    """The rows under their headings; module paths give way where a line would be too long."""
    table = [_HEADINGS, *rows]
    others = sum(max(len(row[i]) for row in table) for i in range(len(_HEADINGS)) if i != _MODULE)
    room = WIDTH - others - 2 * (len(_HEADINGS) - 1)
    fitted = [[shorten(cell, room) if i == _MODULE else cell for i, cell in enumerate(row)] for row in table]
    return columns(fitted, right=_RIGHT)


def _is_shown(pair: Pair) -> bool:
    """Views and parameters carry no news of their own, unless something is said about them."""
    record = pair.target or pair.ref
    if record is None or pair.outcome == "deselected":
        return False
    return bool(pair.label) or not (record.light or record.kind == "param")


def _row(pair: Pair, finding: Finding | None) -> list[str]:
    """One pair; a record that only the reference has stands with its number in brackets.

    Args:
      finding: the one that is about this row, and knows the error of a record that has no partner.
    """
    record = pair.target or pair.ref
    assert record is not None, "a pair has at least one side"
    known = finding.evidence if finding is not None and pair.error is None else {}
    call = f"#{record.call}" if record.call > 0 else ""
    return [
        " " if finding is None else ">",
        str(record.seq) if pair.target is not None else f"({record.seq})",
        module_name(record.module) + call,
        shorten(what(record).removeprefix("aten."), 30),
        number(known.get("error", pair.error)),
        number(known.get("band", pair.band)),
        pair.label or ("" if pair.outcome == "matched" else pair.outcome),
    ]
