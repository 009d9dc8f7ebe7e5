"""From states of values to a verdict: walks back from final outputs that are wrong to what is to blame.

`diverged` iff a fatal finding exists; a finding is fatal only if what it names reaches a final output.
`match` needs every final output compared and explained, and nearly all compute bytes matched or absorbed.
Everything else is `inconclusive`, and `reasons` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from dispatch_trace.align.canon import is_factory
from dispatch_trace.align.content import Difference
from dispatch_trace.align.graph import Program, Value
from dispatch_trace.align.named import keeps_first_output
from dispatch_trace.align.pairs import Pairing, module_slots
from dispatch_trace.judge.blame import Blame
from dispatch_trace.judge.captured import captured_outputs, lacks_return
from dispatch_trace.judge.casts import own_precision
from dispatch_trace.judge.coverage import count_coverage, make_pairs
from dispatch_trace.judge.declared import Declaration
from dispatch_trace.judge.estimates import C, roundoff
from dispatch_trace.judge.findings import NEVER_FATAL, Finding, Judgement, Verdict, demoted
from dispatch_trace.judge.golden import Golden
from dispatch_trace.judge.measured import figures_notices
from dispatch_trace.judge.noise import NoisePass, within
from dispatch_trace.judge.persistence import is_hidden, is_other_form, module_values
from dispatch_trace.judge.reordered import without_relabelling
from dispatch_trace.judge.suspects import Suspects
from dispatch_trace.per_step import greatest, hypot
from dispatch_trace.schema import NO_CALL, StoredRecord, StoredSlot

MIN_COVERAGE = 0.9
# An ill-conditioned step may lose this many units of the border's precision before something is amiss.
LOST_PRECISION = 8.0


Review: TypeAlias = Callable[["RoundJudge", Judgement], Judgement]


@dataclass(slots=True)
class Output:
    """A final output of a step, compared.

    Attributes:
      record, slot: where the target returns it.
      ref, ref_slot: where the reference does.
      difference: from the reference's.
      explained: within noise; None where it could not be compared.
      band: up to which error it is noise.
      flags: what had to be granted.
    """

    record: StoredRecord
    slot: StoredSlot
    ref: StoredRecord
    ref_slot: StoredSlot
    difference: Difference
    explained: bool | None
    band: float
    flags: frozenset[tuple[str, int]]


def judge(
    pairing: Pairing,
    *,
    exact: bool = False,
    tolerance: float | None = None,
    declared: Any = None,
    golden: Golden | None = None,
    review: Review | None = None,
) -> Judgement:
    """Judges a pair of ranks by estimates.

    Args:
      pairing: the traces, lined up.
      exact: any difference counts.
      tolerance: relative error that is allowed at every site.
      declared: see `Declaration`.
      golden: a run in higher precision, lined up with both.
      review: has the last word on each round: called with the judge by estimates and what it says.
    """
    rounds = []
    for each in pairing.rounds:
        noise = NoisePass(each, exact=exact, tolerance=tolerance, declared=Declaration.of(declared))
        with np.errstate(all="ignore"):  # numbers that are not finite are judged, not warned of
            noise.run()
            first = RoundJudge(each, noise, golden)
            judgement = first.judgement()
            rounds.append(judgement if review is None else review(first, judgement))
    return _all_rounds(pairing, rounds)


def _all_rounds(pairing: Pairing, rounds: list[Judgement]) -> Judgement:
    """One judgement for all rounds: a target's step that serves several requests was judged with each."""
    found = rounds[0]
    if len(rounds) > 1:
        coverage = count_coverage([pair for one in rounds for pair in one.pairs], pairing)
        found = Judgement(
            verdict="inconclusive",
            findings=sorted(
                _distinct(f for one in rounds for f in one.findings),
                key=lambda f: (not f.fatal, f.step, f.seq),
            ),
            pairs=[pair for one in rounds for pair in one.pairs],
            coverage=coverage,
            notices=list(dict.fromkeys(n for one in rounds for n in one.notices)),
            reasons=list(dict.fromkeys(r for one in rounds for r in one.reasons)),
        )
    notices = [*(pairing.plan.notices if pairing.plan is not None else []), *found.notices]
    reasons = list(found.reasons)
    share = found.coverage["compute_bytes"]["share"]
    if share < MIN_COVERAGE:
        reasons.append(f"only {100 * share:.1f} % of the compute bytes were matched or absorbed")
    findings = [_with_model(f, pairing) for f in found.findings]
    fatal = any(f.fatal for f in findings)
    verdict: Verdict = "diverged" if fatal else "inconclusive" if reasons else "match"
    return replace(
        found,
        verdict=verdict,
        findings=findings,
        notices=notices,
        reasons=reasons if verdict == "inconclusive" else [],
    )


