"""Blame behind a weight of which only figures are known: is it packed otherwise, or read otherwise?

A fused projection whose figures are those of its parts may still hold them in another order, which shows as
a wrong result of what reads it. The target's own layers tell: where another call of the same module runs op
by op what this one runs, on the same places of memory, and is right, then the program is right here too, and
what differs is the weight. Where that cannot be told, the call around both is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dispatch_trace.align.graph import Call, Value, around_all
from dispatch_trace.align.ops import scalars
from dispatch_trace.align.weights import NUMBER
from dispatch_trace.judge.findings import Finding
from dispatch_trace.judge.noise import NoisePass, State
from dispatch_trace.judge.regions import Region, Regions
from dispatch_trace.judge.sites import Sites
from dispatch_trace.per_step import or_zero
from dispatch_trace.schema import StoredRecord

# Rows in another order change a result by about its own size; a kernel that computes badly by less.
_WHOLESALE = 0.1


class PackedBlame:
    """Decides between a weight and what reads its products."""

    def __init__(self, noise: NoisePass, sites: Sites, regions: Regions) -> None:
        self._noise = noise
        self._regions = regions
        self._sites = sites
        self._target = noise.pairing.target

    def instead(self, finding: Finding, region: Region, state: State) -> Finding:
        """The finding, or another in its place, where it lies behind such a weight.

        Args:
          finding: about the region.
        """
        weights = list(dict.fromkeys(self._weights_before(region)))
        if not weights:
            return finding
        places = [self._target.records[reader] for _, reader in weights]
        seat = around_all([self._target.call_of(r) for r in (*places, region.target)])
        sibling = self._right_sibling(seat)
        if sibling is not None and self._runs_as(seat, sibling):
            if or_zero(state.rho) > _WHOLESALE and len(weights) == 1:
                return self._weight(*weights[0], sibling, state)
        elif sibling is not None:
            return finding
        named = [self._sites.describe(self._target, weight) for weight, _ in weights]
        evidence = {**finding.evidence, "candidates": [*named, f"what reads it in {seat.path or '(root)'}"]}
        hint = "the rows of a weight are in another order, or what is made of them is read otherwise"
        inside = any(call is seat for call in self._target.call_of(region.target).enclosing()[:1])
        return replace(
            finding,
            module=seat.path,
            call=seat.number,
            op=finding.op if inside else None,
            evidence=evidence,
            hint=hint,
        )

    def one_of_several(self, value: Value, reader: StoredRecord, state: State) -> Finding | None:
        """For a weight that is wrong together with others: which of them it is, only their readers can tell.

        Args:
          value: the weight.
          reader: of the weight.
        """
        union = self._noise.unordered.of(value)
        if union is None or len(union.target) < 2 or state.difference is None:
            return None
        if state.difference.method != "figures":
            return None
        readers = {w: self._target.consumers.get(w, [(reader.seq, 0)])[0][0] for w in union.target}
        left = [
            w for w, seq in readers.items() if not self._regions.leads_elsewhere(self._target.records[seq])
        ]
        if left == [value]:
            return None
        calls = [self._target.call_of(self._target.records[readers[w]]) for w in left or union.target]
        seat = around_all(calls) if len(calls) > 1 else calls[0]
        named = [self._sites.describe(self._target, weight) for weight in left or union.target]
        evidence = self._sites.evidence(state) | {"candidates": named}
        hint = "one of several weights, which are one weight in the reference"
        at = self._target.records[min(readers.values())]
        return self._sites.finding(seat, None, "parameter", evidence, state, where=at, hint=hint)

    def _weight(self, weight: Value, reader: int, sibling: Call, state: State) -> Finding:
        record, at = self._target.records[weight[0]], self._target.records[reader]
        evidence = self._sites.evidence(state) | {
            "parameter": record.name,
            "path": self._sites.describe(self._target, weight),
            "runs_as": sibling.path,
        }
        hint = "holds the reference's numbers, its rows in another order"
        call = self._target.call_of(at)
        call = next((c for c in call.enclosing() if c.path == record.module), call)
        return self._sites.place(record.module, call, at.op, "parameter", evidence, None, at=at, hint=hint)

    def _weights_before(self, region: Region) -> Iterator[tuple[Value, int]]:
        """(weight, its reader) of the products that the region takes in, of which only figures are known."""
        for record in region.inside:
            for slot in self._target.inputs(record):
                for origin in self._target.origins(record, slot):
                    if not self._noise.state(origin.value).alike:
                        continue
                    maker = self._target.records[origin.value[0]]
                    for read in self._target.inputs(maker):
                        for source in self._target.origins(maker, read):
                            if self._noise.state(source.value).alike:
                                yield source.value, maker.seq

    def _right_sibling(self, call: Call) -> Call | None:
        """Another call in the same step, of a module of the same place in another layer, that is right."""
        role = NUMBER.sub("*", call.path)
        for other in self._target.calls.values():
            if (
                other is call
                or other.record is None
                or (other.key[:2], other.number)
                != (
                    call.key[:2],
                    call.number,
                )
            ):
                continue
            if NUMBER.sub("*", other.path) == role and self._is_right(other.record):
                return other
        return None

    def _is_right(self, record: StoredRecord) -> bool:
        states = [
            self._noise.state(origin.value)
            for slot in record.slots
            if slot.role == "out" and slot.is_tensor
            for origin in self._target.origins(record, slot)
        ]
        return bool(states) and all(state.explained for state in states)

    def _runs_as(self, call: Call, other: Call) -> bool:
        return self._program(call) == self._program(other)

    def _program(self, call: Call) -> list[Any]:
        """What runs within a call: ops, arguments, and which places of which results they read."""
        inside = [
            r
            for r in self._target.records.values()
            if r.kind == "op" and r.grad_phase == "fwd" and call in self._target.call_of(r).enclosing()
        ]
        numbers = {record.seq: number for number, record in enumerate(inside)}
        return [
            (
                record.module[len(call.path) :],
                record.op,
                record.overload,
                scalars(record),
                [
                    (
                        slot.name,
                        slot.dtype,
                        slot.shape,
                        slot.strides,
                        slot.offset,
                        [(numbers.get(seq), index) for seq, index in slot.producers],
                    )
                    for slot in record.slots
                    if slot.is_tensor
                ],
            )
            for record in inside
        ]


__all__ = ["PackedBlame"]
