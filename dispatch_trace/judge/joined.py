"""What the judges say together: estimates of all values; twins and local replay where programs run again.

Twins answer "is the target another program?", estimates "does it compute its program badly?":

* Twins find a difference that reaches an output: that is the finding; what the estimates made of it is
  listed as a suspect.
* Twins explain every output: the programs are one. What the estimates hold against its structure, wiring or
  arguments is refuted, unless the recorded outputs are farther from the program's own float64 ones than
  rounding takes them; a fault of a kernel or of precision stands, and a lone undeclared cast becomes one.
* Twins cannot tell: the estimates alone speak, and a notice says why.
* Where twins find no other program, single ops of the target that compute badly on their own inputs (`local`)
  come before what the estimates hold against the ops behind them.
* Calls whose own ops were not recorded are judged by the reference's body on what they were given (`bodies`):
  what the estimates blame them for stands, or came in with their inputs.

Every finding says which judge it came from (`Finding.judge`, `evidence["judge"]`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dispatch_trace.align.canon import SIZED_BY_VALUES, dtype_class, short
from dispatch_trace.align.graph import Program, Value
from dispatch_trace.align.pairs import Pairing, Progress
from dispatch_trace.align.summaries import SKETCH_FLOOR
from dispatch_trace.errors import DispatchTraceError, NotExecutableError
from dispatch_trace.executable import check_executable
from dispatch_trace.judge.casts import lone_casts
from dispatch_trace.judge.estimates import roundoff
from dispatch_trace.judge.faulty import with_faults
from dispatch_trace.judge.findings import Finding, Judgement, demoted
from dispatch_trace.judge.golden import Golden
from dispatch_trace.judge.resized import laid_out_otherwise, sized_otherwise
from dispatch_trace.judge.sites import Sites
from dispatch_trace.judge.verdict import Output, RoundJudge
from dispatch_trace.judge.verdict import judge as judge_by_estimates
from dispatch_trace.schema import StoredRecord
from dispatch_trace.sketch import relative_distance

if TYPE_CHECKING:
    from dispatch_trace.judge.twin_leaves import Healed, Leaves
    from dispatch_trace.judge.twin_trace import TwinTrace
    from dispatch_trace.judge.twins import Twins

# Labels that say how well something is computed, not what.
_NUMERICAL = frozenset({"introduced", "nonfinite", "uninitialised", "nondeterministic"})
# A recorded output may be this many times as far from its program's float64 one as rounding explains
# (BLAME.md section 2, a module body).
_TOO_FAR = 8.0
_MAX_HEALED = 20


def judge(
    pairing: Pairing,
    *,
    exact: bool = False,
    tolerance: float | None = None,
    declared: Any = None,
    golden: Golden | None = None,
    twins: bool | None = None,
    progress: Progress | None = None,
) -> Judgement:
    """Judges a pair of ranks.

    Args:
      pairing: the traces, lined up.
      exact: any difference counts; twins say nothing about single roundings and stay out.
      tolerance: relative error that is allowed at every site.
      declared: see `Declaration`.
      golden: a run in higher precision, lined up with both.
      twins: whether both programs are run again in float64; None: where they can be.
      progress: called with (done, total, what).
    """

    def review(first: RoundJudge, found: Judgement) -> Judgement:
        if twins is False or exact:
            return _signed(found, "estimates")
        joined = _with_twins(pairing, first, found, golden, tolerance, asked=bool(twins), progress=progress)
        return _with_bodies(first, _with_replay(pairing, first, joined, progress))

    return judge_by_estimates(
        pairing, exact=exact, tolerance=tolerance, declared=declared, golden=golden, review=review
    )


def _with_twins(
    pairing: Pairing,
    first: RoundJudge,
    found: Judgement,
    golden: Golden | None,
    tolerance: float | None,
    *,
    asked: bool,
    progress: Progress | None,
) -> Judgement:
    """What estimates and twins say; the estimates alone where no twin can run."""
    why = "steps are paired by request" if pairing.plan is not None else _why_not(pairing)
    if why:
        found = _signed(found, "estimates")
        return _noticed(found, f"judged by estimates alone: {why}") if asked else found
    from dispatch_trace.execute_ops import why_taken  # these need torch
    from dispatch_trace.judge.twin_keys import Keys
    from dispatch_trace.judge.twin_leaves import Leaves
    from dispatch_trace.judge.twins import TwinPass, run_twins

    joined = _Joined(pairing, first, found)
    try:
        leaves = Leaves(pairing, first.noise)
        keys = Keys.of(pairing, leaves)
        if keys.one_program and not joined.depends_on_values():
            result = joined.as_one_program(leaves)
            ops = [r for r in pairing.target.records.values() if r.kind == "op"]
            taken = {(record.overload, why_taken(record)) for record in ops if why_taken(record)}
        else:
            both = run_twins(pairing, first.noise, leaves, keys, progress)
            states = TwinPass(both, tolerance=tolerance, declared=first.noise.declared)
            states.run()
            second = RoundJudge(states.pairing, states, golden)
            result = joined.with_runs(both, second, second.judgement(listed=False))
            taken = set(both.target.execution.taken)
    except DispatchTraceError as error:  # a shard that cannot be read, say
        return _noticed(_signed(found, "estimates"), f"judged by estimates alone: {error}")
    if taken:
        names = ", ".join(sorted({f"{op} ({why})" for op, why in taken}))
        result = _noticed(result, f"not run again in float64, recorded results stand in: {names}")
    return result


def _with_replay(
    pairing: Pairing, first: RoundJudge, judgement: Judgement, progress: Progress | None
) -> Judgement:
    """The judgement, with faults of single ops where the programs do not differ already."""
    if any(f.fatal and f.judge == "twins" for f in judgement.findings):
        return judgement
    if all(o.difference.equal for o in first.outputs):
        return judgement
    target = pairing.target
    if _why_not_run(target, "target"):
        return judgement
    from dispatch_trace.judge.local import find_faults  # it needs torch

    def running(done: int, total: int) -> None:
        if progress is not None:
            progress(done, total, "running each op of the target again")

    try:
        faults = find_faults(first.noise, running)
    except DispatchTraceError as error:  # a shard that cannot be read, say
        return _noticed(judgement, f"the target's ops were not run again one by one: {error}")
    return with_faults(first, judgement, faults)


def _with_bodies(first: RoundJudge, judgement: Judgement) -> Judgement:
    """The judgement, with what bodies of the reference say of calls whose own ops were not recorded."""
    pairing = first.noise.pairing
    if any(f.fatal and f.judge != "estimates" for f in judgement.findings):
        return judgement
    if _why_not_run(pairing.ref, "reference") or pairing.comparer.rows is not None:
        return judgement
    from dispatch_trace.judge.body_findings import with_bodies  # it needs torch

    try:
        return with_bodies(first, judgement)
    except DispatchTraceError as error:  # a shard that cannot be read, say
        return _noticed(judgement, f"bodies of modules were not run: {error}")


def _why_not(pairing: Pairing) -> str:
    """Why the programs cannot be run again, "" where they can."""
    for name, program in (("reference", pairing.ref), ("target", pairing.target)):
        why = _why_not_run(program, name)
        if why:
            return why
        if any(r.kind == "module" and r.note.startswith("opaque") for r in program.records.values()):
            return f"the {name} holds compiled regions, which cannot be run again op by op"
    if pairing.comparer.rows is not None:
        return "only some rows are to be compared"
    return ""


def _why_not_run(program: Program, name: str) -> str:
    """Why the ops of a program cannot be run again, "" where they can."""
    try:
        check_executable(program.reader)
    except NotExecutableError as error:
        return f"the {name} cannot be run again: {error}"
    if not program.reader.complete:
        return f"the {name} trace is not complete"
    if not any(record.kind == "op" for record in program.records.values()):
        return f"the {name} holds no ops"
    return ""


class _Joined:
    """What the estimates say, in the light of the twins."""

    def __init__(self, pairing: Pairing, first: RoundJudge, estimates: Judgement) -> None:
        self._pairing = pairing
        self._first = first
        self._estimates = _signed(estimates, "estimates")
        self._healed_leaves: list[Healed] = []

    def depends_on_values(self) -> bool:
        """Whether it matters how far the outputs are from their float64 values, if the programs are one."""
        if any(f.fatal for f in self._estimates.findings):
            return True
        casts = any(kind == "cast" for o in self._first.outputs for kind, _ in o.flags)
        return casts or any(_is_settled(reason) for reason in self._estimates.reasons)

    def as_one_program(self, leaves: Leaves) -> Judgement:
        """For a target that is the reference's program op by op, where nothing depends on float64 values."""
        self._healed_leaves = leaves.healed
        findings = self._estimates.findings
        return replace(self._estimates, findings=[*findings, *self._healed(findings)])

    def with_runs(self, twins: Twins, second: RoundJudge, programs: Judgement) -> Judgement:
        """After both programs have run.

        Args:
          second: of the float64 runs; programs: what it says.
        """
        self._twins = twins
        self._healed_leaves = twins.healed
        outputs = second.outputs
        fatal = [f for f in _signed(programs, "twins").findings if f.fatal]
        resized = self._resized_by_flip() if fatal else 0
        if resized and any(f.seq >= resized for f in fatal):
            why = "a decision fell the other way, and the program was laid out by it"
            return _noticed(self._estimates, f"judged by estimates alone: {why}")
        if fatal:
            return self._other_program(fatal)
        doubts = second.noise.doubts
        if outputs and all(o.explained and not doubts(o.flags) for o in outputs):
            return self._same_program()
        return _noticed(self._estimates, f"judged by estimates alone: {self._why_open(outputs)}")

    def _resized_by_flip(self) -> int:
        """The target's first op whose layout depends on a decision that flipped; 0: none does."""
        target = self._pairing.target
        sized = [
            seq
            for (seq, _), state in self._first.noise.states.items()
            if any(kind == "flip" for kind, _ in state.flags)
            and short(target.records[seq].op) in SIZED_BY_VALUES
        ]
        decided = self._decided_otherwise()
        if decided:
            sized += [seq for seq in sized_otherwise(self._pairing) if seq > decided]
        return laid_out_otherwise(self._pairing, min(sized)) if sized else 0

    def _decided_otherwise(self) -> int:
        """The first op of the target of which either run holds other integers than its recording; 0: none."""
        pairing = self._pairing
        ours = self._first_decided(pairing.target, self._twins.target)
        theirs = pairing.ops_by_ref.get(self._first_decided(pairing.ref, self._twins.ref))
        found = [ours, 0 if theirs is None else theirs.target]
        return min((seq for seq in found if seq), default=0)

    def _first_decided(self, program: Program, twin: TwinTrace) -> int:
        """The first op whose integers in float64 are not those of the recording; 0: none is."""
        for record in program.records.values():
            for slot in program.outputs(record) if record.kind == "op" and not record.light else ():
                if dtype_class(slot.dtype) == "i":
                    error = self._error(program, twin, (record.seq, slot.index))
                    if error is not None and error > SKETCH_FLOOR:
                        return record.seq
        return 0

    # The target is another program --------------------------------------------------------------------

    def _other_program(self, fatal: list[Finding]) -> Judgement:
        listed = [demoted(f, "the two programs part elsewhere") for f in self._estimates.findings]
        known = {(f.module, f.call, f.step, f.op) for f in fatal}
        rest = [f for f in listed if (f.module, f.call, f.step, f.op) not in known]
        return replace(self._estimates, findings=[*fatal, *rest, *self._healed([*fatal, *rest])])

    # The target is the same program -------------------------------------------------------------------

    def _same_program(self) -> Judgement:
        sound = self._is_computed_well()
        findings = [
            demoted(f, "both programs give the same outputs in float64")
            if f.fatal and sound and not self._stands(f)
            else f
            for f in self._estimates.findings
        ]
        if not sound and not any(f.fatal for f in findings):
            findings = self._blame_casts(findings)
        reasons = self._estimates.reasons
        if sound and not any(f.fatal for f in findings):
            reasons = [r for r in reasons if not _is_settled(r)]
        findings = [*(f for f in findings if f.fatal), *(f for f in findings if not f.fatal)]
        findings += self._healed(findings)
        return replace(self._estimates, findings=findings, reasons=reasons)

    def _healed(self, known: list[Finding]) -> list[Finding]:
        """Leaves that were rounded to something coarser than what goes in or out around their reader."""
        noise, target = self._first.noise, self._pairing.target
        sites, named, found = Sites(noise), {f.seq for f in known}, []
        for healed in self._healed_leaves:
            readers = target.consumers.get(healed.target)
            if not readers or not healed.error or readers[0][0] in named:
                continue
            reader, owner = target.records[readers[0][0]], target.records[healed.target[0]]
            units = [roundoff(target.slot(healed.target).dtype)]
            units.append(roundoff(self._pairing.ref.slot(healed.ref).dtype))
            if max(units) <= noise.border(reader) or min(units) == max(units):
                continue
            evidence = {"kind": "parameter" if owner.kind == "param" else "constant", "error": healed.error}
            evidence |= {"judge": "twins", "healed": healed.why}
            finding = sites.finding(reader, reader.op, "suspect", evidence, None, hint=healed.why)
            found.append(replace(finding, fatal=False, judge="twins"))
        return found[:_MAX_HEALED]

    def _blame_casts(self, findings: list[Finding]) -> list[Finding]:
        """Where the outputs are worse than rounding makes them: the first cast that is no policy, if any."""
        granted = {seq for o in self._first.outputs for kind, seq in o.flags if kind == "cast"}
        alone = [seq for seq in lone_casts(self._first.noise) if seq in granted]
        first = next((f for f in findings if f.label == "suspect" and f.seq in alone[:1]), None)
        if first is None:
            return findings
        evidence = {**first.evidence, "output_error": self._worst_error()}
        blamed = replace(first, label="introduced", fatal=True, evidence=evidence)
        return [blamed if f is first else f for f in findings]

    def _worst_error(self) -> float:
        known = [o.difference.rho for o in self._first.outputs if o.difference.known]
        return max(known, default=0.0)

    def _stands(self, finding: Finding) -> bool:
        """Whether a finding of the estimates is about how the target computes, not about what."""
        if finding.label in _NUMERICAL:
            return True
        if finding.label in ("parameter", "argument"):
            healed = {seq for h in self._healed_leaves for seq in (h.target[0], h.ref[0])}
            if finding.seq in healed or finding.ref_seq in healed:
                return True
        owner = self._pairing.ref.records.get(finding.ref_seq)
        slots = [] if owner is None else [s for s in owner.slots if s.role != "in" and s.is_tensor]
        links = [link for s in slots for link in self._pairing.ref_links.get((finding.ref_seq, s.index), ())]
        return any(self._is_far(link.ref, link.target) for link in links)

    def _is_computed_well(self) -> bool:
        """Whether the recorded outputs are as close to their programs' own as rounding allows."""
        outputs = self._first.outputs
        return bool(outputs) and not any(
            self._is_far((o.ref.seq, o.ref_slot.index), (o.record.seq, o.slot.index)) is not False
            for o in outputs
        )

    def _is_far(self, ref: Value, target: Value) -> bool | None:
        """Whether the target's error against its own program is more than rounding and the reference's."""
        ours = self._error(self._pairing.target, self._twins.target, target)
        theirs = self._error(self._pairing.ref, self._twins.ref, ref)
        if ours is None or theirs is None:
            return None
        noise = self._first.noise
        u = max(roundoff(self._pairing.target.slot(target).dtype), noise.border(self._record(target)))
        u_ref = max(
            roundoff(self._pairing.ref.slot(ref).dtype), noise.ref_border(self._pairing.ref.records[ref[0]])
        )
        scaled = theirs * u / u_ref if u_ref else theirs
        return ours > _TOO_FAR * max(u, u_ref, theirs, scaled)

    def _record(self, value: Value) -> StoredRecord:
        return self._pairing.target.records[value[0]]

    def _error(self, program: Program, twin: TwinTrace, value: Value) -> float | None:
        """||recorded - float64|| / ||float64|| of a value, None where it is not known."""
        record = program.records[value[0]]
        content = program.held_content(record, record.slots[value[1]])
        wide = self._twins.pairing.target if program is self._pairing.target else self._twins.pairing.ref
        twin_record = wide.records[value[0]]
        held = wide.held_content(twin_record, twin_record.slots[value[1]])
        exact = twin.value(held) if held >= 0 else None
        recorded = program.reader.sketch(content) if content >= 0 else None
        if exact is None or recorded is None:
            return None
        if exact.pattern:  # what is as large as a mask drowns the rest in a recorded sketch
            return 0.0
        return float(relative_distance(recorded, exact.sketch))

    def _why_open(self, outputs: Iterable[Output]) -> str:
        cloudy = [*self._twins.target.cloudy.values(), *self._twins.ref.cloudy.values()]
        if cloudy:
            return f"parts of the programs could not be run again in float64 ({cloudy[0]})"
        if not list(outputs):
            return "no final output of the float64 runs could be compared"
        return "the float64 runs leave open whether the outputs agree"


def _is_settled(reason: str) -> bool:
    """Whether equality of the programs settles what made the estimates inconclusive."""
    settled = "explained only by" in reason and "an undeclared cast" not in reason
    return settled or "could be blamed" in reason


def _signed(judgement: Judgement, judge: str) -> Judgement:
    findings = [replace(f, judge=judge, evidence={**f.evidence, "judge": judge}) for f in judgement.findings]
    return replace(judgement, findings=findings)


def _noticed(judgement: Judgement, notice: str) -> Judgement:
    return replace(judgement, notices=[*judgement.notices, notice])


__all__ = ["judge"]
