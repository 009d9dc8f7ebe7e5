"""Several ranks become one judgement, and what two recordings differ in besides their values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dispatch_trace.judge.findings import Judgement
from dispatch_trace.store.reader import RankReader


def combined(judgements: Sequence[Judgement]) -> Judgement:
    """One judgement for all ranks: the worst verdict, all findings and rows."""
    if len(judgements) == 1:
        return judgements[0]
    if not judgements:
        empty = {
            "records": {},
            "share": 0.0,
            "compute_bytes": {"total": 0, "covered": 0, "deselected": 0, "share": 0.0},
            "not_compared": {},
        }
        return Judgement(
            verdict="inconclusive",
            findings=[],
            pairs=[],
            coverage=empty,
            notices=[],
            reasons=["no rank in common"],
        )
    verdicts = [j.verdict for j in judgements]
    findings = [f for j in judgements for f in j.findings]
    records: dict[str, int] = {}
    total = {"total": 0, "covered": 0, "deselected": 0}
    why: dict[str, int] = {}
    for judgement in judgements:
        for key, count in judgement.coverage["records"].items():
            records[key] = records.get(key, 0) + count
        for key in total:
            total[key] += judgement.coverage["compute_bytes"][key]
        for key, count in judgement.coverage["not_compared"].items():
            why[key] = why.get(key, 0) + count
    compared = records.get("matched", 0) + records.get("absorbed", 0)
    number = sum(records.values()) - records.get("deselected", 0)
    return Judgement(
        verdict="diverged"
        if "diverged" in verdicts
        else "match"
        if set(verdicts) == {"match"}
        else "inconclusive",
        findings=sorted(findings, key=lambda f: not f.fatal),
        pairs=[p for j in judgements for p in j.pairs],
        coverage={
            "records": records,
            "share": compared / number if number else 0.0,
            "compute_bytes": {
                **total,
                "share": total["covered"] / total["total"] if total["total"] else float(compared > 0),
            },
            "not_compared": why,
        },
        notices=[n for j in judgements for n in j.notices],
        reasons=[r for j in judgements for r in j.reasons],
    )


def _other_model(ref: dict[str, Any], target: dict[str, Any]) -> list[str]:
    """Said where the models share neither class nor module paths: a port, or the wrong pair of traces."""
    classes, paths = [], []
    for header in (ref, target):
        rows = header.get("modules") or []
        classes.append(sorted({str(row.get("class")) for row in rows if row.get("path") == ""}))
        paths.append({row.get("path") for row in rows} - {""})
    if not all(classes) or classes[0] == classes[1] or paths[0] & paths[1]:
        return []
    names = [", ".join(c) for c in classes]
    return [
        f"other models: {names[0]} in the reference, {names[1]} in the target, and no module path in common"
    ]


def _missing_inputs(ref: dict[str, Any], target: dict[str, Any]) -> list[str]:
    """Said where a side recorded no inputs: equal results hide what a site was handed."""
    options = [header.get("options") or {} for header in (ref, target)]
    lacking = [
        name
        for name, given in zip(("reference", "target"), options, strict=True)
        if given.get("inputs") is False
    ]
    if not lacking:
        return []
    who = f"the {lacking[0]} holds" if len(lacking) == 1 else "both traces hold"
    if all(given.get("level") == "op" for given in options):
        return [
            f"{who} no inputs (inputs=False): only what modules returned was compared, not what they were "
            "handed, and no ops: nothing says what an op read"
        ]
    return [
        f"{who} no inputs (inputs=False): only what modules returned was compared, not what they were handed"
    ]


def setting_notices(ref: Sequence[RankReader], target: Sequence[RankReader]) -> list[str]:
    """What a reader should know of the two recordings, whatever the comparison says."""
    found = []
    ours, theirs = ref[0].header, target[0].header
    if ref[0].path.resolve() == target[0].path.resolve():
        found.append("a trace is compared with itself")
    elif ours.get("start_time") is not None and ours["start_time"] == theirs.get("start_time"):
        found.append("both traces are the same recording")
    found += _other_model(ours, theirs)
    found += _missing_inputs(ours, theirs)
    for name in (
        "torch_version",
        "num_threads",
        "cpu_capability",
        "processor",
        "onednn",
        "device",
        "grad_enabled",
    ):
        if name in ours and name in theirs and ours[name] != theirs[name]:
            what = name.replace("_", " ")
            found.append(f"{what}: {ours[name]} in the reference, {theirs[name]} in the target")
    a, b = ours.get("environment") or {}, theirs.get("environment") or {}
    known = "environment" in ours and "environment" in theirs  # dumps of other tools keep none
    for name in sorted({*a, *b}) if known else ():
        if a.get(name) != b.get(name):
            found.append(f"{name}: {a.get(name)} in the reference, {b.get(name)} in the target")
    for name, ranks in (("reference", ref), ("target", target)):
        found += [f"{name}: {notice}" for notice in ranks[0].header.get("notices") or ()]
        for rank in ranks:
            found += [f"{name}: {why}" for why in (rank.end or {}).get("perturbed") or ()]
        if all(rank.complete for rank in ranks):
            continue
        why = [problem for rank in ranks for problem in rank.problems]
        for rank in ranks:
            why += [f"{k}: {v}" for k, v in ((rank.end or {}).get("dropped") or {}).items()]
        if not all(rank.closed for rank in ranks):
            why.append("it was not closed")
        found.append(f"the {name} is not complete ({'; '.join(why)})")
    return found
