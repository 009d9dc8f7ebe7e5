"""Three runs: is the target farther from a more precise run than the reference itself is?

Where a golden run exists, "different from the reference" is not yet "worse": the reference has errors of its
own. The target passes where its error against the golden run is at most `SCORE` times the reference's,
plus the rounding of one result.
"""

from __future__ import annotations

from dataclasses import dataclass

from dispatch_trace.align.pairs import Pairing
from dispatch_trace.judge.estimates import roundoff

SCORE = 2.5


@dataclass(frozen=True, slots=True)
class Golden:
    """The golden run lined up with both others, the golden run standing in for the reference."""

    with_ref: Pairing
    with_target: Pairing

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
