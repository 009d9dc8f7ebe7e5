"""What a live comparison knows: of values, of the reference's calls, of the step that runs.

`Known` is shared by those who judge ops and those who judge modules.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from dispatch_trace.align.canon import dtype_class, edge_input, is_empty
from dispatch_trace.align.content import Difference
from dispatch_trace.align.modules import Renames
from dispatch_trace.align.summaries import SKETCH_FLOOR
from dispatch_trace.judge.estimates import ACCUMULATOR, UNKNOWN_GAIN, C, roundoff
from dispatch_trace.judge.findings import Finding
from dispatch_trace.live_values import LiveComparer, LiveContents
from dispatch_trace.schema import NO_CALL, RawRecord, RawSlot, StoredRecord, StoredSlot
from dispatch_trace.store.reader import RankReader

# (step, grad_phase, path of the target, call)
BodyKey: TypeAlias = tuple[int, str, str, int]


@dataclass(frozen=True, slots=True)
class State:
    """What is known of a value.

    Attributes:
      right: its error is noise; None where that is not known.
      error: measured, relative.
      number: of its content, or of what it is a view of; -1 where there is none.
      clean: the error that it would have without any defect; what is wrong must not excuse what follows.
      outside: "parameter" or "argument" where no op made it.
      twin: content of the reference that it was held against, -1 without.
      loose: ops without a counterpart that computed it of right values, the first of them first; the
        reference has no such value, or has it from other ops.
    """

    right: bool | None
    error: float = 0.0
    number: int = -1
    clean: float = 0.0
    outside: str = ""
    twin: int = -1
    loose: tuple[StoredRecord, ...] = ()


UNKNOWN = State(None)


@dataclass(slots=True)
class Body:
    """The ops of one call of the reference, and how far the program has come in them.

    Attributes:
      done: number of those that are behind.
      parted: an op of one side had no counterpart.
    """

    records: list[StoredRecord] = field(default_factory=list)
    done: int = 0
    parted: bool = False


@dataclass(slots=True)
class Step:
    """What was seen in one step.

    Attributes:
      suspicions: not certain yet.
      certain: paths of what was found, by then.
      largest: largest error of a right value so far.
      inside: by path of a module that is still running, the largest right error that a call within returned.
      returned: by path, how many calls are over.
    """

    suspicions: list[Finding] = field(default_factory=list)
    certain: list[str] = field(default_factory=list)
    largest: float = 0.0
    inside: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    returned: Counter[str] = field(default_factory=Counter)


class Known:
    """Facts that grow as the program runs.

    Attributes:
      states: by (seq of the record, index of the slot).
      bodies, modules: of the reference, by the names that its modules have in the target.
      matched: numbers of the reference's ops that have a counterpart.
      paths, owners: of modules of the reference, and of those with parameters.
      params_seen: places of parameters among `states`.
      other_weights: some parameter is not the reference's, nor that in another precision.
      rounded: by path the largest error of a parameter that is right.
      reported: numbers of the records that findings were made of.
      counts: values by outcome.
    """

    def __init__(self, ref: RankReader, renames: Renames) -> None:
        self.ref = ref
        self.contents = LiveContents()
        self.comparer = LiveComparer(ref, self.contents)
        self.states: dict[tuple[int, int], State] = {}
        self.steps: defaultdict[int, Step] = defaultdict(Step)
        self.bodies: defaultdict[BodyKey, Body] = defaultdict(Body)
        self.modules: dict[BodyKey, StoredRecord] = {}
        self.paths: set[str] = set()
        self.owners: set[str] = set()
        self.matched: set[int] = set()
        self.params_seen: set[tuple[int, int]] = set()
        self.reported: set[int] = set()
        self.other_weights = False
        self.rounded: defaultdict[str, float] = defaultdict(float)
        self.counts: Counter[str] = Counter()
        for record in ref.records():
            path = renames.apply(record.module)
            key = (record.step, record.grad_phase, path, record.call)
            if record.kind == "param":
                self.owners.add(path)
            elif record.kind == "module" and record.grad_phase == "fwd":
                self.modules[key] = record
                self.paths.add(path)
            elif record.kind == "op" and not is_empty(record) and edge_input(record) is None:
                self.bodies[key].records.append(record)

    def count(self, state: State) -> None:
        outcome = {None: "not compared", False: "wrong", True: "within noise"}[state.right]
        self.counts["equal" if state.right and not state.error else outcome] += 1

    def of(self, slot: RawSlot) -> list[State]:
        """States of what wrote an input, or made an output."""
        return [self.states[p] for p in slot.producers if p in self.states]

    def border_band(self, slot: RawSlot, twin: StoredSlot, length: int, before: float) -> float:
        """How far a value may be off where the ops that led to it are not reckoned with one by one.

        Args:
          length: of the longest reduction that may stand behind it.
          before: error of what it was computed from.
        """
        if dtype_class(slot.dtype) not in "fc8":
            return 0.0
        unit = max(roundoff(slot.dtype), roundoff(twin.dtype))
        own = unit + math.sqrt(max(length, 1)) * min(ACCUMULATOR, unit or ACCUMULATOR)
        return C * math.hypot(own, UNKNOWN_GAIN * before, SKETCH_FLOOR)

    def report(self, finding: Finding, since: str) -> Finding | None:
        """What began earlier and has become certain, once; None where it was said before.

        Args:
          since: what made it certain.
        """
        if finding.seq in self.reported:
            return None
        self.reported.add(finding.seq)
        step = self.steps[finding.step]
        step.certain.append(finding.module)
        step.suspicions.clear()
        return replace(finding, evidence={**finding.evidence, "certain_since": since})

    def suspect(self, finding: Finding) -> None:
        step = self.steps[finding.step]
        if not step.certain and not any(place_of(s) == place_of(finding) for s in step.suspicions):
            step.suspicions.append(finding)  # behind what is certain everything is suspect


def body_of(record: RawRecord | StoredRecord) -> BodyKey:
    # Models need not have one name in both programs; of several only the paths tell them apart.
    return (record.step, record.grad_phase, record.module, record.call)


def twin_of(ref: StoredRecord, slot: RawSlot | StoredSlot) -> StoredSlot | None:
    """The result of the reference's record that a result belongs to."""
    outputs = [s for s in ref.slots if s.role != "in" and s.is_tensor]
    return next((s for s in outputs if s.name == slot.name), outputs[0] if len(outputs) == 1 else None)


