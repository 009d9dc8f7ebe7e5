#!/usr/bin/env python
"""A mutation bench for localisation: planted bugs and harmless rewrites in transformers' models.

    python tools/mutants.py                             30 mutants, 10 clean pairs, tensors and stats
    python tools/mutants.py --json out.json --num 60    resumable: what the file holds is not run again
    python tools/mutants.py --seeds 1-5 --precision mixed --save leaves --arch llama,t5
    python tools/mutants.py --kernels --num 60 --save tensors    one op's result is slightly wrong
    python tools/mutants.py --only 'llama-rope*' --keep DIR    these cases, and their traces
    python tools/mutants.py --all --arch gpt_oss,swin    models that are drawn only where named
    python tools/mutants.py --save hunt --num 24 --num-clean 8    by `dt.hunt`, which records for itself
    python tools/mutants.py --save live    the target is judged as it runs, against the reference's statistics

Half of the mutants have changed weights. Which kinds, layers and constants is a function of the seed alone.
With --precision mixed every target is converted to bfloat16 after its bug was planted, with bf16 both models
are; bugs that this rounds away bit for bit are drawn again. --no-twins judges by estimates alone.
Each pair is recorded and aligned through the public API; a case that fails is a row, and the rest goes on.
The naive rules of `mutation.naive` are judged on the same pairs.

Outcome of a mutant: `located` (diverged, at the planted module), `wrong` (diverged elsewhere),
`inconclusive`, `missed` (match), `error`. Of a clean pair: `match`, `inconclusive`, `alarm` (diverged),
`error`.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import mutation.anywhere
import mutation.clean
import mutation.kernels
import mutation.models
import mutation.program
import mutation.rounding
import mutation.weights  # noqa: F401
from mutation.cases import ARCHS, CLEAN, MUTANTS, Built, Precision, Truth, build, drawn, parse_name
from mutation.naive import RULES, first_differing
from mutation.ways import Answer, align_pair, hunt_pair, live_pair

import dispatch_trace as dt

HUNT, LIVE = "hunt", "live"
SAVES = ("tensors", "leaves", "stats", HUNT, LIVE)
Group = Literal["program", "weights", "fault"]
# What a planted bug changes -> the group of cases that it is drawn in.
_GROUPS: dict[str, Group] = {
    "program": "program",
    "kernel": "program",
    "weights": "weights",
    "fault": "fault",
}
# One case of each sort, small enough for every commit.
QUICK = (
    "llama-rope_pairs-0",
    "gpt2-norm_eps-0",
    "mixtral-weight_scaled-0",
    "vit-kernel_scaled-0",
    "bert-weight_transposed-0",
    "bert-saved_and_loaded-0",
    "qwen-attention_fused-0",
)


@dataclass(slots=True, kw_only=True)
class Row:
    """One case judged at one level of saving; what the JSON file holds.

    Attributes:
      case, seed, save, precision, twins: what was run and how; together they identify the row.
      arch, kind: parts of the case's name.
      changes: "program", "kernel" or "weights" (what the planted bug changes), "" for a clean pair.
      attention, what: implementation of both models; the bug in words.
      true_module, true_call, true_ops, true_n, accept_modules: see `mutation.cases.Truth`.
      effect: relative L2 between the outputs; noise: the reference's own float32 error, likewise.
      draws: how many draws it took until the bug reached the output.
      verdict, found_module, found_call, found_op, found_label: the alignment's answer and its first finding.
      module_ok, op_ok: None where there is nothing to judge.
      named: the first finding of any kind, suspects included, names the planted module: what an inconclusive
        verdict is still good for.
      outcome: see the module's docstring.
      naive: by rule, the outcome of the naive rules (they cannot be inconclusive).
      error: message of an exception, "" without one; seconds: of recording and alignment.
      runs, written_bytes, late: see `mutation.ways.Answer`.
    """

    case: str
    seed: int
    save: str
    precision: Precision = "fp32"
    twins: bool = True
    arch: str = ""
    kind: str = ""
    changes: str = ""
    attention: str = ""
    what: str = ""
    true_module: str | None = None
    true_call: int | None = None
    true_ops: list[str] | None = None
    true_n: int | None = None
    accept_modules: list[str] = field(default_factory=list)
    effect: float | None = None
    noise: float | None = None
    draws: int = 0
    verdict: str = ""
    found_module: str | None = None
    found_call: int | None = None
    found_op: str | None = None
    found_n: int | None = None
    found_label: str | None = None
    module_ok: bool | None = None
    op_ok: bool | None = None
    named: bool | None = None
    outcome: str = "error"
    naive: dict[str, str] = field(default_factory=dict)
    error: str = ""
    seconds: float = 0.0
    runs: int = 0
    written_bytes: int = 0
    late: str = ""

    @property
    def key(self) -> tuple[str, int, str, str, bool]:
        return self.case, self.seed, self.save, self.precision, self.twins

    @property
    def is_clean(self) -> bool:
        return self.changes == ""


def draw_cases(
    num: int,
    seed: int,
    group: Group,
    kinds: Collection[str] = (),
    archs: Collection[str] = (),
    precision: Precision = "fp32",
) -> list[str]:
    """Names of `num` mutants of one group: kinds in a shuffled order, the architectures in turn.

    Args:
      group: which kinds: those with changed weights, those with another program (or a coarse kernel), or
        faulty kernels.
      kinds, archs: only these; none: all.
      precision: of the models; leaves out what is no bug in it.
    """
    offers = {
        kind: drawn(known.archs, archs)
        for kind, known in sorted(MUTANTS.items())
        if _GROUPS[known.changes] == group and (not kinds or kind in kinds)
        if precision == "fp32" or not known.fp32_only
    }
    order = [kind for kind, offered in offers.items() if offered]
    chance = random.Random(f"{seed}/{group}")
    chance.shuffle(order)
    for offered in offers.values():
        chance.shuffle(offered)
    return _spread(num, order, offers)


def clean_cases(num: int, kinds: Collection[str] = (), archs: Collection[str] = ()) -> list[str]:
    """Names of `num` clean pairs: every kind once, the architectures in turn, then again."""
    offers = {kind: drawn(known.archs, archs) for kind, known in CLEAN.items() if not kinds or kind in kinds}
    return _spread(num, [kind for kind, offered in offers.items() if offered], offers)


def _spread(num: int, order: Sequence[str], offers: Mapping[str, Sequence[str]]) -> list[str]:
    """`num` cases: the kinds in turn, each on the architecture that has had fewest cases so far."""
    names: list[str] = []
    uses: Counter[str] = Counter()
    for position in range(num if order else 0):
        kind = order[position % len(order)]
        least = min(uses[arch] for arch in offers[kind])
        fresh = [arch for arch in offers[kind] if uses[arch] == least]
        arch = fresh[position // len(order) % len(fresh)]
        uses[arch] += 1
        number = sum(name.startswith(f"{arch}-{kind}-") for name in names)
        names.append(f"{arch}-{kind}-{number}")
    return names


def every_case(kinds: Collection[str] = (), archs: Collection[str] = ()) -> list[str]:
    """Each kind once on each architecture; without names, on each that is drawn from."""
    return [
        f"{arch}-{known.kind}-0"
        for known in [*MUTANTS.values(), *CLEAN.values()]
        for arch in drawn(known.archs, archs)
        if not kinds or known.kind in kinds
    ]


def select_cases(patterns: Sequence[str]) -> list[str]:
    """The cases that match a shell pattern, or are named in full."""
    names: list[str] = []
    for pattern in patterns:
        known = every_case(archs=ARCHS)
        matched = fnmatch.filter(known, pattern) or fnmatch.filter(known, f"*{pattern}*")
        if not matched:
            parse_name(pattern)
            matched = [pattern]
        names.extend(name for name in matched if name not in names)
    return names


def run_case(
    name: str,
    seed: int,
    saves: Iterable[str],
    keep: Path | None = None,
    *,
    precision: Precision = "fp32",
    twins: bool = True,
) -> list[Row]:
    """Builds, records and judges one case; a failure becomes the rows' `error`."""
    arch, kind, _ = parse_name(name)
    changes = MUTANTS[kind].changes if kind in MUTANTS else ""
    how: dict[str, Any] = {"precision": precision, "twins": twins, "arch": arch, "kind": kind}
    rows = [Row(case=name, seed=seed, save=save, changes=changes, **how) for save in saves]
    try:
        built = build(name, seed, precision)
        claims = first_differing(built.subject)
    except Exception as error:
        for row in rows:
            row.error = _message(error)
        return rows
    for row in rows:
        _describe_case(row, built, claims)
        directory = keep / name if keep else Path(tempfile.mkdtemp(prefix="mutants-"))
        directory.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        try:
            if row.save == HUNT:
                answer = hunt_pair(built.subject, directory)
            elif row.save == LIVE:
                answer = live_pair(built.subject, directory)
            else:
                answer = align_pair(built.subject, directory, row.save, twins=None if twins else False)
            _judge(row, built.truth, answer)
        except Exception as error:
            row.error = _message(error)
        finally:
            row.seconds = round(time.perf_counter() - began, 2)
            if keep is None:
                shutil.rmtree(directory, ignore_errors=True)
    return rows


