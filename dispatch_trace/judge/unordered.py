"""Values that ought to hold the same numbers as several of the reference, in an order that nothing tells.

Their figures bound from below how far they are apart in any order. So such a value may be certainly wrong; it
is never certainly right, since a weight that is packed in the wrong order has the figures of the right one.
What is as alike as rounding leaves it only ends the search for what is to blame behind it.
"""

from __future__ import annotations

from dispatch_trace.align.content import Difference
from dispatch_trace.align.figures import figures_apart, joined_figures, rounding_apart
from dispatch_trace.align.graph import Program, Value
from dispatch_trace.align.pairs import Link, Pairing
from dispatch_trace.align.unions import Union
from dispatch_trace.judge.estimates import roundoff


class Unordered:
    """Measures the unions of a pairing."""

    def __init__(self, pairing: Pairing) -> None:
        self._pairing = pairing
        self._by_target = {value: union for union in pairing.unions for value in union.target}
        self._by_ref = {value: union for union in pairing.unions for value in union.ref}
        self._apart: dict[Union, float | None] = {}

    def of(self, value: Value) -> Union | None:
        """The union that a value of the target is in."""
        return self._by_target.get(value)

    def measure(self, value: Value) -> tuple[Link, Difference] | None:
        """What is known of a value of the target: a link, and at least how large the difference is.

        Returns: None for values that are in no union, or without figures.
        """
        union = self._by_target.get(value)
        apart = None if union is None else self._measured(union)
        if union is None or apart is None:
            return None
        slots = (*union.ref[0], *value)
        contents = self._pairing.ref.slot(union.ref[0]).content, self._pairing.target.slot(value).content
        link = Link(union.ref[0], value, *contents, "figures", slots)
        return link, Difference(rho=apart, method="figures", transform="in an order not known")

    def rounding(self, value: Value) -> float:
        """By how much figures of a leaf that is only rounded may be apart: its errors are independent."""
        union = self._by_target.get(value)
        figures = None if union is None else _figures(self._pairing.target, union.target)
        if union is None or figures is None:
            return 0.0
        dtypes = [self._pairing.ref.slot(v).dtype for v in union.ref]
        return rounding_apart(figures, max(map(roundoff, [*dtypes, self._pairing.target.slot(value).dtype])))

    def opposite(self, value: Value) -> tuple[Value, ...]:
        """The target's values that a value of the reference is part of; none where that is not known."""
        union = self._by_ref.get(value)
        return () if union is None else union.target

    def _measured(self, union: Union) -> float | None:
        if union not in self._apart:
            a, b = _figures(self._pairing.ref, union.ref), _figures(self._pairing.target, union.target)
            known = a is not None and b is not None and a["n"] == b["n"]
            self._apart[union] = figures_apart(a, b, int(a["n"])) if known and a and b else None
        return self._apart[union]


def _figures(program: Program, values: tuple[Value, ...]) -> dict[str, float] | None:
    return joined_figures(program.content(program.slot(value)) for value in values)


__all__ = ["Unordered"]
