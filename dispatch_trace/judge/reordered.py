"""Weights whose rows are the reference's in one other order: a relabelling, where more than that is wrong.

Experts that are stored in another order, with the rows of their router, compute the same. Next to a fault
among them every one of these weights differs, and the first that is read is not to blame.
"""

from __future__ import annotations

from dispatch_trace.align.orders import Order, order_of
from dispatch_trace.align.pairs import Pairing
from dispatch_trace.judge.findings import Finding, demoted


def without_relabelling(pairing: Pairing, findings: list[Finding]) -> tuple[list[Finding], list[Finding]]:
    """(fatal findings that stay, suspects): weights that merely share an order with one that differs besides.

    Args:
      findings: fatal ones.
    """
    weights = [f for f in findings if f.label == "parameter" and isinstance(f.evidence.get("path"), str)]
    if len(weights) < 2:
        return findings, []
    orders = {id(f): order for f in weights if (order := _order(pairing, f)) is not None}
    torn = [order for order in orders.values() if not order.is_whole]
    merely = {key for key, order in orders.items() if order.is_whole and any(order.agrees(t) for t in torn)}
    why = "its rows are in the order of those of other weights, which differ besides"
    suspects = [demoted(f, why) for f in findings if id(f) in merely]
    return [f for f in findings if id(f) not in merely], suspects


def _order(pairing: Pairing, finding: Finding) -> Order | None:
    """The order of the rows of the weight that a finding names; None where it is no other order."""
    for (_, module, name), versions in pairing.target.params.items():
        if (f"{module}.{name}" if module else name) != finding.evidence["path"]:
            continue
        for link in pairing.links.get((versions[-1].seq, 0), ()):
            if min(link.ref_content, link.target_content) < 0:
                continue
            ref = pairing.comparer.whole(True, link.ref_content)
            target = pairing.comparer.whole(False, link.target_content)
            if ref is not None and target is not None:
                return order_of(ref, target)
    return None


__all__ = ["without_relabelling"]