def _describe_case(row: Row, built: Built, claims: dict[str, str | None]) -> None:
    row.attention = built.subject.attention
    row.effect, row.noise, row.draws = built.effect, built.noise, built.draws
    truth = built.truth
    if truth is not None:
        row.what = truth.what
        row.true_module, row.true_call = truth.module, truth.call
        row.true_ops = None if truth.ops is None else list(truth.ops)
        row.true_n = truth.n
        row.accept_modules = list(truth.accept_modules)
    for rule, claim in claims.items():
        verdict = "match" if claim is None else "diverged"
        right = truth is not None and claim in (truth.module, *truth.accept_modules)
        row.naive[rule] = _outcome(truth, verdict, right)


def _op_number(target: Path, seq: int) -> int | None:
    """Which op of its name in its call a record is."""
    return next((r.n for r in dt.open(target).records if r.kind == "op" and r.seq == seq), None)


def _judge(row: Row, truth: Truth | None, answer: Answer) -> None:
    row.verdict = answer.verdict
    row.runs, row.written_bytes, row.late = answer.runs, answer.written_bytes, answer.late
    first = answer.first
    if first is not None:
        row.found_module, row.found_call = first.module, first.call
        row.found_op, row.found_label = first.op, first.label
        row.found_n = None if answer.target is None else _op_number(answer.target, first.seq)
    if truth is not None:
        diverged = row.verdict == "diverged" and first is not None
        accepted = (truth.module, *truth.accept_modules)
        row.module_ok = diverged and row.found_module in accepted and row.found_call == truth.call
        if truth.ops is not None:
            row.op_ok = row.module_ok and row.found_op in truth.ops and truth.n in (None, row.found_n)
        listed = next(iter(answer.findings), None)
        row.named = listed is not None and listed.module in accepted
    row.outcome = _outcome(truth, row.verdict, bool(row.module_ok))


