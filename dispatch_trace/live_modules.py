"""Live comparison of module calls: what each was given and returned, against the same call of the reference.

What a module returns settles what is open inside it: where that is right, everything in it was a rewrite,
or healed; where it is not, the first suspicion inside is certain, or the module is a suspicion for the one
around it. Where all weights are the reference's, a suspicion is certain once a module elsewhere is handed
what came of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dispatch_trace.align.content import Difference
from dispatch_trace.judge.findings import Finding
from dispatch_trace.judge.noise import within
from dispatch_trace.live_replaced import SURELY, is_multiple, region_of, replaced, structure
from dispatch_trace.live_state import (
    UNKNOWN,
    Known,
    State,
    Step,
    body_of,
    error_of,
    is_within,
    live_finding,
    paths_around,
    place_of,
)
from dispatch_trace.schema import RawRecord, RawSlot, StoredRecord, StoredSlot


class LiveModules:
    """Judges module calls of a running program."""

    def __init__(self, known: Known) -> None:
        self._known = known
        self._worst = 0.0, 0.0
        self._wrong: tuple[RawSlot, StoredSlot, Difference] | None = None
        rows = known.ref.header.get("modules") or []
        self._random = {str(row.get("path", "")) for row in rows if "Dropout" in str(row.get("class", ""))}

    def module(self, record: RawRecord) -> tuple[bool, Finding | None]:
        """(whether it returned something wrong, what is certain now)."""
        known = self._known
        step = known.steps[record.step]
        ref = known.modules.get(body_of(record))
        inside = step.inside.pop(record.module, 0.0)
        if ref is None:
            known.counts["not compared"] += 1
            return False, None
        step.returned[record.module] += 1
        self._wrong = None
        given, before = self._border(record, ref, "in", step, 0.0)
        if given is False:
            certain = self._handed_on(record, step)
            if certain is not None:
                return True, certain
            self._handed(record, ref, step)
        self._wrong = None
        before = max(before, inside, known.rounded[record.module])
        returned, after = self._border(record, ref, "out", step, before)
        state = State(returned, after)
        known.count(state)
        for i, slot in enumerate(record.slots):
            if slot.role != "in" and slot.is_tensor and not slot.producers:
                known.states[record.seq, i] = state
        if returned:
            step.largest = max(step.largest, after)
            for path in paths_around(record.module):
                step.inside[path] = max(step.inside[path], after)
            step.suspicions = [s for s in step.suspicions if not is_within(place_of(s), record.module)]
            return False, None
        if returned is None:
            return False, None
        return True, self._returned_wrong(record, ref, step, given)

    def _handed(self, record: RawRecord, ref: StoredRecord, step: Step) -> None:
        """What a module was handed is wrong: what was seen inside it follows from that."""
        known = self._known
        step.suspicions = [s for s in step.suspicions if s.seq < record.opened]
        if step.suspicions:
            return
        loose = self._loose()
        if loose is not None and self._wrong is not None:
            _, twin, found = self._wrong
            finding = structure(loose.loose, region_of(known, twin), found, self._worst[1])
        else:
            evidence: dict[str, Any] = dict(zip(("error", "band"), self._worst, strict=True))
            caller = next((p for p in paths_around(record.module) if p in known.paths), "")
            finding = live_finding(record, "wiring", evidence, ref_seq=ref.seq)
            finding = replace(finding, module=caller, call=step.returned[caller])
        known.suspect(replace(finding, evidence={**finding.evidence, "handed_to": record.module}))

    def _handed_on(self, record: RawRecord, step: Step) -> Finding | None:
        """A suspicion that is certain now that a module elsewhere was handed what came of it.

        Where all weights are the reference's, glue between modules that would make it good has run.
        """
        known = self._known
        earlier = [
            s
            for s in step.suspicions
            if s.seq < record.opened
            and _is_sure(s.evidence)
            and not is_within(place_of(s), record.module)
            and place_of(s) not in (record.module, *paths_around(record.module))
        ]
        if not earlier or known.other_weights or not self._is_sure():
            return None
        return known.report(min(earlier, key=lambda s: s.seq), f"{record.module} was handed it, and")

    def _is_sure(self) -> bool:
        """Whether what is wrong is so by far, and no multiple of what it should be."""
        if self._wrong is None:
            return False
        slot, twin, found = self._wrong
        error, band = self._worst
        number = self._known.contents.number(slot)
        return error > SURELY * band and not is_multiple(self._known, number, twin.content, found)

    def _returned_wrong(
        self, record: RawRecord, ref: StoredRecord, step: Step, given: bool | None
    ) -> Finding | None:
        known = self._known
        inside = [s for s in step.suspicions if is_within(place_of(s), record.module)]
        if inside:
            step.suspicions = [s for s in step.suspicions if s not in inside]
            first = min(inside, key=lambda s: s.seq)
            return known.report(first, record.module or "(root)")
        if step.suspicions or step.certain or given is not True:
            return None  # it goes on what is known already, or was handed it
        evidence = dict(zip(("error", "band"), self._worst, strict=True))
        finding = live_finding(record, "introduced", evidence, ref_seq=ref.seq)
        loose = self._loose()
        if loose is not None and self._wrong is not None:
            _, twin, found = self._wrong
            certain = replaced(known, loose, twin, found, self._worst[1], whole=True)
            if certain is not None:
                return known.report(certain, record.module or "(root)")
            finding = structure(loose.loose, region_of(known, twin), found, self._worst[1])
        if not record.module or self._is_pure(record, ref):
            step.certain.append(record.module)
            return finding
        known.suspect(finding)
        return None

    def _loose(self) -> State | None:
        """Of what is wrong among the returned: made by ops without counterpart, of right values."""
        if self._wrong is None:
            return None
        states = self._known.of(self._wrong[0])
        return next((state for state in states if state.right is None and state.loose), None)

    def _is_pure(self, record: RawRecord, ref: StoredRecord) -> bool:
        """Whether a module, of which no ops are known, is a function of one value alone that nothing undoes.

        It holds no module and no parameter, and makes of one value one of its shape.
        """
        known, path = self._known, record.module
        body = known.bodies.get(body_of(record))
        seen = body is not None and (body.done > 0 or body.parted)
        if self._wrong is None or seen or ref.module in self._random:
            return False
        if path in known.owners or any(is_within(p, path) for p in known.paths if p != path):
            return False
        tensors = [[s for s in record.slots if s.is_tensor and s.role == role] for role in ("in", "out")]
        if [len(each) for each in tensors] != [1, 1] or tensors[0][0].shape != tensors[1][0].shape:
            return False
        return self._is_sure()

    def _border(
        self, record: RawRecord, ref: StoredRecord, role: str, step: Step, before: float
    ) -> tuple[bool | None, float]:
        """(all right, largest error) of what goes in or comes out of a call; None where it is not known."""
        known = self._known
        theirs = {slot.name: slot for slot in ref.slots if slot.role == role and slot.is_tensor}
        right: bool | None = True
        worst = 0.0
        compared = False
        length = max([*(s.shape[-1] for s in record.slots if s.is_tensor and s.shape), 1])
        for slot in record.slots:
            if slot.role != role or not slot.is_tensor:
                continue
            twin = theirs.get(slot.name)
            found = (
                Difference(known=False)
                if twin is None
                else known.comparer.compare(twin.content, known.contents.number(slot))
            )
            if not found.known or twin is None:
                right = False if right is False else None
                continue
            compared = True
            handed = max(before, step.largest) if role == "in" else before
            band = known.border_band(slot, twin, length, handed)
            if role == "in" and band:
                errors = (state.error for state in known.of(slot) if state.right)
                band = max(band, SURELY * max(errors, default=0.0))
            held = any(s.right and s.twin == twin.content for s in known.of(slot))
            if within(found, band) or held:
                worst = max(worst, error_of(found))
                self._settle(slot, found, twin)
                continue
            if not band and (handed or step.largest):
                right = False if right is False else None  # a decision on noisy numbers
                continue
            if right is not False:
                self._wrong = slot, twin, found
            right = False
            self._worst = error_of(found), band
        return (right if compared else (True if role == "in" else None)), worst

    def _settle(self, slot: RawSlot, found: Difference, twin: StoredSlot) -> None:
        """What crosses a border and is the reference's value is right, whatever ops made it."""
        known = self._known
        for producer in slot.producers:
            if not known.states.get(producer, UNKNOWN).right:
                number = known.contents.number(slot)
                error = error_of(found)
                known.states[producer] = State(True, error, number, error, twin=twin.content)


def _is_sure(evidence: dict[str, Any]) -> bool:
    error, band = evidence.get("error"), evidence.get("band")
    return isinstance(error, float) and isinstance(band, float) and not error <= SURELY * band


__all__ = ["LiveModules"]
