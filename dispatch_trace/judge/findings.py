"""What a judgement says: findings, verdict, coverage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from dispatch_trace.align.folded_pairs import row_with
from dispatch_trace.align.pairs import Pair
from dispatch_trace.notebook import brief, html_table

Verdict: TypeAlias = Literal["match", "diverged", "inconclusive"]
LABELS = (
    "introduced",
    "inherited",
    "parameter",
    "argument",
    "wiring",
    "nonfinite",
    "uninitialised",
    "structure",
    "flip",
    "suspect",
    "nondeterministic",
)
NEVER_FATAL = frozenset({"suspect", "flip", "inherited", "nondeterministic"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One place where the numbers go wrong, or may.

    Attributes:
      module, call, step: the module call to blame; call is None outside all calls.
      op: base name of the target's op (of the reference's where the target lacks it), None where only the
        module is known.
      label: one of `LABELS`.
      evidence: what was measured and what differs, by name; plain values.
      source: "file:line" of the op, None where unknown.
      fatal: it makes the verdict `diverged`.
      judge: which judge found it: "twins", "local replay", "body" or "estimates".
      hint: what the difference looks like, in words, None where nothing fits.
      seq, ref_seq: records of the target and of the reference, -1 where there is none.
      model: name of the root model, "" where the trace has one.
    """

    module: str
    call: int | None
    step: int
    op: str | None
    label: str
    evidence: dict[str, Any] = field(default_factory=dict)
    source: str | None = None
    fatal: bool = True
    judge: str = "estimates"
    hint: str | None = None
    seq: int = -1
    ref_seq: int = -1
    model: str = ""

    def __repr__(self) -> str:
        call = "" if self.call is None else f"#{self.call}"
        figures = [
            f"{name} {brief(self.evidence[name])}" for name in ("error", "band") if name in self.evidence
        ]
        facts = ["fatal" if self.fatal else "", *figures, self.judge, self.source or "", self.hint or ""]
        return f"Finding({self.label} {self.module or '(root)'}{call} {self.op or ''}".rstrip() + (
            f": {', '.join(filter(None, facts))})"
        )

    def _repr_html_(self) -> str:
        call = "" if self.call is None else f"#{self.call}"
        rows = [
            ("label", f"{self.label}{' (fatal)' if self.fatal else ''}"),
            ("model", self.model or None),
            ("module", f"{self.module or '(root)'}{call}"),
            ("step", self.step),
            ("op", self.op),
            ("source", self.source),
            ("hint", self.hint),
            *self.evidence.items(),
        ]
        return html_table(["", ""], [[name, brief(value)] for name, value in rows if value is not None])


@dataclass(slots=True, kw_only=True)
class Judgement:
    """Findings and verdict of one pair of ranks.

    Attributes:
      verdict: "match", "diverged" or "inconclusive".
      findings: fatal ones first, each group in the order in which the target ran.
      pairs: every record of both traces, in the order of the target.
      coverage: counts and shares by outcome.
      notices: what a reader should know besides.
      reasons: why the verdict is not "match", where it is inconclusive.
    """

    verdict: Verdict
    findings: list[Finding]
    pairs: Sequence[Pair]
    coverage: dict[str, Any]
    notices: list[str]
    reasons: list[str]


def row_of(pairs: Sequence[Pair], finding: Finding) -> int | None:
    """The row that a finding is about: that of its record, else the first of its module in that step."""
    of_ref = finding.seq < 0
    row = row_with(pairs, finding.ref_seq if of_ref else finding.seq, of_ref=of_ref)
    if row is not None:
        return row
    for number, pair in enumerate(pairs):
        record = pair.target or pair.ref
        if record is not None and (record.module, record.step) == (finding.module, finding.step):
            return number
    return None


def demoted(finding: Finding, why: str) -> Finding:
    """A fatal finding as a suspect that keeps its label as evidence; others as they are."""
    if not finding.fatal:
        return finding
    evidence = {"kind": finding.label, **finding.evidence, "refuted": why}
    return replace(finding, label="suspect", fatal=False, evidence=evidence)
