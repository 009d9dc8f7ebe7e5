"""Compares two traces: `align`, and the `Alignment` that it hands out.

Ties the aligner to the judges and puts what they say in one object; what it can write (tables, pages, repros)
is loaded when it is asked for. Imports no torch for stats-only traces.
"""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dispatch_trace.align.ahead import compare_ahead
from dispatch_trace.align.lineup import pair_traces
from dispatch_trace.align.pairs import Pair, Progress
from dispatch_trace.align.repeated import Folded, fold
from dispatch_trace.align.steps import chosen_steps
from dispatch_trace.compat import open_ranks
from dispatch_trace.errors import ConfigError, DispatchTraceError, NotExecutableError
from dispatch_trace.garbage import searched_seldom
from dispatch_trace.judge.findings import Finding, Judgement
from dispatch_trace.judge.floors import measured_floors
from dispatch_trace.judge.folded import judge_folded
from dispatch_trace.judge.given import given_inputs as border_inputs
from dispatch_trace.judge.golden import Golden
from dispatch_trace.judge.joined import judge
from dispatch_trace.judge.ranks import combined, setting_notices
from dispatch_trace.judge.repeats import first_unrepeated
from dispatch_trace.notebook import html_table
from dispatch_trace.report.facts import jsonable, pair_row
from dispatch_trace.session import Trace
from dispatch_trace.store.reader import RankReader
from dispatch_trace.tables import Table

