"""The first screen: what it says, in how many lines, whatever the alignment holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from dispatch_trace.align.pairs import Pair
from dispatch_trace.judge.findings import Finding
from dispatch_trace.report import text
from dispatch_trace.report.table import columns, number, plain, share, shorten, size
from dispatch_trace.schema import StoredRecord


def record(seq: int, module: str, op: str = "aten.mm", **changes: Any) -> StoredRecord:
    values: dict[str, Any] = {
        "kind": "op",
        "rank": 0,
        "step": 0,
        "model": "",
        "grad_phase": "fwd",
        "call": 0,
        "n": 0,
        "overload": f"{op}.default",
        "name": "",
        "args": (),
        "slots": (),
        "source": ("model.py", seq),
        "light": False,
        "random": False,
        "producer": -1,
        "opened": seq,
        "thread": 0,
        "note": "",
    }
    return StoredRecord(**{**values, "seq": seq, "module": module, "op": op, **changes})


def pair(seq: int, module: str, **changes: Any) -> Pair:
    values: dict[str, Any] = {"outcome": "matched", "error": 1e-7, "band": 1e-6}
    both = record(seq, module)
    return Pair(**{**values, "ref": both, "target": both, **changes})


@dataclass
class Found:
    """An alignment as `session` hands it out."""

    verdict: str = "match"
    findings: list[Finding] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    records: dict[str, int] = field(default_factory=lambda: {"matched": 18, "absorbed": 2})
    bytes_share: float = 1.0
    notices: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    @property
    def first(self) -> Finding | None:
        return next((finding for finding in self.findings if finding.fatal), None)

    @property
    def coverage(self) -> dict[str, Any]:
        return {"records": self.records, "compute_bytes": {"share": self.bytes_share}}


def finding(seq: int, module: str, label: str = "introduced", **changes: Any) -> Finding:
    values: dict[str, Any] = {
        "call": 0,
        "step": 0,
        "op": "aten.mm",
        "evidence": {"error": 0.25, "band": 1e-6},
        "source": f"model.py:{seq}",
        "seq": seq,
        "ref_seq": seq,
    }
    return Finding(**{**values, "module": module, "label": label, **changes})


def diverged(**changes: Any) -> Found:
    pairs = [pair(seq, f"layers.{seq}") for seq in range(20)]
    pairs[9] = pair(9, "layers.9", error=0.25, label="introduced")
    return Found(verdict="diverged", findings=[finding(9, "layers.9")], pairs=pairs, **changes)


def screen(found: Found, **options: Any) -> list[str]:
    return text.alignment(found, ref="ref.trace", target="target.trace", **options).splitlines()


# --- what it says -----------------------------------------------------------------------------------


def test_the_verdict_and_the_coverage_come_first() -> None:
    lines = screen(Found(records={"matched": 18, "absorbed": 2, "no-data": 9, "deselected": 5}))
    assert lines[0] == "MATCH  equal within noise"
    assert lines[1:3] == ["  ref     ref.trace", "  target  target.trace"]
    assert lines[4] == "coverage  100 % of the computed bytes; of 34 records 18 matched, 2 absorbed"
    assert lines[5] == "          not compared: 14 records (no-data 9, deselected 5)"


def test_what_was_not_compared_is_said_even_when_it_is_nothing() -> None:
    assert "          not compared: 0 records" in screen(Found())


def test_nearly_all_is_not_all() -> None:
    assert "99.9 % of the computed bytes" in screen(Found(bytes_share=0.99999))[4]


def test_the_first_finding_names_place_source_evidence_and_hint() -> None:
    found = diverged()
    found.findings[0] = finding(9, "layers.9", hint="sign flipped", evidence={"error": 0.25, "band": 1e-6})
    lines = screen(found)
    at = lines.index("first finding  introduced  (by estimates)")
    assert [line.split(maxsplit=1) for line in lines[at + 1 : at + 7]] == [
        ["module", "layers.9  (step 0)"],
        ["op", "aten.mm"],
        ["source", "model.py:9"],
        ["hint", "sign flipped"],
        ["error", "0.25"],
        ["band", "1e-06"],
    ]


def test_the_call_is_named_where_it_is_not_the_first() -> None:
    found = diverged()
    found.findings[0] = finding(9, "layers.9", call=2, step=4)
    assert "  module  layers.9  (step 4, call 2)" in screen(found)


def test_a_changed_argument_is_shown_old_and_new() -> None:
    found = diverged()
    evidence = {"arguments": {"eps": [1e-5, 1e-6], "dim": [[-1], None]}}
    found.findings[0] = finding(9, "layers.9", "argument", evidence=evidence)
    assert "  arguments  eps 1e-05 -> 1e-06, dim [-1] -> -" in screen(found)


def test_the_parameter_is_named_that_a_wrong_value_stands_for() -> None:
    found = diverged()
    weight = record(3, "layers.9", "", kind="param", name="weight")
    found.pairs.insert(0, Pair(ref=weight, target=None, outcome="absorbed"))
    found.findings[0] = finding(9, "layers.9", "structure", ref_seq=3)
    found.pairs[4] = pair(103, "layers.3")
    assert "  parameter  layers.9.weight" in screen(found)


def test_a_parameter_that_differs_is_named() -> None:
    found = diverged()
    found.findings[0] = finding(9, "layers.9", "parameter", evidence={"parameter": "bias", "error": 0.1})
    lines = screen(found)
    assert "  parameter  bias" in lines
    assert sum("bias" in line for line in lines) == 1


def test_the_rows_around_the_finding_are_in_execution_order() -> None:
    lines = screen(diverged())
    at = lines.index("around it, in execution order")
    rows = [line.split() for line in lines[at + 2 :]]
    assert [row[2 if row[0] == ">" else 1] for row in rows] == [f"layers.{seq}" for seq in range(4, 14)]
    assert [row for row in rows if row[0] == ">"] == [
        [">", "9", "layers.9", "mm", "0.25", "1e-06", "introduced"]
    ]


def test_the_row_of_a_finding_without_partner_shows_the_findings_error() -> None:
    found = diverged()
    found.pairs[9] = pair(9, "layers.9", ref=None, outcome="target-only", error=None, band=None)
    (row,) = [line.split() for line in screen(found) if line.startswith(">")]
    assert row == [">", "9", "layers.9", "mm", "0.25", "1e-06", "target-only"]


def test_a_record_that_only_the_reference_has_stands_in_brackets() -> None:
    found = diverged()
    found.pairs[10] = pair(77, "layers.10", target=None, outcome="ref-only", error=None, band=None)
    (row,) = [line.split() for line in screen(found) if "(77)" in line]
    assert row == ["(77)", "layers.10", "mm", "-", "-", "ref-only"]


def test_views_and_sound_parameters_are_no_rows() -> None:
    found = diverged()
    view = record(8, "view.of", light=True)
    found.pairs[8] = Pair(ref=view, target=view, outcome="absorbed")
    weight = record(7, "owner.of", kind="param", name="weight")
    found.pairs[7] = Pair(ref=weight, target=weight, outcome="matched", error=0.0, label="suspect")
    lines = screen(found)
    assert not any("view.of" in line for line in lines)
    assert any("owner.of" in line and "suspect" in line for line in lines), "something is said about it"


def test_a_match_shows_what_came_nearest_to_its_band() -> None:
    pairs = [pair(seq, f"m{seq}", error=seq * 1e-8, band=1e-6) for seq in range(9)]
    pairs.append(pair(9, "exact", error=0.0, band=0.0))
    lines = screen(Found(pairs=pairs))
    at = lines.index("nearest to their noise band")
    assert [line.split()[1] for line in lines[at + 2 :]] == ["m8", "m7", "m6", "m5", "m4"]


def test_an_inconclusive_verdict_tells_why_before_anything_else() -> None:
    lines = screen(Found(verdict="inconclusive", notices=["x", "outputs differ"], reasons=["outputs differ"]))
    assert lines[0].startswith("INCONCLUSIVE")
    assert lines[6:8] == ["because   outputs differ", "notice    x"]


def test_suspects_of_a_match_are_shown_as_not_fatal() -> None:
    found = Found(findings=[finding(3, "m", "suspect", fatal=False)], pairs=[pair(3, "m")])
    lines = screen(found)
    assert lines[0].startswith("MATCH")
    assert "not fatal  suspect  (by estimates)" in lines


# --- how much ---------------------------------------------------------------------------------------


def test_other_findings_are_listed_up_to_top_and_the_rest_is_counted() -> None:
    found = diverged()
    found.findings += [finding(seq, f"layers.{seq}", "suspect", fatal=False) for seq in range(10, 15)]
    lines = screen(found, top=3)
    at = lines.index("other findings")
    assert [line.split() for line in lines[at + 1 : at + 3]] == [
        ["suspect", "-", "0", "layers.10", "aten.mm"],
        ["suspect", "-", "0", "layers.11", "aten.mm"],
    ]
    assert lines[at + 3] == "  ... and 3 more: suspect 3  (--top 6)"
    assert len(screen(found, top=99)) == len(lines) + 2
    assert screen(found, top=0)[-1] == "  ... and 5 more: suspect 5  (--top 6)"


@pytest.mark.parametrize("verdict", ["match", "diverged", "inconclusive"])
def test_the_screen_stays_under_40_lines_and_100_columns(verdict: str) -> None:
    deep = "encoder.block." * 12 + "attention.self.query"
    op = "aten._scaled_dot_product_flash_attention_for_cpu_backward"
    found = Found(
        verdict=verdict,
        records=dict.fromkeys(
            ["matched", "absorbed", "ref-only", "target-only", "no-data", "deselected"], 10**6
        ),
        notices=[f"a long notice {'x' * 150} {i}" for i in range(30)],
        reasons=[f"a long reason {'y' * 150} {i}" for i in range(30)] if verdict == "inconclusive" else [],
    )
    for seq in range(100):
        both = record(seq, deep, op, n=seq, step=12345, call=7)
        found.pairs.append(Pair(ref=both, target=both, outcome="matched", error=1.2345e-100, band=1.5e-99))
        evidence = {f"some quite long name of a fact {i}": [1.23456789] * 40 for i in range(20)}
        label = "introduced" if verdict == "diverged" else "suspect"
        found.findings.append(
            finding(
                seq, deep, label, op=op, fatal=verdict == "diverged", evidence=evidence,
                source="/a/long/path" * 15 + ":12", hint="rounded through a lower precision " * 5, step=12345,
            )
        )  # fmt: skip
    lines = text.alignment(found, ref="r" * 300, target="t" * 300).splitlines()
    assert len(lines) < 40, "\n".join(lines)
    assert max(map(len, lines)) <= 100, max(lines, key=len)


def test_control_characters_of_a_trace_never_reach_the_terminal() -> None:
    found = diverged()
    found.findings[0] = finding(9, "layers\x1b[2J.9", source="a\rb.py:3")
    shown = text.alignment(found, ref="r\x07", target="t")
    assert shown.replace("\n", "").isprintable()


# --- pieces -----------------------------------------------------------------------------------------


def test_numbers_are_short() -> None:
    assert [number(x) for x in (None, 0, 12, 10**12, 0.5, 1.23456e-7, float("nan"), True, "text")] == [
        "-", "0", "12", "1.000e+12", "0.5", "1.23e-07", "nan", "True", "text",
    ]  # fmt: skip


def test_sizes_are_for_people() -> None:
    assert [size(n) for n in (0, 812, 1434, 20 << 20, 5 << 30, 3 << 40)] == [
        "0 B", "812 B", "1.4 KB", "20 MB", "5.0 GB", "3.0 TB",
    ]  # fmt: skip


def test_shares_do_not_round_up_to_all() -> None:
    assert [share(x) for x in (0.0, 0.5, 0.99999, 1.0)] == ["0.0 %", "50.0 %", "99.9 %", "100 %"]


def test_shortening_keeps_both_ends() -> None:
    assert shorten("short", 10) == "short"
    cut = shorten("encoder.layer.11.attention.output.dense", 24)
    assert len(cut) == 24
    assert cut.startswith("encoder") and cut.endswith("output.dense")


def test_columns_are_aligned() -> None:
    assert columns([["a", "1"], ["bbb", "22"]], right=frozenset({1}), indent=" ") == [" a     1", " bbb  22"]
    assert columns([]) == []


def test_plain_text_stays_as_it_is() -> None:
    assert plain("layers.0 → ü") == "layers.0 → ü"
    assert plain("a\x1b[31mb\n") == "a?[31mb?"