def _with_model(finding: Finding, pairing: Pairing) -> Finding:
    """The finding with the model it is in, where the program has several."""
    for seq, program in ((finding.seq, pairing.target), (finding.ref_seq, pairing.ref)):
        record = program.records.get(seq)
        if record is not None:
            return replace(finding, model=record.model) if record.model else finding
    return finding


class RoundJudge:
    """Judges one round by the states of its values.

    Attributes:
      outputs: final outputs, compared; known once `judgement` has run.
    """

    def __init__(self, pairing: Pairing, noise: NoisePass, golden: Golden | None) -> None:
        self._pairing = pairing
        self._golden = golden
        self.noise = self._noise = noise
        self._blame = Blame(noise)
        self._target: Program = pairing.target
        self._reasons: list[str] = []
        self._notices = list(pairing.notices)
        self._reached: set[Value] = set()
        self._passed: set[tuple[Value, int]] = set()
        self._fed_by: dict[Value, list[Value]] = {}
        self._blamed: set[Value] = set()
        self._places: dict[int, Value] = {}  # the wrong value behind a finding, by the finding's record
        self.outputs: list[Output] = []

    def judgement(self, *, listed: bool = True) -> Judgement:
        """What was found in this round; the verdict is open until all are known.

        Args:
          listed: False for the fatal findings alone, without suspects, pairs and coverage.
        """
        outputs = self._outputs()
        fatal, other_forms = self._without_other_forms(self._fatal(outputs))
        fatal, relabelled = without_relabelling(self._pairing, fatal)
        if self._golden is not None:
            fatal, outputs = self._against_golden(fatal, outputs, self._golden)
        if not listed:
            self.outputs = outputs
            return Judgement(
                verdict="inconclusive",
                findings=_distinct(fatal),
                pairs=[],
                coverage={},
                notices=self._notices,
                reasons=self._reasons,
            )
        search = Suspects(self._noise, self._blame, self._reached)
        suspects = [*relabelled, *other_forms, *search.find(fatal)]
        self._notices += [*search.notices, *figures_notices(self._pairing)]
        findings = _distinct([*fatal, *suspects])
        self._check_outputs(outputs, findings)
        self.outputs = outputs
        pairs = make_pairs(self._pairing, self._noise, findings)
        coverage = count_coverage(pairs, self._pairing)
        self._check_traces()
        return Judgement(
            verdict="inconclusive",
            findings=findings,
            pairs=pairs,
            coverage=coverage,
            notices=self._notices,
            reasons=self._reasons,
        )

    def _against_golden(
        self, fatal: list[Finding], outputs: list[Output], golden: Golden
    ) -> tuple[list[Finding], list[Output]]:
        """What the golden run says of the findings: the target may be as far from it as the reference is."""
        coarse = golden.coarser()
        if coarse:
            self._notices.append(coarse)
            return fatal, outputs
        scores = golden.scores()
        if not scores:
            self._notices.append("the golden run shares no comparable output with both traces")
            return fatal, outputs
        errors = {name: [target, ref] for name, (target, ref, _) in scores.items()}
        if not golden.allows():
            return [replace(f, evidence={**f.evidence, "golden_errors": errors}) for f in fatal], outputs
        self._notices.append(
            "the golden run: the target's outputs are as close to it as the reference's "
            + "; ".join(
                f"{name}: {target:.3g} against {ref:.3g}" for name, (target, ref, _) in scores.items()
            )
        )
        excused = [
            replace(
                f,
                label="suspect",
                fatal=False,
                evidence={"kind": f.label, **f.evidence, "golden_errors": errors},
            )
            for f in fatal
        ]
        fine = [replace(o, explained=True, flags=frozenset()) if o.explained is False else o for o in outputs]
        return excused, fine

    # Outputs ----------------------------------------------------------------------------------------

    def _outputs(self) -> list[Output]:
        """What the root calls return, compared; without root calls, what nothing reads any more."""
        found: list[Output] = []
        compared = 0
        for key, other in self._pairing.calls.items():
            ref, target = self._pairing.ref.calls[key], self._target.calls[other]
            if (
                ref.record is None
                or target.record is None
                or ref.parent is not None
                or target.parent is not None
                or lacks_return(self._pairing.ref, ref)
                or lacks_return(self._target, target)
            ):
                continue
            compared += 1
            found += self._root_outputs(ref.record, target.record)
        pairs, reasons = captured_outputs(self._noise)
        self._reasons += reasons
        found += [self._output(*pair) for pair in pairs]
        return [*found, *self._sinks(everything=not (compared or pairs))]

    def _root_outputs(self, ref: StoredRecord, target: StoredRecord) -> list[Output]:
        pairs = [(a, b) for a, b in module_slots(ref, target, self._pairing) if b.role == "out"]
        paired = {a.name for a, _ in pairs}
        missing = [s.name for s in ref.slots if s.role == "out" and s.is_tensor and s.name not in paired]
        names = ", ".join(missing[:5])
        if missing and pairs and all(a.name != b.name for a, b in pairs):
            said = f"outputs go by other names in the target; none of it is {names}"
            self._say(self._notices, target, said)
        elif missing and keeps_first_output(self._target.reader):
            self._say(self._notices, target, f"outputs that the target's layout does not hold: {names}")
        elif missing:
            self._say(self._reasons, target, f"outputs that the target does not return: {names}")
        for note in (ref.note, target.note):
            if note and not note.startswith("opaque"):
                self._say(self._reasons, target, f"the root module: {note}")
        return [self._output(ref, a, target, b) for a, b in pairs]

    def _output(self, ref: StoredRecord, a: StoredSlot, target: StoredRecord, b: StoredSlot) -> Output:
        noise = self._noise
        difference = self._pairing.compare_slots(ref, a, target, b)
        here, clean, flags, suspicious = noise.slot_noise(target, b)
        unmeasured = [
            0.0 if noise.is_measured(o.value) else noise._ref_noise.get(o.value, 0.0)
            for o in self._pairing.ref.origins(ref, a)
        ]
        ref_noise = greatest(0.0, *unmeasured)
        band = noise.band(hypot(clean if suspicious else here, ref_noise), difference)
        floors = [self._pairing.floors.get(o.value, 0.0) for o in self._pairing.ref.origins(ref, a)]
        band = greatest(band, *floors) if band else band
        if not difference.known:
            empty = a.note or b.note or 0 in a.shape
            return Output(target, b, ref, a, difference, True if empty else None, band, frozenset())
        flags = flags if not difference.equal else frozenset()
        explained = within(difference, band) or (None if noise.doubts(flags) else False)
        return Output(target, b, ref, a, difference, explained, band, flags)

    def _sinks(self, *, everything: bool) -> list[Output]:
        """Results that no recorded op reads, beside what roots return: gradients, updated weights.

        Args:
          everything: no root returned anything, so that they are all that is left to judge by.
        """
        found = []
        for value, state in self._noise.states.items():
            record = self._target.records[value[0]]
            if record.kind != "op" or self._target.consumers.get(value) or is_factory(record):
                continue
            if not (everything or record.grad_phase == "bwd" or record.call == NO_CALL):
                continue
            if state.difference is not None and state.link is not None:
                ref = self._pairing.ref.records[state.link.ref[0]]
                slot = self._target.slot(value)
                band = self._noise.band(state.predicted, state.difference)
                twin = ref.slots[state.link.ref[1]]
                found.append(
                    Output(record, slot, ref, twin, state.difference, state.explained, band, state.flags)
                )
        return found

    # Findings ---------------------------------------------------------------------------------------

    def _fatal(self, outputs: Collection[Output]) -> list[Finding]:
        found: dict[int, Finding] = {}
        for output in outputs:
            if output.explained is False:
                for place, finding in self._culprits(output):
                    found.setdefault(place, finding)
            elif output.flags and output.explained:
                for place, finding in self._lost_precision(output):
                    found.setdefault(place, finding)
        if not found:
            # Of other requests' rows values of one shape need not be of the same tokens.
            other_rows = not self._pairing.comparer.is_plain and not any(o.difference.known for o in outputs)
            for place, finding in self._hidden(only_leaves=other_rows):
                found.setdefault(place, finding)
        findings = [found[place] for place in sorted(found)]
        if keeps_first_output(self._target.reader):
            findings.sort(key=lambda f: f.ref_seq)  # such a dump has the order of paths, not that of the run
        return [replace(f, fatal=f.label not in NEVER_FATAL) for f in findings]

    def _without_other_forms(self, fatal: list[Finding]) -> tuple[list[Finding], list[Finding]]:
        """(those that stay, suspects): a right value in another form is to blame where nothing else is."""
        forms = {id(f) for f in fatal if (at := self._places.get(f.seq)) and is_other_form(self._noise, at)}
        if len(forms) in (0, len(fatal)):
            return fatal, []
        why = "what reads it gives the reference's results"
        suspects = [demoted(f, why) for f in fatal if id(f) in forms]
        return [f for f in fatal if id(f) not in forms], suspects

    def _hidden(self, *, only_leaves: bool) -> list[tuple[int, Finding]]:
        """Wrong values that no output shows, because a sum dilutes them after a module has returned them."""
        found = []
        returned = module_values(self._noise)
        for value, state in list(self._noise.states.items()):
            if not state.wrong or state.tainted or not is_hidden(self._noise, value, returned):
                continue
            if only_leaves and not self._target.is_leaf(value):
                continue
            place, finding = value[0], None
            if self._target.is_leaf(value):
                readers = self._target.consumers.get(value)
                if readers and self._target.records[value[0]].kind == "param":
                    place = readers[0][0]
                    finding = self._blame.leaf(value, self._target.records[place])
            elif self._target.records[place].kind == "module":
                finding = self._blame.opaque(value)
            else:
                finding = self._blame.value(value)
            if finding is not None:
                self._reached.add(value)
                evidence = {**finding.evidence, "hidden_from_output": True}
                found.append((place, replace(finding, evidence=evidence)))
        return found

    def _culprits(self, output: Output) -> list[tuple[int, Finding]]:
        """(position, finding) of every wrong value that has only right inputs and leads to this output."""
        found = []
        handed_on, returned = self._noise.handed_on, output.record
        # Of a value that stands for those of several steps, in which runs of them it leads to the output.
        todo: list[tuple[Value, StoredRecord, int]] = [
            (o.value, returned, handed_on.run_in(o.value, run))
            for o in self._origins(returned, output.slot)
            for run in handed_on.runs(returned)
        ]
        before = len(self._reached)
        sources = {value for value, _, _ in todo}
        for value, reader, run in todo:
            if (value, run) in self._passed or not self._is_suspicious(value):
                continue
            self._passed.add((value, run))
            self._reached.add(value)
            if value not in self._fed_by:
                self._fed_by[value] = self._wrong_inputs(value)
            inputs, makers = self._fed_by[value], handed_on.makers(value, run)
            if inputs or makers:
                record = self._target.records[value[0]]
                todo += [(before, record, handed_on.run_in(before, run)) for before in inputs]
                todo += [(made, record, at) for made, at in makers]
            elif value not in self._blamed:
                self._blamed.add(value)
                found += self._culprit(value, reader)
        if not found and len(self._reached) == before and not any(v in self._reached for v in sources):
            finding = self._blame.output(
                output.ref, output.ref_slot, output.record, output.slot, output.difference, output.band
            )
            found.append((output.record.seq, finding))
        return found

    def _wrong_inputs(self, value: Value) -> list[Value]:
        """Of a suspicious value those that it was made of, in its step, and that are suspicious too."""
        record, state = self._target.records[value[0]], self._noise.state(value)
        if record.kind == "module" and record.slots[value[1]].role == "out":
            read = [s for s in record.slots if s.role == "in" and s.is_tensor]
            before = [o.value for slot in read for o in self._target.origins(record, slot)]
            before += self._noise.flow.before(value)
        elif not state.tainted:
            return []
        elif record.kind == "param":  # a weight that an optimiser wrote
            before = [] if record.slots[value[1]].role == "in" else self._target.writers(record)
        elif record.kind != "op" or self._target.is_leaf(value):
            return []
        else:
            read = self._target.inputs(record)
            before = [o.value for slot in read for o in self._target.origins(record, slot)]
        return [each for each in before if self._is_suspicious(each)]

    def _culprit(self, value: Value, reader: StoredRecord) -> list[tuple[int, Finding]]:
        """(position, finding) of a suspicious value that was made of right ones.

        Args:
          reader: through which the walk came to it.
        """
        record = self._target.records[value[0]]
        if record.kind == "module" and record.slots[value[1]].role == "out":
            return [(record.seq, self._blame.opaque(value))]
        if record.kind != "op" or self._target.is_leaf(value):
            reader = self._first_reader(value, reader)
            return [(reader.seq, self._blame.leaf(value, reader))]
        if not self._noise.state(value).wrong:
            return []
        self._noise.handed_on.lose_readers(value)
        finding = self._blame.value(value)
        weights = [] if finding.label == "parameter" else self._weights_behind(record)
        self._places[finding.seq] = value
        return weights or [(record.seq, finding)]

    def _first_reader(self, value: Value, reader: StoredRecord) -> StoredRecord:
        """The first wrong op that reads a wrong parameter: the walk meets the last call of a module first."""
        if self._target.records[value[0]].kind != "param":
            return reader
        for seq, _ in self._target.consumers.get(value, ()):
            record = self._target.records[seq]
            if seq < reader.seq and record.kind == "op":
                made = [(seq, slot.index) for slot in self._target.outputs(record)]
                if any(self._is_suspicious(each) for each in made):
                    return record
        return reader

    def _weights_behind(self, record: StoredRecord) -> list[tuple[int, Finding]]:
        """Wrong weights that lead to an op through values that stand elsewhere in the reference.

        A router whose rows are exchanged hands each expert just what the reference hands to another one.
        """
        found, todo, seen = [], [(record, True)], {record.seq}
        for reader, outside in todo:
            for slot in self._target.inputs(reader):
                for origin in self._target.origins(reader, slot):
                    state, source = self._noise.state(origin.value), self._target.records[origin.value[0]]
                    if source.kind == "param":
                        if state.wrong and not state.tainted and reader is not record:
                            found.append((reader.seq, self._blame.leaf(origin.value, reader)))
                            self._reached.add(origin.value)
                    elif source.seq not in seen and (state.suspicious or (outside and state.elsewhere)):
                        seen.add(source.seq)
                        todo.append((source, not state.suspicious))
        return found

    def _is_suspicious(self, value: Value) -> bool:
        return self._noise.state(value).suspicious

    def _origins(self, record: StoredRecord, slot: StoredSlot) -> Iterable[Any]:
        if record.kind == "op":
            return self._target._origins_of((record.seq, slot.index))
        return self._target.origins(record, slot)

    def _lost_precision(self, output: Output) -> list[tuple[int, Finding]]:
        """What only an ill-conditioned step excuses, where the target alone had rounded before it."""
        unit = max(roundoff(output.slot.dtype), 2.0**-24)
        if not output.difference.rho > LOST_PRECISION * unit:
            return []
        found = []
        for kind, seq in sorted(output.flags):
            if kind != "ill":
                continue
            record = self._target.records[seq]
            culprit = self._rounded_before(record)
            if culprit is not None:
                place, error, dtypes = culprit
                evidence = {
                    "error": error,
                    "output_error": output.difference.rho,
                    "amplified_by": record.op,
                } | dtypes
                finding = Finding(
                    module=place.module,
                    call=None if place.call < 0 else place.call,
                    step=place.step,
                    op=place.op,
                    label="introduced",
                    evidence=evidence,
                    source=None if place.source is None else f"{place.source[0]}:{place.source[1]}",
                    hint=f"rounded through a lower precision, then amplified by {record.op}",
                    seq=place.seq,
                    ref_seq=self._pairing.ops[place.seq].ref,
                )
                found.append((place.seq, finding))
        return found

    def _rounded_before(self, record: StoredRecord) -> tuple[StoredRecord, float, dict[str, Any]] | None:
        """The first op before `record`, in its module, that rounds more coarsely than the reference's."""
        best: tuple[StoredRecord, float, dict[str, Any]] | None = None
        seen: set[int] = set()
        todo = [record]
        while todo:
            reader = todo.pop()
            for slot in self._target.inputs(reader):
                for origin in self._target.origins(reader, slot):
                    for seq in (*origin.edges, origin.value[0]):
                        source = self._target.records[seq]
                        if seq in seen or source.kind != "op":
                            continue
                        seen.add(seq)
                        todo.append(source)
                        coarse = self._coarser_than_ref(source)
                        if coarse is not None and (best is None or seq < best[0].seq):
                            best = (source, *coarse)
        return best

    @cached_property
    def _own_precision(self) -> float:
        return own_precision(self._pairing)

    def _coarser_than_ref(self, record: StoredRecord) -> tuple[float, dict[str, Any]] | None:
        pair = self._pairing.ops.get(record.seq)
        if pair is None:
            return None
        ours = self._target.outputs(record)
        ref = self._pairing.ref.records[pair.ref]
        theirs = self._pairing.ref.outputs(ref)
        if self._noise.border(record) > self._noise.ref_border(ref):
            return None  # the target as a whole is in a lower precision, which nobody hides
        if (
            not ours
            or not theirs
            or roundoff(ours[0].dtype) <= max(roundoff(theirs[0].dtype), self._own_precision)
            or not roundoff(theirs[0].dtype)
        ):
            return None
        difference = self._pairing.comparer.compare(theirs[0].content, ours[0].content)
        if not difference.known or difference.rho == 0.0:
            return None
        return difference.rho, {"dtypes": [theirs[0].dtype, ours[0].dtype]}

    # Verdict ----------------------------------------------------------------------------------------

    def _check_outputs(self, outputs: list[Output], findings: list[Finding]) -> None:
        unknown = [o for o in outputs if o.explained is None]
        for output in unknown[:5]:
            said = f"output {output.slot.name} was not compared: {output.difference.why}"
            self._say(self._reasons, output.record, said)
        if not outputs:
            self._reasons.append("no final output was compared")
        for output in outputs:
            if output.explained is False and not any(f.fatal for f in findings):
                self._say(
                    self._reasons,
                    output.record,
                    f"output {output.slot.name} is off by {output.difference.rho:.3g} "
                    "and nothing could be blamed for it",
                )
            elif output.explained and output.flags and output.record.kind == "module":
                kinds = {
                    "cast": "an undeclared cast",
                    "ill": "an ill-conditioned step",
                    "flip": "a decision that flipped",
                }
                names = sorted({kinds.get(kind, kind) for kind, _ in output.flags})
                self._say(
                    self._reasons,
                    output.record,
                    f"output {output.slot.name} is off by {output.difference.rho:.3g}, "
                    f"explained only by {' and '.join(names)}",
                )

    def _say(self, where: list[str], record: StoredRecord, said: str) -> None:
        """Notes what is to be said of a record of the target, once for each step that it stands for."""
        where.append(said)
        self._target.reader.lose(record)

    def _check_traces(self) -> None:
        pairing = self._pairing
        for name, reader in (("reference", pairing.ref.reader), ("target", pairing.target.reader)):
            if not reader.complete:
                self._reasons.append(f"the {name} trace is not complete")
        for name, numbers in zip(("reference", "target"), pairing.unpaired, strict=True):
            if numbers:
                self._reasons.append(f"steps that only the {name} has: {', '.join(map(str, numbers[:5]))}")


def _distinct(findings: Iterable[Finding]) -> list[Finding]:
    """Each place and label once, the first of them."""
    seen: set[tuple[Any, ...]] = set()
    kept = []
    for finding in findings:
        key = (finding.step, finding.module, finding.call, finding.op, finding.label, finding.seq)
        if key not in seen:
            seen.add(key)
            kept.append(finding)
    return kept


__all__ = ["C", "Finding", "Judgement", "judge"]