if TYPE_CHECKING:
    import pandas
    import torch
    from matplotlib.axes import Axes

    from dispatch_trace.isolate import Isolation
    from dispatch_trace.questions import Errors, Site, Trail
    from dispatch_trace.replays import Replayed
    from dispatch_trace.report.repro import Repro

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Alignment:
    """Two traces, compared.

    Attributes:
      verdict: "match", "diverged" or "inconclusive".
      first: the first fatal finding, None when there is none.
      findings: all, fatal ones first, then suspects.
      pairs: every record of both traces, in the order of the target.
      coverage: {"records": {outcome: count}, "share", "compute_bytes": {…}, "not_compared": {…}}.
      notices: what a reader should know besides.
      reasons: why the verdict is inconclusive.
      ref, target: paths of the traces.
      options: what was passed to `align` besides, where it is not the default.
    """

    verdict: str
    findings: list[Finding]
    pairs: Sequence[Pair]
    coverage: dict[str, Any]
    notices: list[str]
    reasons: list[str]
    ref: str
    target: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def first(self) -> Finding | None:
        return next((finding for finding in self.findings if finding.fatal), None)

    def table(self, *, top: int = 3) -> str:
        """The first screen: verdict, coverage, first finding, and the rows around it."""
        from dispatch_trace.report import text

        return text.alignment(self, ref=self.ref, target=self.target, top=top)

    def to_json(self, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """The same facts for programs (docs/json.md).

        Args:
          path: also written there.
        Returns: plain data; numbers that JSON lacks (inf, nan) stand as strings.
        """
        found = jsonable(
            {
                "schema": SCHEMA,
                "ref": self.ref,
                "target": self.target,
                "verdict": self.verdict,
                "first": None if self.first is None else self.findings.index(self.first),
                "findings": [asdict(finding) for finding in self.findings],
                "coverage": self.coverage,
                "notices": self.notices,
                "reasons": self.reasons,
                "pairs": [pair_row(pair) for pair in self.pairs],
            }
        )
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                json.dump(found, file, indent=1, allow_nan=False)
                file.write("\n")
        result: dict[str, Any] = found
        return result

    def isolate(
        self,
        model: torch.nn.Module | Mapping[str, torch.nn.Module],
        *,
        modules: str | Iterable[str] | None = None,
        compile: bool | str = False,
    ) -> Isolation:
        """Runs modules of the target's model alone, on the inputs that the reference recorded for them.

        The model is left as it was. What cannot be run is a row that says why (docs/proofs.md).

        Args:
          model: that the target was recorded from; a dict of named models, where it has several.
          modules: patterns over module paths of the target. None: the modules of the findings, those
            around them and the innermost ones beneath them; without findings all innermost ones.
          compile: compile each module by itself: True (inductor) or the name of a backend. Code that was
            compiled before is compiled again when it runs next.
        Returns: one row for each module call, `print` shows them as a table.
        Raises:
          ConfigError: no module calls are paired. PatternError, NoMatchError: of `modules`.
        """
        from dispatch_trace.isolate import isolate

        first = self.first
        target = _rank_of(Trace(self.target), first) if first else Trace(self.target).ranks[0]
        ref = next((r for r in Trace(self.ref).ranks if r.rank == target.rank), None)
        if ref is None:
            raise ConfigError(f"{self.ref} has no rank {target.rank}.")
        return isolate(model, ref, target, self.pairs, self.findings, modules=modules, compile=compile)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """One self-contained page: first screen, curve, table, details of pairs (docs/report.md).

        Statistics and tensors come from the traces as they lie on disk now; a page without them says so where
        they are gone.

        Args:
          path: also written there.
        Returns: the page.
        """
        from dispatch_trace.report.html import page

        made = page(
            self,
            ref=self.ref,
            target=self.target,
            options=self.options,
            ref_ranks=_still_there(self.ref),
            target_ranks=_still_there(self.target),
        )
        if path is not None:
            Path(path).write_text(made, encoding="utf-8")
        return made

    def repro(self, folder: str | os.PathLike[str], finding: Finding | None = None) -> Repro:
        """Writes a script and one safetensors file that replay the guilty op, or its region, alone.

        The script needs torch and safetensors only. It prints how far what was recorded, a re-run, the
        float64 truth and the reference's value are from each other, and exits with 1 when the fault shows
        (docs/proofs.md). Ops that cannot be run again take their recorded results: `Repro.taken`, and
        `evidence["taken"]` of the finding.

        Args:
          folder: made where it does not exist.
          finding: one of `findings`; None: the first fatal one, else the first.
        Raises:
          NotExecutableError: there is no finding, or the target's trace lacks what the op read or returned.
            Nothing is written.
          ConfigError: `folder` is a file.
        """
        from dispatch_trace.report.repro import write_repro

        chosen = finding or self.first or next(iter(self.findings), None)
        if chosen is None:
            raise NotExecutableError("the alignment has no finding: there is nothing to replay.")
        target = _rank_of(Trace(self.target), chosen)
        ref = next((r for r in Trace(self.ref).ranks if r.rank == target.rank), None)
        if ref is None:
            raise NotExecutableError(f"{self.ref} has no rank {target.rank}.")
        written = write_repro(folder, chosen, self.pairs, ref, target)
        if written.taken:
            chosen.evidence["taken"] = dict(written.taken)
        return written

    def replay(
        self,
        pairs: Iterable[Pair] | None = None,
        *,
        executor: Executor | None = None,
        progress: Progress | None = None,
    ) -> list[Replayed]:
        """Runs paired ops again, each in float64 on its own recorded inputs: how well either side computes.

        Args:
          pairs: of this alignment; None: all. What is no pair of two ops that compute floats is left out.
          executor: any `concurrent.futures.Executor` whose workers can read both traces under their paths
            or URLs. None: processes of this machine where there are many pairs.
          progress: called with (done, total, what).
        Returns: one for each pair that was run, in order, whatever the executor.
        """
        from dispatch_trace.replays import replay_pairs

        chosen = list(self.pairs if pairs is None else pairs)
        ref, target = _by_rank(self.ref), _by_rank(self.target)
        found: list[Replayed] = []
        for rank, reader in ref.items():
            own = [pair for pair in chosen if pair.ref is not None and pair.ref.rank == rank]
            if own and rank in target:
                told = None if progress is None else partial(_replaying, progress)
                found += replay_pairs(own, reader, target[rank], executor=executor, progress=told)
        return found

    # Questions -------------------------------------------------------------------------------------

    def __getitem__(self, pattern: str) -> Table[Pair]:
        """The pairs of the modules that a pattern matches on either side, and of all beneath them.

        Returns: a `Table`, which prints, slices and gives a data frame.
        Raises:
          PatternError, NoMatchError: of the pattern.
        """
        from dispatch_trace.questions import pairs_of

        return pairs_of(self, pattern)

    def _ipython_key_completions_(self) -> list[str]:
        from dispatch_trace.questions import alignment_paths

        return alignment_paths(self)

    def to_pandas(self) -> pandas.DataFrame:
        """One row a pair: both sites, outcome, error and band. Needs pandas."""
        from dispatch_trace.questions import pair_table

        return pair_table(self.pairs).to_pandas()

    def upstream(self, at: Site = None, *, depth: int | None = None) -> Table[Pair]:
        """What the value at a site was computed from: pairs, nearest first.

        Args:
          at: a pair, a finding, a record of the target or its number, or the path of a module (what its
            first call returned). None: the first finding; without findings the last pair compared.
          depth: how many ops back; None: all the way.
        Raises:
          NoMatchError: no pair is at that site.
        """
        from dispatch_trace.questions import upstream

        return upstream(self, at, depth=depth)

    def error_by(self, by: str | int, at: Site = None, *, heads: int | None = None) -> Errors:
        """The relative L2 error of every token, head, channel or batch row of the value at a site.

        Args:
          by: "batch" (the first dim), "token" (the last but one), "channel" (the last), "head" (the second
            of four dims, or the last dim in `heads` parts), or the number of a dim.
          at: as in `upstream`.
          heads: how many heads lie side by side in the last dim.
        Returns: prints with the worst first; `.values` is [parts] float64.
        Raises:
          ConfigError: the value has no such dim. NoMatchError: no pair is at that site.
          NotExecutableError: a trace has no value there, nor enough to compute it.
        """
        from dispatch_trace.questions import error_by

        return error_by(self, by, at, heads=heads, ref=_by_rank(self.ref), target=_by_rank(self.target))

    def follow_row(self, row: int | Sequence[int] | None = None, at: Site = None) -> Trail:
        """Where one row (one token) goes wrong: what it is off by at every op that holds it.

        Args:
          row: its index in the leading dims of the site's value ([batch, token]), or its flat number there.
            None: the row that is furthest off.
          at: as in `upstream`, but None is the program's result: the last module output compared.
        Returns: prints the ops around the first where the row is beyond the noise band; `.first`, `.rows`.
        Raises:
          ConfigError: there is no such row. NoMatchError: no pair is at that site.
          NotExecutableError: a trace has no value there, nor enough to compute it.
        """
        from dispatch_trace.questions import follow_row

        return follow_row(self, row, at, ref=_by_rank(self.ref), target=_by_rank(self.target))

    def plot(self, path: str | os.PathLike[str] | None = None, *, ax: Axes | None = None) -> Axes:
        """Draws the error over the depth of the program, with the noise band and the findings.

        Needs matplotlib (`pip install dispatch-trace[plot]`).

        Args:
          path: also saved there; the suffix says how (`.png`, `.svg`, `.pdf`).
          ax: drawn into; None: a figure of its own.
        Raises:
          ConfigError: nothing was compared.
        """
        from dispatch_trace.report.plot import error_curve

        return error_curve(self.pairs, self.findings, title=repr(self), path=path, ax=ax)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        first = self.first
        where = (
            f", first: {first.label} {first.module or '(root)'} {first.op or ''}".rstrip() if first else ""
        )
        return f"Alignment({self.verdict}{where})"

    def _repr_html_(self) -> str:
        rows = [
            [
                f.label,
                "fatal" if f.fatal else "",
                f.step,
                f.module or "(root)",
                f.op or "",
                f.source or "",
                f.hint or "",
            ]
            for f in self.findings[:20]
        ]
        heading = f"<p><b>{html.escape(self.verdict)}</b> {html.escape(', '.join(self.reasons))}</p>"
        return heading + html_table(["label", "", "step", "module", "op", "source", "hint"], rows)


@searched_seldom()
def align(
    ref: Trace | str | os.PathLike[str] | Sequence[Trace | str | os.PathLike[str]],
    target: Trace | str | os.PathLike[str],
    *,
    golden: Trace | str | os.PathLike[str] | None = None,
    refs: Iterable[Trace | str | os.PathLike[str]] = (),
    rename: Mapping[str, str] | Iterable[str] | str | None = None,
    rows: Mapping[str, int] | None = None,
    declared: str | Iterable[str] | None = None,
    exact: bool = False,
    tolerance: float | None = None,
    steps: Any = None,
    twins: bool | None = None,
    given_inputs: bool = False,
    progress: Progress | None = None,
    executor: Executor | None = None,
) -> Alignment:
    """Compares two traces and names the first place where the target goes wrong.

    Args:
      ref, target: the trusted run, and the run under suspicion. Of a list of references the first is
        the reference, the rest count as `refs`.
      golden: a run of the reference in higher precision: the target may be as far from it as the
        reference is. One in lower precision than the reference is left out, with a notice.
      refs: more runs of the reference (other thread counts, batches, inputs one unit off). What they
        differ by from the first is a floor of every band.
      rename: {reference path: target path}, or "OLD=NEW" rules; a rule counts for all modules beneath.
      rows: {"dim": d, "keep": n}: where sizes along dim d differ, only the first n rows are compared.
      declared: lower precision that is meant, as "matmul operands bf16".
      exact: bitwise: any difference of values is a divergence.
      tolerance: relative L2 error that is allowed at every site, besides noise.
      steps: only these step numbers.
      twins: whether both programs are run again in float64, which tells another program from the same one in
        lower precision; None: where the traces hold enough (save="leaves" or "tensors").
      given_inputs: of recordings of a few modules (`select`): what they were handed counts as noise, however
        much of it there is, so that each module answers for itself alone.
      progress: called with (done, total, what).
      executor: where tensors are compared: any `concurrent.futures.Executor` whose workers can read both
        traces under their paths or URLs. None: processes of this machine, where there is much to compare.

    Raises:
      NotATraceError, TraceFormatError, SchemaVersionError, RenameError, ConfigError.
    """
    several = [ref] if isinstance(ref, (Trace, str, os.PathLike)) else list(ref)
    if not several:
        raise ConfigError("ref: expected a trace or several, got none.")
    first, second, *more = (
        t if isinstance(t, Trace) else Trace(t) for t in (several[0], target, *several[1:], *refs)
    )
    third = None if golden is None else golden if isinstance(golden, Trace) else Trace(golden)
    if tolerance is not None and not (tolerance >= 0 and math.isfinite(tolerance)):
        raise ConfigError(f"tolerance={tolerance!r}: expected a finite number that is not negative.")
    chosen = chosen_steps(steps)
    judgements = []
    theirs = {reader.rank: reader for reader in second.ranks}
    pairs = [(reader, theirs[reader.rank]) for reader in first.ranks if reader.rank in theirs]
    plain = third is None and rows is None and chosen is None and not (more or given_inputs or twins)
    folds = [fold(*pair) if plain else None for pair in pairs]
    notices, unrepeated = _repeats(first, second, more, folds)
    notices += setting_notices(first.ranks, second.ranks)

    def judged(reader: RankReader, other: RankReader) -> Judgement:
        pairing = pair_traces(reader, other, rename=rename, rows=rows, steps=chosen, progress=progress)
        compare_ahead(pairing, executor, None if progress is None else partial(_comparing, progress))
        if more:
            floors = _floors(reader, more, rows, chosen)
            for one in pairing.rounds:
                one.floors = floors
            notices.append(f"{len(more) + 1} runs of the reference: a measured floor at {len(floors)} values")
        for one in pairing.rounds if given_inputs else ():
            given = border_inputs(one)
            one.floors = {**one.floors, **{v: max(e, one.floors.get(v, 0.0)) for v, e in given.items()}}
        return judge(
            pairing,
            exact=exact,
            tolerance=tolerance,
            declared=declared,
            golden=None if third is None else _golden(third, reader, other, rename, rows, chosen),
            twins=twins,
            progress=progress,
        )

    for pair, folded in zip(pairs, folds, strict=True):
        judgements.append((None if folded is None else judge_folded(folded, judged)) or judged(*pair))
    found = combined(judgements)
    unpaired = {r.rank for r in first.ranks} ^ set(theirs)
    reasons = list(found.reasons)
    verdict = found.verdict
    if unpaired:
        reasons.append(f"ranks that only one trace has: {', '.join(map(str, sorted(unpaired)))}")
        verdict = "inconclusive" if verdict == "match" else verdict
    return Alignment(
        verdict=verdict,
        findings=[*unrepeated, *found.findings] if verdict != "diverged" else [*found.findings, *unrepeated],
        pairs=found.pairs,
        coverage=found.coverage,
        notices=[*notices, *found.notices, *(reasons if verdict == "inconclusive" else [])],
        reasons=reasons if verdict == "inconclusive" else [],
        ref=str(first.path),
        target=str(second.path),
        options=_given(
            golden=None if third is None else str(third.path),
            refs=[str(trace.path) for trace in more] or None,
            rename=rename,
            rows=rows,
            declared=declared,
            exact=exact or None,
            tolerance=tolerance,
            steps=None if chosen is None else sorted(chosen),
            twins=twins,
            given_inputs=given_inputs or None,
        ),
    )


def _replaying(progress: Progress, done: int, total: int) -> None:
    progress(done, total, "running paired ops again")


def _comparing(progress: Progress, done: int, total: int) -> None:
    progress(done, total, "comparing tensors")


def _given(**options: Any) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def _still_there(path: str) -> list[RankReader]:
    """The ranks of a trace; none where it has been moved or deleted since."""
    try:
        return open_ranks(path)
    except (DispatchTraceError, OSError):
        return []


def _by_rank(path: str) -> dict[int, RankReader]:
    return {reader.rank: reader for reader in open_ranks(path)}


def _rank_of(trace: Trace, finding: Finding) -> RankReader:
    """The rank that a finding is about: the one whose record it names."""
    for reader in trace.ranks:
        if finding.seq >= 0 and len(trace.ranks) > 1:
            try:
                record = reader.record(finding.seq)
            except KeyError:
                continue
            if (record.step, record.op) != (finding.step, finding.op or record.op):
                continue
        return reader
    return trace.ranks[0]


def _repeats(
    first: Trace, second: Trace, more: Sequence[Trace], folds: Sequence[Folded | None]
) -> tuple[list[str], list[Finding]]:
    """What does not come out the same in two runs of one program: notices, and findings about the target."""
    notices, findings = [], []
    known = {folded.ref.rank: folded for folded in folds if folded is not None}
    for number, trace in enumerate([*more, second]):
        what = f"run {number + 2} of the reference" if trace is not second else "the target"
        others = {reader.rank: reader for reader in trace.ranks}
        for reader in first.ranks:
            other = others.get(reader.rank)
            folded = known.get(reader.rank) if trace is second else None
            if folded is not None:
                reader, other = folded.ref, folded.target
            found = None if other is None else first_unrepeated(reader, other)
            if found is None:
                continue
            where = f"{found.op or found.evidence['kind']} in {found.module or '(root)'} (step {found.step})"
            doubt = "; a kernel that fails now and then looks like this too" if trace is second else ""
            notices.append(
                f"nondeterministic: {what} is the same program on the same leaves, and {where} gives another "
                f"result{doubt}"
            )
            if trace is second:
                findings.append(found)
    return notices, findings


def _floors(ref: RankReader, more: Sequence[Trace], rows: Any, steps: Any) -> dict[tuple[int, int], float]:
    """What the runs of the reference differ by in this rank."""
    others = [reader for trace in more for reader in trace.ranks if reader.rank == ref.rank]
    return measured_floors([pair_traces(ref, other, rows=rows, steps=steps) for other in others])


def _golden(third: Trace, ref: RankReader, target: RankReader, rename: Any, rows: Any, steps: Any) -> Golden:
    """The golden run's part of this rank, lined up with both others; it has the reference's module paths."""
    for other in third.ranks:
        if other.rank == ref.rank:
            return Golden(
                pair_traces(other, ref, rows=rows, steps=steps),
                pair_traces(other, target, rename=rename, rows=rows, steps=steps),
            )
    raise ConfigError(f"golden: {third.path} has no rank {ref.rank}.")


__all__ = ["Alignment", "Finding", "align"]
