"""What people hold in their hands: traces, records, alignments.

Stands on top of the reader, the aligner and the judges and hands out plain data from below. Imports no torch
until tensor data is asked for.
"""

from __future__ import annotations

import builtins
import html
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch_trace.align.lineup import pair_traces
from dispatch_trace.align.pairs import Pair, Progress
from dispatch_trace.align.steps import chosen_steps
from dispatch_trace.compat import open_ranks
from dispatch_trace.errors import ConfigError, DispatchTraceError, NotExecutableError
from dispatch_trace.judge.findings import Finding
from dispatch_trace.judge.floors import measured_floors
from dispatch_trace.judge.golden import Golden
from dispatch_trace.judge.joined import judge
from dispatch_trace.judge.ranks import combined, setting_notices
from dispatch_trace.judge.repeats import first_unrepeated
from dispatch_trace.metrics import derived
from dispatch_trace.report.facts import html_table, jsonable, pair_row
from dispatch_trace.schema import NO_CALL, StepInfo, StoredRecord, StoredSlot
from dispatch_trace.store.reader import RankReader

if TYPE_CHECKING:
    import pandas
    import torch

    from dispatch_trace.isolate import Isolation
    from dispatch_trace.report.repro import Repro

SCHEMA = 1
_FIELDS = (
    "kind",
    "step",
    "rank",
    "model",
    "grad_phase",
    "module",
    "call",
    "op",
    "n",
    "name",
    "overload",
    "seq",
)