def _outcome(truth: Truth | None, verdict: str, right: bool) -> str:
    if verdict == "inconclusive":
        return verdict
    if truth is None:
        return {"match": "match", "diverged": "alarm"}[verdict]
    if verdict == "match":
        return "missed"
    return "located" if right else "wrong"


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def describe(row: Row) -> str:
    """The row as one line of text."""
    if row.error:
        return f"{row.case:32} {row.save:8} error         {row.error}"
    found = "" if row.found_module is None else f"{row.found_label} {row.found_module or '(root)'}"
    if row.found_op is not None:
        found += f" {row.found_op}"
    if row.late:
        found += f" (certain since {row.late})"
    if row.op_ok is False and row.module_ok:
        found += " (op wrong)"
    if row.outcome == "inconclusive" and row.named:
        found += "suspects the right module"
    if (row.outcome not in ("located", "match") or row.op_ok is False) and row.true_module is not None:
        found += f" | truth: {row.true_module} {'/'.join(row.true_ops or ['-'])}, {row.what}"
    assert row.effect is not None and row.noise is not None
    return f"{row.case:32} {row.save:8} {row.outcome:13} {row.effect:7.1e}/{row.noise:7.1e}  {found}"


def scoreboard(rows: Sequence[Row]) -> str:
    """Located, missed and alarmed cases, for each level of saving and for each naive rule."""
    lines = [
        f"{'':22}{'located':>9}{'ops':>8}{'inconcl.':>10}{'wrong':>7}{'missed':>8}{'errors':>8}"
        f"{'alarms':>9}{'matches':>9}"
    ]
    for save in dict.fromkeys(row.save for row in rows):
        chosen = [row for row in rows if row.save == save]
        mutants = [row for row in chosen if not row.is_clean]
        ops = [row for row in mutants if row.true_ops is not None]
        right_ops = f"{sum(bool(row.op_ok) for row in ops)}/{len(ops)}"
        lines.append(_score(save, [(row.is_clean, row.outcome) for row in chosen], right_ops))
        if save == HUNT and chosen:
            runs, written = [r.runs for r in chosen], [r.written_bytes / 1e6 for r in chosen]
            lines.append(
                f"{'':22}runs {min(runs)} to {max(runs)}, {sum(runs)} in all; MB written "
                f"{min(written):.2g} to {max(written):.2g}, {sum(written):.3g} in all"
            )
    once = {row.case: row for row in rows if row.naive}
    for rule in RULES:
        lines.append(_score(rule, [(row.is_clean, row.naive[rule]) for row in once.values()], "-"))
    return "\n".join(lines)