def error_of(found: Difference) -> float:
    return found.rho if math.isfinite(found.rho) else 1.0


def paths_around(path: str) -> list[str]:
    """Paths of the modules around one, the root last."""
    found = []
    while path:
        path = path.rpartition(".")[0]
        found.append(path)
    return found


def is_within(path: str, around: str) -> bool:
    """Whether a module lies strictly within another; everything lies within the root, itself included."""
    return not around or path.startswith(f"{around}.")


def place_of(suspicion: Finding) -> str:
    """The module that something was seen at: it makes the one around it answer."""
    return str(suspicion.evidence.get("handed_to", suspicion.module))


def live_finding(
    record: RawRecord | StoredRecord, label: str, evidence: dict[str, Any], *, ref_seq: int = -1
) -> Finding:
    """A finding at a record of the running program."""
    return Finding(
        module=record.module,
        call=None if record.call == NO_CALL else record.call,
        step=record.step,
        op=record.op or None,
        label=label,
        evidence={**evidence, "judge": "live"},
        source=None if record.source is None else f"{record.source[0]}:{record.source[1]}",
        judge="live",
        seq=record.seq,
        ref_seq=ref_seq,
    )


__all__ = [
    "UNKNOWN",
    "Body",
    "BodyKey",
    "Known",
    "State",
    "Step",
    "body_of",
    "error_of",
    "is_within",
    "live_finding",
    "paths_around",
    "place_of",
    "twin_of",
]
