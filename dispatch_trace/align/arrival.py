"""The order of ops that have no order of their own: gradients added to what leaves hold already.

Autograd adds a gradient to its leaf when it arrives. Eager code sends each as soon as it is computed,
compiled code all of them together at its end, in the order of its outputs; both are one program. So these
ops are put in the order in which the reference computed their gradients before they are aligned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dispatch_trace.align.graph import CallKey, Program
from dispatch_trace.align.ops import Element
from dispatch_trace.schema import NO_CALL, GradPhase


def has_no_order(key: tuple[CallKey, GradPhase]) -> bool:
    """Whether a body holds what autograd does outside all modules."""
    return key[1] == "bwd" and key[0][3] == NO_CALL


def by_arrival(
    program: Program, elements: Sequence[Element], partner: Mapping[int, int] | None, ref: Program
) -> list[Element]:
    """The elements in the order in which the reference computed what they read last.

    Args:
      program: the trace that the elements belong to.
      partner: op of the reference by op of the target, where `program` is the target.
      ref: the reference.
    """

    def place(element: Element) -> tuple[int, str]:
        record = element.record
        latest = (-1, "")
        for slot in program.inputs(record) if record is not None else ():
            for origin in program.origins(record, slot):  # type: ignore[arg-type]
                seq, index = origin.value
                name = program.records[seq].slots[index].name
                known = seq if partner is None else partner.get(seq, -1)
                if known in ref.records and ref.records[known].grad_phase == "bwd":
                    latest = max(latest, (known, name))
        return latest

    return sorted(elements, key=place)


__all__ = ["by_arrival", "has_no_order"]