def _score(name: str, outcomes: Sequence[tuple[bool, str]], ops: str) -> str:
    mutants = Counter(outcome for is_clean, outcome in outcomes if not is_clean)
    pairs = Counter(outcome for is_clean, outcome in outcomes if is_clean)
    num_mutants, num_pairs = mutants.total(), pairs.total()
    located = f"{mutants['located']}/{num_mutants}"
    alarms, matches = f"{pairs['alarm']}/{num_pairs}", f"{pairs['match']}/{num_pairs}"
    return (
        f"{name:22}{located:>9}{ops:>8}{mutants['inconclusive']:>10}{mutants['wrong']:>7}"
        f"{mutants['missed']:>8}{mutants['error'] + pairs['error']:>8}{alarms:>9}{matches:>9}"
    )


def not_located(rows: Sequence[Row]) -> str:
    """What was not located to the op, and what did not match, by kind; "" if all was right."""
    bad = [row for row in rows if row.outcome not in ("located", "match") or row.op_ok is False]
    lines: list[str] = []
    for kind in sorted({row.kind for row in bad}):
        total = sum(row.kind == kind for row in rows)
        mine = [row for row in bad if row.kind == kind]
        lines.append(f"\n{kind}: {len(mine)} of {total}")
        lines += [f"  {row.seed}/{row.precision}/{describe(row)}" for row in mine]
    return "\n".join([*lines, ""]) if lines else ""


def load_rows(file: Path) -> list[Row]:
    """Rows of an earlier run, [] when there is no such file."""
    return [Row(**row) for row in json.loads(file.read_text())] if file.exists() else []