class Record:
    """What was seen at one site.

    Attributes:
      step, rank, model, grad_phase, module, call, op, n: the site key; call is None outside module calls,
        op is None on all but ops.
      kind: "op", "module", "inline" or "param"; name: of inline captures and parameters, else "".
      overload, seq, args, light, random, note: as recorded.
    """

    __slots__ = ("_reader", "_record")

    def __init__(self, reader: RankReader, record: StoredRecord) -> None:
        self._reader = reader
        self._record = record

    @property
    def kind(self) -> str:
        return self._record.kind

    @property
    def step(self) -> int:
        return self._record.step

    @property
    def rank(self) -> int:
        return self._record.rank

    @property
    def model(self) -> str:
        return self._record.model

    @property
    def grad_phase(self) -> str:
        return self._record.grad_phase

    @property
    def module(self) -> str:
        return self._record.module

    @property
    def call(self) -> int | None:
        return None if self._record.call == NO_CALL else self._record.call

    @property
    def op(self) -> str | None:
        return self._record.op if self._record.kind == "op" else None

    @property
    def n(self) -> int:
        return self._record.n

    @property
    def name(self) -> str:
        return self._record.name

    @property
    def overload(self) -> str:
        return self._record.overload

    @property
    def seq(self) -> int:
        return self._record.seq

    @property
    def args(self) -> dict[str, Any]:
        """Arguments by name, encoded as in docs/format.md; a tensor is {"ref": slot index}."""
        return dict(self._record.args)

    @property
    def light(self) -> bool:
        return self._record.light

    @property
    def random(self) -> bool:
        return self._record.random

    @property
    def note(self) -> str:
        return self._record.note

    @property
    def slots(self) -> tuple[StoredSlot, ...]:
        return self._record.slots

    @property
    def source(self) -> str | None:
        """ "file:line" of the first frame outside torch, None where unknown."""
        found = self._record.source
        return None if found is None else f"{found[0]}:{found[1]}"

    def slot(self, name: str = "out") -> StoredSlot:
        """A slot by name; "out" is also the first output of ops that name theirs otherwise.

        Raises:
          KeyError: the record has no such slot.
        """
        for slot in self._record.slots:
            if slot.name == name:
                return slot
        if name == "out":
            for slot in self._record.slots:
                if slot.role != "in" and slot.is_tensor:
                    return slot
        names = ", ".join(slot.name for slot in self._record.slots)
        raise KeyError(f"{self!r} has no slot {name!r}; it has {names or 'none'}")

    def stats(self, slot: str = "out") -> dict[str, int | float | None]:
        """Statistics, and mean, std, abs_mean, rms and l2 besides; empty where none were taken."""
        content = self.slot(slot).content
        if content < 0:
            return {}
        found = dict(self._reader.content(content).stats)
        return {**found, **derived(found)} if found else {}

    def sketch(self, slot: str = "out") -> np.ndarray[Any, Any] | None:
        """[k] float32, or None where none was taken."""
        content = self.slot(slot).content
        return None if content < 0 else self._reader.sketch(content)

    def hash(self, slot: str = "out") -> str:
        """xxh3-128 of the value as 32 hexadecimal digits, "" where none was taken."""
        content = self.slot(slot).content
        return "" if content < 0 else self._reader.content(content).hash

    def tensor(self, slot: str = "out") -> torch.Tensor:
        """The value, bit-exact: from the trace, or by running what led to it again.

        Raises:
          KeyError: the record has no such slot.
          NotExecutableError: the slot holds no tensor, or the trace not enough to compute it.
          TraceFormatError: the shard that holds it is missing or corrupt.
        """
        found = self.slot(slot)
        if found.content >= 0 and self._reader.content(found.content).has_data:
            return self._reader.tensor(found.content)
        from dispatch_trace import execute

        return execute.tensor(self._reader, self._record.seq, found.name)

    def execute(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Runs the op on its own recorded inputs, by default in float64.

        Returns: outputs and written arguments by slot name.
        Raises:
          NotExecutableError: it is no op, or its inputs are not there.
        """
        import torch

        from dispatch_trace import execute

        return execute.execute_record(
            self._reader, self._record.seq, torch.float64 if dtype is None else dtype
        )

    def __repr__(self) -> str:
        what = self.op or self.kind
        where = f"{self.module or '(root)'}#{self.call}" if self.call is not None else self.module or "(root)"
        return f"Record({self.seq}: {where} {what}{f' {self.name}' if self.name else f'[{self.n}]'})"


class Trace:
    """A recorded run.

    Attributes:
      path: its directory.
      ranks: one reader for each rank.
      header: of the first rank.
      closed: it has its end frames. complete: closed, nothing dropped, files sound.
      executable: its leaves suffice to run it again.
      steps, modules: steps, and the table of modules.
      records: an iterator over all records, in order.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.ranks = open_ranks(path)

    @property
    def header(self) -> dict[str, Any]:
        return self.ranks[0].header

    @property
    def closed(self) -> bool:
        return all(rank.closed for rank in self.ranks)

    @property
    def complete(self) -> bool:
        return all(rank.complete for rank in self.ranks)

    @property
    def executable(self) -> bool:
        if self.header.get("options", {}).get("level") == "module":
            return False
        from dispatch_trace import execute

        try:
            for rank in self.ranks:
                execute.check_executable(rank)
        except NotExecutableError:
            return False
        return self.complete

    @property
    def steps(self) -> list[StepInfo]:
        return self.ranks[0].steps

    @property
    def modules(self) -> list[dict[str, Any]]:
        """[{model, path, class, parameters}] of every module of the recorded models."""
        return list(self.header.get("modules") or [])

    @property
    def records(self) -> Iterator[Record]:
        return self.find()

    @property
    def num_records(self) -> int:
        return sum(rank.num_records for rank in self.ranks)

    def find(
        self,
        *,
        module: str | None = None,
        op: str | None = None,
        step: int | None = None,
        kind: str | None = None,
        call: int | None = None,
        n: int | None = None,
        name: str | None = None,
        grad_phase: str | None = None,
        model: str | None = None,
        rank: int | None = None,
    ) -> Iterator[Record]:
        """Records whose fields equal what is given, in order; None stands for any.

        Args:
          op: base name (`aten.mm`) or overload (`aten.mm.default`).
        """
        where: dict[str, Any] = {
            key: value
            for key, value in (
                ("module", module),
                ("step", step),
                ("kind", kind),
                ("call", call),
                ("n", n),
                ("name", name),
                ("grad_phase", grad_phase),
                ("model", model),
            )
            if value is not None
        }
        for reader in self.ranks:
            if rank is not None and reader.rank != rank:
                continue
            for record in reader.records(**where):
                if op is None or op in (record.op, record.overload):
                    yield Record(reader, record)

    def verify(self) -> list[str]:
        """What is wrong with the files, in words; empty when sound."""
        many = len(self.ranks) > 1
        return [f"rank {r.rank}: {p}" if many else p for r in self.ranks for p in r.verify()]

    def execute(self, dtype: torch.dtype | None = None, *, rank: int = 0) -> Any:
        """Runs the recorded op graph of a rank again, in the recorded precision or in torch.float64.

        Returns: an `execute.Execution`.
        Raises:
          NotExecutableError: the trace holds no data of leaves.
        """
        from dispatch_trace import execute

        return execute.execute_rank(self._rank(rank), dtype=dtype)

    def _rank(self, number: int) -> RankReader:
        for reader in self.ranks:
            if reader.rank == number:
                return reader
        raise ConfigError(
            f"rank={number}: {self.path} has ranks {', '.join(str(r.rank) for r in self.ranks)}."
        )

    def to_pandas(self) -> pandas.DataFrame:
        """One row for each tensor slot of each record, with its statistics. Needs pandas.

        The statistic `n`, a count of elements, is the column `numel`: `n` is part of the site key.
        """
        import pandas

        rows = []
        for record in self.records:
            site = {name: getattr(record, name) for name in _FIELDS}
            for slot in record.slots:
                if slot.is_tensor:
                    content = {} if slot.content < 0 else dict(record._reader.content(slot.content).stats)
                    if "n" in content:
                        content["numel"] = content.pop("n")
                    rows.append(
                        {
                            **site,
                            "slot": slot.name,
                            "role": slot.role,
                            "dtype": slot.dtype,
                            "shape": slot.shape,
                            **content,
                        }
                    )
        return pandas.DataFrame(rows)

    def __repr__(self) -> str:
        state = "complete" if self.complete else "closed" if self.closed else "not closed"
        return f"Trace({str(self.path)!r}, {self.num_records} records, {len(self.steps)} steps, {state})"

    def _repr_html_(self) -> str:
        rows = {
            "path": self.path,
            "records": self.num_records,
            "steps": len(self.steps),
            "ranks": len(self.ranks),
            "state": "complete" if self.complete else "not complete",
            "torch": self.header.get("torch_version", ""),
            "save": self.header.get("options", {}).get("save", ""),
        }
        return html_table(["", ""], [[key, value] for key, value in rows.items()])


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
    pairs: list[Pair]
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
            with builtins.open(path, "w", encoding="utf-8") as file:
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


def open(path: str | os.PathLike[str]) -> Trace:
    """Opens a recorded trace.

    Raises:
      NotATraceError, TraceFormatError, SchemaVersionError: as `compat.open_ranks`.
    """
    return Trace(path)


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
    progress: Progress | None = None,
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
      progress: called with (done, total, what).

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
    notices, unrepeated = _repeats(first, second, more)
    notices += setting_notices(first.ranks, second.ranks)
    theirs = {reader.rank: reader for reader in second.ranks}
    for reader in first.ranks:
        other = theirs.get(reader.rank)
        if other is None:
            continue
        pairing = pair_traces(reader, other, rename=rename, rows=rows, steps=chosen, progress=progress)
        if more:
            floors = _floors(reader, more, rows, chosen)
            for one in pairing.rounds:
                one.floors = floors
            notices.append(f"{len(more) + 1} runs of the reference: a measured floor at {len(floors)} values")
        judgements.append(
            judge(
                pairing,
                exact=exact,
                tolerance=tolerance,
                declared=declared,
                golden=None if third is None else _golden(third, reader, other, rename, rows, chosen),
                twins=twins,
                progress=progress,
            )
        )
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
            rename=rename,
            rows=rows,
            declared=declared,
            exact=exact or None,
            tolerance=tolerance,
            steps=None if chosen is None else sorted(chosen),
            twins=twins,
        ),
    )


def _given(**options: Any) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def _still_there(path: str) -> list[RankReader]:
    """The ranks of a trace; none where it has been moved or deleted since."""
    try:
        return open_ranks(path)
    except (DispatchTraceError, OSError):
        return []


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


def _repeats(first: Trace, second: Trace, more: Sequence[Trace]) -> tuple[list[str], list[Finding]]:
    """What does not come out the same in two runs of one program: notices, and findings about the target."""
    notices, findings = [], []
    for number, trace in enumerate([*more, second]):
        what = f"run {number + 2} of the reference" if trace is not second else "the target"
        others = {reader.rank: reader for reader in trace.ranks}
        for reader in first.ranks:
            other = others.get(reader.rank)
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


__all__ = ["Alignment", "Finding", "Record", "Trace", "align", "open"]
