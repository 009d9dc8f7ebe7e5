"""An alignment as one HTML page that needs nothing else: no network, no files beside it, no server.

The first screen stands in the page as text; the curve, the table and the details are drawn by the page's own
script from data embedded as JSON. Guarantees: whatever a trace holds (names, notes, paths) stays text, by
escaping in the template and in the JSON, by a script that makes text nodes only, and by a content policy that
lets the page load nothing. Takes plain data and readers; imports neither `session` nor torch.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from dispatch_trace.judge.findings import Finding
from dispatch_trace.report.facts import jsonable
from dispatch_trace.report.html_details import MAP_LEVELS, MAX_PAIRS, details
from dispatch_trace.report.html_rows import STATS, Readers, Rows
from dispatch_trace.report.table import module_name, number, plural, share
from dispatch_trace.report.text import AlignmentLike, evidence_text, parameter_of, verdict_said
from dispatch_trace.store.reader import RankReader

_HERE = Path(__file__).parent
LABELS = {
    "introduced": "The inputs are right and the output is not: the error begins here.",
    "inherited": "Wrong because its inputs are; the op itself adds nothing.",
    "parameter": "A weight, or what stands for it, is not the reference's.",
    "argument": "An argument of the op or call differs.",
    "wiring": "It reads another value than its counterpart does.",
    "nonfinite": "NaN or infinity comes out of finite inputs.",
    "uninitialised": "It reads memory that nothing wrote.",
    "structure": "The programs differ here: ops are missing, inserted or replaced.",
    "flip": "A decision fell the other way on inputs that differ by noise.",
    "suspect": "It differs, but no effect on a final output is shown.",
    "nondeterministic": "The random draws differ.",
}


def page(
    found: AlignmentLike,
    *,
    ref: str,
    target: str,
    options: Mapping[str, Any],
    ref_ranks: Sequence[RankReader],
    target_ranks: Sequence[RankReader],
) -> str:
    """The page as text.

    Args:
      ref, target: paths of the traces.
      options: what was passed to `align` besides, for the command that reproduces the page.
      ref_ranks, target_ranks: readers of both; empty where a trace is no longer there, which costs the
        statistics and tensors.
    """
    readers: tuple[Readers, Readers] = ({r.rank: r for r in ref_ranks}, {r.rank: r for r in target_ranks})
    rows = Rows(found.pairs, found.findings, *readers)
    first = found.first or next(iter(found.findings), None)
    data = {
        "columns": rows.columns,
        "texts": rows.texts.all,
        "stats": STATS,
        "levels": MAP_LEVELS,
        "max_details": MAX_PAIRS,
        "details": details(rows, *readers),
        "findings": [
            {**_facts(found, finding), "row": row}
            for finding, row in zip(found.findings, rows.finding_rows, strict=True)
        ],
        "first": None if first is None else found.findings.index(first),
        "labels": LABELS,
        "classes": _classes(target_ranks) or _classes(ref_ranks),
        "kept": [_kept(ref_ranks), _kept(target_ranks)],
    }
    template = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True
    ).get_template("template.html")
    return template.render(
        style=_inlined("report.css"),
        script=_inlined("report_data.js") + _inlined("report_page.js") + _inlined("report_detail.js"),
        data=Markup(embedded(data)),
        verdict=found.verdict,
        said=verdict_said(found),
        ref=ref,
        target=target,
        coverage=_coverage(found.coverage),
        reasons=list(found.reasons),
        notices=[notice for notice in found.notices if notice not in found.reasons],
        first=None if first is None else _facts(found, first),
        first_row=None if first is None else rows.finding_rows[found.findings.index(first)],
        others=len(found.findings) - 1,
        num_rows=plural(len(found.pairs), "pair"),
        command=command(ref, target, options),
        show=None
        if first is None or first.seq < 0
        else shlex.join(["dispatch-trace", "show", target, "--record", str(first.seq)]),
    )


def embedded(data: Any) -> str:
    """JSON that can stand in a script element: nothing in it ends the element or opens a comment.

    See https://html.spec.whatwg.org/multipage/scripting.html#restrictions-for-contents-of-script-elements.
    """
    text = json.dumps(jsonable(data), separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def command(ref: str, target: str, options: Mapping[str, Any]) -> str:
    """What gives the same page again: a shell command, or Python where an option has no flag."""
    if options.get("rows") is not None or not isinstance(options.get("rename") or {}, Mapping):
        named = "".join(f", {name}={value!r}" for name, value in options.items())
        return f"dt.align({ref!r}, {target!r}{named}).to_html('report.html')"
    words = ["dispatch-trace", "align", ref, target]
    for name, value in options.items():
        if name == "golden":
            words += ["--golden", str(value)]
        elif name == "refs":
            words += [word for path in value for word in ("--ref-run", path)]
        elif name == "rename":
            words += [word for old, new in value.items() for word in ("--rename", f"{old}={new}")]
        elif name == "declared":
            texts = [value] if isinstance(value, str) else value
            words += [word for text in texts for word in ("--declared", str(text))]
        elif name == "steps":
            numbers = [value] if isinstance(value, int) else sorted(value)
            words += [word for step in numbers for word in ("--step", str(step))]
        elif name == "tolerance":
            words += ["--tolerance", repr(value)]
        elif name == "exact" and value:
            words.append("--exact")
        elif name == "twins" and value is False:
            words.append("--no-twins")
    return shlex.join([*words, "--html", "report.html"])


# ----------------------------------------------------------------------------------------------------


def _inlined(name: str) -> Any:
    return Markup((_HERE / name).read_text(encoding="utf-8"))


def _facts(found: AlignmentLike, finding: Finding) -> dict[str, Any]:
    """A finding in words."""
    return {
        "label": finding.label,
        "meaning": LABELS.get(finding.label, ""),
        "fatal": finding.fatal,
        "module": module_name(finding.module),
        "parameter": parameter_of(found, finding),
        "op": finding.op,
        "step": finding.step,
        "call": finding.call,
        "source": finding.source,
        "hint": finding.hint,
        "judge": finding.judge,
        "error": number(finding.evidence.get("error")),
        "band": number(finding.evidence.get("band")),
        "evidence": [
            [str(key).replace("_", " "), evidence_text(str(key), value)]
            for key, value in finding.evidence.items()
            if key not in ("parameter", "judge", "error", "band")
        ],
    }


def _coverage(coverage: Mapping[str, Any]) -> dict[str, Any]:
    records = {outcome: count for outcome, count in coverage["records"].items() if count}
    total = sum(records.values())
    return {
        "share": share(coverage["compute_bytes"]["share"]),
        "total": total,
        "parts": [
            {"outcome": outcome, "count": count, "percent": round(100 * count / total, 3)}
            for outcome, count in records.items()
        ],
    }


def _classes(ranks: Sequence[RankReader]) -> dict[str, str]:
    """Class names by module path."""
    table = ranks[0].header.get("modules") or () if ranks else ()
    return {row["path"]: str(row["class"]).rpartition(".")[2] for row in table}


def _kept(ranks: Sequence[RankReader]) -> str:
    """What the trace kept, as its header says: the reason why a row has no tensors to show."""
    if not ranks:
        return ""
    save = (ranks[0].header.get("options") or {}).get("save")
    return save if isinstance(save, str) else "by module"