def save_rows(file: Path, rows: Sequence[Row]) -> None:
    """Replaces the file in one step, so that a stopped run leaves a whole one."""
    partial = file.with_name(file.name + ".part")
    partial.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    partial.replace(file)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num", type=int, default=30, help="mutants to draw, half with changed weights")
    parser.add_argument("--num-clean", type=int, default=10, help="clean pairs")
    parser.add_argument("--all", action="store_true", help="every kind on every architecture instead")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="these cases instead (shell patterns)")
    parser.add_argument("--arch", metavar="NAMES", help="only these architectures, comma-separated")
    parser.add_argument("--kind", metavar="NAMES", help="only these kinds, comma-separated")
    parser.add_argument("--quick", action="store_true", help="the few cases that run with every commit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", metavar="LIST", help="several, one after the other: 1-5,8")
    parser.add_argument("--save", default="tensors,stats", help=f"comma-separated: {', '.join(SAVES)}")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="results; rows that it holds are not run again"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the traces under DIR")
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16", "mixed"),
        default="fp32",
        help="of both models; mixed: a bfloat16 target against a float32 reference",
    )
    parser.add_argument("--kernels", action="store_true", help="faulty kernels instead: --num of them")
    parser.add_argument("--no-twins", dest="twins", action="store_false", help="judge by estimates alone")
    parser.add_argument("--list", action="store_true", help="list the cases and stop")
    options = parser.parse_args(arguments)

    saves = options.save.split(",")
    if not set(saves) <= set(SAVES):
        parser.error(f"--save {options.save}: expected some of {', '.join(SAVES)}")
    try:
        cases = [(name, seed) for seed in _seeds(options) for name in _wanted(options, seed)]
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        print("\n".join(dict.fromkeys(name for name, _ in cases)))
        return 0

    run = functools.partial(run_case, precision=options.precision, twins=options.twins)
    rows = load_rows(options.json) if options.json else []
    done = {row.key: row for row in rows if not row.error}
    rows = list(done.values())
    shown: list[Row] = []
    for name, seed in cases:
        keys = {save: (name, seed, save, options.precision, options.twins) for save in saves}
        missing = [save for save in saves if keys[save] not in done]
        fresh = run(name, seed, missing, options.keep) if missing else []
        rows.extend(fresh)
        if options.json and fresh:
            save_rows(options.json, rows)
        earlier = [done[keys[save]] for save in saves if save not in missing]
        for row in (*earlier, *fresh):
            shown.append(row)
            print(describe(row), flush=True)
    print()
    print(scoreboard(shown))
    print(not_located(shown), end="")
    return 0


def _seeds(options: argparse.Namespace) -> list[int]:
    """`--seeds 1-3,7` in full; else the one seed."""
    if options.seeds is None:
        return [options.seed]
    found: list[int] = []
    for part in options.seeds.split(","):
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found


def _wanted(options: argparse.Namespace, seed: int) -> list[str]:
    if options.quick:
        return list(QUICK)
    if options.only:
        return select_cases(options.only)
    only: dict[str, list[str]] = {"kinds": _listed(options.kind), "archs": _listed(options.arch)}
    unknown = [kind for kind in only["kinds"] if kind not in MUTANTS and kind not in CLEAN]
    unknown += [arch for arch in only["archs"] if arch not in ARCHS]
    if unknown:
        raise ValueError(f"no such kind or architecture: {', '.join(unknown)}; see --list --all")
    if options.all:
        return every_case(**only)
    draw = functools.partial(draw_cases, **only, precision=options.precision)
    if options.kernels:
        return draw(options.num, seed, "fault")
    num_weights = options.num // 2
    return [
        *draw(options.num - num_weights, seed, "program"),
        *draw(num_weights, seed, "weights"),
        *clean_cases(options.num_clean, **only),
    ]


def _listed(text: str | None) -> list[str]:
    return [] if text is None else text.split(",")


if __name__ == "__main__":
    sys.exit(main())
