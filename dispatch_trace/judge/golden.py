"""Three runs: is the target farther from a more precise run than the reference itself is?

Where a golden run exists, "different from the reference" is not yet "worse": the reference has errors of its
own. The target passes where its error against the golden run is at most `SCORE` times the reference's,
plus the rounding of one result. A golden run that is coarser than the reference has no say.
"""

from __future__ import annotations

from dataclasses import dataclass

from dispatch_trace.align.canon import dtype_class
from dispatch_trace.align.graph import Program
from dispatch_trace.align.pairs import Pairing
from dispatch_trace.judge.estimates import roundoff

SCORE = 2.5


@dataclass(frozen=True, slots=True)
class Golden:
    """The golden run lined up with both others, the golden run standing in for the reference."""

    with_ref: Pairing
    with_target: Pairing

    def coarser(self) -> str:
        """Why the golden run cannot judge: it is coarser than the reference; "" where it is not."""
        golden, ref = self.with_ref.ref, self.with_ref.target
        names = [_coarsest(program) for program in (golden, ref)]
        if not all(names) or roundoff(names[0]) <= roundoff(names[1]):
            return ""
        return (
            f"the golden run is in {names[0]}, coarser than the reference's {names[1]}: it says nothing "
            "about the target and was left out"
        )

    def scores(self) -> dict[str, tuple[float, float, bool]]:
        """By "step model slot" of the final outputs: (error of the target, of the reference, passes)."""
        theirs, ours = _output_errors(self.with_ref), _output_errors(self.with_target)
        found = {}
        for name, (error, unit) in ours.items():
            if name in theirs:
                other = theirs[name][0]
                found[name] = (error, other, error <= SCORE * other + unit)
        return found

    def allows(self) -> bool:
        """Whether every output that all three runs share passes, and there is one."""
        scores = self.scores()
        return bool(scores) and all(passes for _, _, passes in scores.values())


def _coarsest(program: Program) -> str:
    """The coarsest float dtype of what goes in and out of root calls and of parameters; "" without any."""
    slots = [s for call in program.roots if call.record is not None for s in call.record.slots]
    slots += [r.slots[0] for versions in program.params.values() for r in versions]
    found = [s.dtype for s in slots if s.is_tensor and dtype_class(s.dtype) == "f"]
    return max(found, key=roundoff, default="")


def _output_errors(pairing: Pairing) -> dict[str, tuple[float, float]]:
    """Relative error of each final output, and the roundoff of its dtype."""
    found: dict[str, tuple[float, float]] = {}
    for one in pairing.rounds:
        for key, other in one.calls.items():
            golden, target = one.ref.calls[key], one.target.calls[other]
            if golden.parent is not None or golden.record is None or target.record is None:
                continue
            slots = {s.name: s for s in golden.record.slots if s.role == "out" and s.is_tensor}
            for slot in target.record.slots:
                if slot.role != "out" or slot.name not in slots:
                    continue
                difference = one.comparer.compare(slots[slot.name].content, slot.content)
                if difference.known and not difference.nonfinite:
                    found[f"{key[0]} {key[1]} {slot.name}"] = (difference.rho, roundoff(slot.dtype))
    return found
