"""Whether a module call whose own ops nobody recorded computes badly: the reference's body on its inputs.

Of compiled code, and of a trace of modules, only borders are known. The reference's own ops between the same
borders, in float64 and on what the target was given, say what it should have returned (BLAME.md section 2,
"a module body"); calls within it answer for themselves. Neither more precision is asked for than the
reference had, nor than the borders hold.

Where steps pair by request (a padded batch against one request), the body runs in the reference's shapes: on
what the reference was given, with the target's values of the same tokens put in; these are compared.

A call is not judged, and it is said why, where its inputs or outputs were not kept, where the reference's
body draws random numbers, makes a decision that may fall the other way, or reads more than it was given.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any

import torch

from dispatch_trace import execute
from dispatch_trace.align.canon import DISCRETE, decides, dtype_class, is_factory, short
from dispatch_trace.align.graph import Call, Value, slot_numel
from dispatch_trace.align.lens import StepLens, whole_of
from dispatch_trace.align.pairs import module_slots
from dispatch_trace.errors import DispatchTraceError
from dispatch_trace.execute_ops import why_taken
from dispatch_trace.judge.estimates import C, roundoff
from dispatch_trace.judge.noise import ROW_FACTOR, NoisePass
from dispatch_trace.metrics import relative_l2, worst_row
from dispatch_trace.schema import StoredRecord, StoredSlot
from dispatch_trace.store.reader import RankReader

# Errors as large as rounding and the reference's own make them, times this, are a fault.
TOLERANCE = 8.0
# Replays that show how the body lets rounding grow.
NUM_NOISY = 2
# Longer bodies are the whole program, not a region.
MAX_OPS = 20_000

Values = dict[Value, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Body:
    """What the reference's body says of a call of the target.

    Attributes:
      slot: the worst of what it returns, and of what it hands to calls within.
      error: of the target's output, from the float64 body on the target's inputs (relative L2).
      ref_error: of the reference's own, and of rounding within the body.
      band: error up to which it is as good as the reference.
      ok: whether it is within the band, its worst row included; None where it could not be told.
      why: why not.
    """

    slot: str = ""
    error: float = 0.0
    ref_error: float = 0.0
    band: float = 0.0
    ok: bool | None = None
    why: str = ""

    @property
    def evidence(self) -> dict[str, Any]:
        if self.ok is None:
            return {"not_replayed": self.why}
        return {
            "slot": self.slot,
            "local_error": self.error,
            "ref_error": self.ref_error,
            "band": self.band,
        }


@dataclass(frozen=True, slots=True)
class _Inner:
    """A call within the judged one: both records, what the target's returns, what both are handed."""

    ref: StoredRecord
    target: StoredRecord
    returned: list[tuple[StoredSlot, torch.Tensor]]
    handed: list[tuple[StoredSlot, StoredSlot]]


@dataclass(frozen=True, slots=True)
class _Check:
    """A value of the target to be held against what the body makes in its place.

    Attributes:
      ref, ref_slot: where the reference recorded it; record, slot: where the target did.
      place: what makes it in the body.
      name: of the slot, with the module that it is handed to.
    """

    ref: StoredRecord
    ref_slot: StoredSlot
    record: StoredRecord
    slot: StoredSlot
    place: Value
    name: str

    @classmethod
    def of(
        cls, ref: StoredRecord, a: StoredSlot, record: StoredRecord, b: StoredSlot, inside: set[int]
    ) -> _Check | None:
        """None where nothing in the body makes it."""
        place = next((p for p in reversed(a.producers) if p[0] in inside), None)
        name = f"{record.module} {b.name}" if b.role == "in" else b.name
        return None if place is None else cls(ref, a, record, b, place, name)


class _NotJudged(Exception):
    """The message says why."""


class Bodies:
    """Judges calls of the target's modules."""

    def __init__(self, noise: NoisePass) -> None:
        self._noise = noise
        self._pairing = noise.pairing
        self._ref: RankReader = noise.pairing.ref.reader
        self._target: RankReader = noise.pairing.target.reader
        self._backward = {target: ref for ref, target in noise.pairing.calls.items()}
        self._ops: list[StoredRecord] | None = None  # the reference's, in order

    def judge(self, record: StoredRecord) -> Body:
        """What the reference's body says of a call of the target.

        Args:
          record: a module record of the target.
        """
        try:
            return self._judge(record)
        except _NotJudged as reason:
            return Body(why=str(reason))
        except DispatchTraceError as error:
            return Body(why=str(error)[:200])

    def _judge(self, record: StoredRecord) -> Body:
        key = self._backward.get(self._pairing.target.call_of(record).key)
        ref = None if key is None else self._pairing.ref.calls[key].record
        if ref is None:
            raise _NotJudged("the reference recorded no such call")
        call = self._pairing.target.call_of(record)
        inner = self._inner(call)
        body = self._body(ref, [child.ref for child in inner])
        inside = {r.seq for r in body}
        pairs = module_slots(ref, record, self._pairing)
        given = [(a, self._given(ref, a, record, b)) for a, b in pairs if b.role == "in"]
        given += [pair for child in inner for pair in child.returned]
        outputs = [(a, b) for a, b in pairs if b.role == "out"]
        checks = [_Check.of(ref, a, record, b, inside) for a, b in outputs]
        checks += [_Check.of(c.ref, a, c.target, b, inside) for c in inner for a, b in c.handed]
        made = [check for check in checks if check is not None]
        if not made:
            raise _NotJudged("the reference's own ops within it make nothing that it returns or hands on")
        wanted = {check.place for check in made}
        inputs = _Inputs(self, ref, body, given)
        truth = self._run(body, wanted, inputs)
        own = self._run(body, wanted, None)
        units = _border(record), _border(ref)
        noisy = [self._run(body, wanted, inputs, units[1], seed) for seed in range(NUM_NOISY)]
        declared = self._noise.declared_within(call)
        found = [
            self._check(
                check, units, declared, truth[check.place], own[check.place], [n[check.place] for n in noisy]
            )
            for check in made
        ]
        unseen = False
        for a, b in (pair for pair, check in zip(outputs, checks, strict=False) if check is None):
            # What a call within returned, or what it was given itself, is handed on.
            passed = next((value for known, value in given if _is_same(known, a)), None)
            unseen = unseen or passed is None
            if passed is not None:
                check = _Check(ref, a, record, b, (-1, -1), b.name)
                found.append(self._check(check, units, declared, passed, self._tensor(self._ref, ref, a), []))
        worst = max(found, key=lambda f: (f.ok is False, f.error / max(f.band, 1e-300)))
        if not worst.ok and any(_decides(r) for r in body):
            raise _NotJudged("the reference's body makes a decision, which may fall the other way")
        if worst.ok and unseen:
            raise _NotJudged("not all that it returns is made within it")
        return worst

    def _check(
        self,
        check: _Check,
        units: tuple[float, float],
        declared: float,
        exact: torch.Tensor,
        own: torch.Tensor,
        others: list[torch.Tensor],
    ) -> Body:
        """One value of the target against the body.

        Args:
          units: coarsest roundoff at the borders of the target's call, and of the reference's.
          declared: what declared roundings may add.
          exact, own: what the body makes of the target's inputs, and of the reference's; others: with noise.
        """
        a, b = check.ref_slot, check.slot
        if tuple(exact.shape) != a.shape:
            raise _NotJudged("its outputs have other shapes")
        value = self._tensor(self._target, check.record, b)
        recorded = self._tensor(self._ref, check.ref, a)
        places = self._places(check.ref, a, recorded, check.record, b, value)
        if places is not None:
            value = value.reshape(-1)[places[1]]
            exact, own, recorded, *others = (
                x.reshape(-1)[places[0]] for x in (exact, own, recorded, *others)
            )
        ref_error = max([relative_l2(recorded, own), *(relative_l2(other, exact) for other in others)])
        u, u_ref = max(units[0], roundoff(b.dtype)), max(units[1], roundoff(a.dtype))
        band = TOLERANCE * max(u, u_ref, ref_error, ref_error * u / u_ref if u_ref else 0.0)
        band = math.hypot(band, C * declared)
        error = relative_l2(value, exact)
        row = worst_row(exact, value)[1] if math.isfinite(error) else error
        return Body(check.name, error, ref_error, band, error <= band and row <= ROW_FACTOR * band)

    def _inner(self, call: Call) -> list[_Inner]:
        """Calls within a call that answer for themselves.

        What is replayed of the call around them is its own code, on what they returned.
        """
        found = []
        for child in call.children:
            key = self._backward.get(child.key)
            ref = None if key is None else self._pairing.ref.calls[key].record
            if ref is None or child.record is None:
                found += self._inner(child)
                continue
            pairs = module_slots(ref, child.record, self._pairing)
            try:
                returned = [(a, self._given(ref, a, child.record, b)) for a, b in pairs if b.role == "out"]
            except _NotJudged:
                returned = []
            if not returned:
                found += self._inner(child)
                continue
            moved = self._pairing.plan is not None
            handed = [(a, b) for a, b in pairs if b.role == "in" and (moved or a.shape == b.shape)]
            found.append(_Inner(ref, child.record, returned, handed))
        return found

    def _body(self, ref: StoredRecord, inner: list[StoredRecord]) -> list[StoredRecord]:
        if self._ops is None:
            known = (r for r in self._pairing.ref.records.values() if r.kind == "op")
            self._ops = list(known) or list(self._ref.records(kind="op"))
        place = bisect_left(self._ops, ref.opened, key=lambda r: r.seq)
        body = [r for r in takewhile(lambda r: r.seq < ref.seq, islice(self._ops, place, None))]
        body = [r for r in body if r.grad_phase == "fwd" and r.thread == ref.thread]
        body = [r for r in body if not any(i.opened <= r.seq < i.seq for i in inner)]
        if not body:
            raise _NotJudged("the reference recorded no ops of its own in it")
        if len(body) > MAX_OPS:
            raise _NotJudged(f"it holds {len(body)} ops of the reference")
        if any(why_taken(r) for r in body):
            raise _NotJudged("the reference's body cannot all be run again (random, or unknown ops)")
        return body

    def _tensor(self, reader: RankReader, record: StoredRecord, slot: StoredSlot) -> torch.Tensor:
        try:
            return execute.tensor(whole_of(reader), record.seq, slot.name)
        except DispatchTraceError as error:
            side = "target" if reader is self._target else "reference"
            raise _NotJudged(f"the {side} did not keep {slot.name}: {error}"[:200]) from error

    def _given(self, ref: StoredRecord, a: StoredSlot, target: StoredRecord, b: StoredSlot) -> torch.Tensor:
        """What the target has in a slot, in the shape of the reference's."""
        value = self._tensor(self._target, target, b)
        if self._pairing.plan is None and a.shape == b.shape:
            return value
        theirs = self._tensor(self._ref, ref, a)
        places = self._places(ref, a, theirs, target, b, value)
        if places is None:
            return value
        put = theirs.to(value.dtype).reshape(-1).clone()
        put[places[0].reshape(-1)] = value.reshape(-1)[places[1].reshape(-1)]
        return put.reshape(a.shape)

    def _places(
        self,
        ref: StoredRecord,
        a: StoredSlot,
        theirs: torch.Tensor,
        target: StoredRecord,
        b: StoredSlot,
        value: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Numbers of the elements of both slots that belong together; None where they are all, in order."""
        steps = (ref.model, ref.step), (target.model, target.step)
        found = self._pairing.comparer.places(steps, a.shape, b.shape, self._dim_of_keys(a, b))
        if found is None and a.shape != b.shape:
            raise _NotJudged(f"{b.name} has another shape than the reference's")
        if found is None:
            return None
        if not found:
            raise _NotJudged(f"no way to read the shapes of {b.name} as rows of the same requests")
        readings = [(torch.from_numpy(i.copy()), torch.from_numpy(j.copy())) for i, j in found]
        if len(readings) == 1:
            return readings[0]
        flat = theirs.reshape(-1), value.reshape(-1)
        return min(readings, key=lambda places: relative_l2(flat[1][places[1]], flat[0][places[0]]))

    def _dim_of_keys(self, a: StoredSlot, b: StoredSlot) -> int | None:
        sides = (self._ref, a), (self._target, b)
        dims = {r.cache_dim(s.content) for r, s in sides if isinstance(r, StepLens)} - {None}
        return dims.pop() if len(dims) == 1 else None

    def _run(
        self,
        body: list[StoredRecord],
        wanted: set[Value],
        inputs: _Inputs | None,
        noise: float = 0.0,
        seed: int = 0,
    ) -> Values:
        given = None if inputs is None else inputs.of
        made, ran = execute.execute_body(self._ref, body, wanted, given=given, noise=noise, seed=seed)
        if ran.failed or ran.skipped or ran.taken or ran.narrowed:
            raise _NotJudged("the reference's body cannot all be run in float64")
        if wanted - made.keys():
            raise _NotJudged("the reference's body does not return it when run again")
        return made

    def leaf(self, slot: StoredSlot) -> torch.Tensor | None:
        """The target's value of a parameter of the reference, where it is the same up to rounding.

        Returns: None for the reference's own value.
        """
        content = slot.content
        place = self._pairing.ref._leaves.get(content) if content >= 0 else None
        known = None if place is None else self._pairing.ref.records.get(place[0])
        if (
            self._pairing.plan is not None
            and (known is None or known.kind != "param")
            and slot_numel(slot) > 1
        ):
            raise _NotJudged("what the reference's body reads besides may be about other requests")
        for link in self._pairing.ref_links.get(place, ()) if place is not None else ():
            ours = self._pairing.target.slot(link.target)
            plain = link.ref_content == content and link.target_content == ours.content >= 0
            if link.method != "param" or not plain or dtype_class(ours.dtype) != "f":
                continue
            same = ours.shape == self._pairing.ref.slot(link.ref).shape
            if (
                same
                and self._noise.state(link.target).explained
                and self._target.content(ours.content).has_data
            ):
                return self._target.tensor(ours.content)
        return None


class _Inputs:
    """What the reference's body reads from outside, in the target."""

    def __init__(
        self,
        bodies: Bodies,
        ref: StoredRecord,
        body: list[StoredRecord],
        given: list[tuple[StoredSlot, torch.Tensor]],
    ) -> None:
        self._bodies = bodies
        self._inside = {record.seq for record in body}
        self._given = given
        self._constants = {ref.seq: True}

    def of(self, record: StoredRecord, slot: StoredSlot) -> torch.Tensor | None:
        """Raises `_NotJudged` where it reads what the call was not given."""
        if any(producer in self._inside for producer, _ in slot.producers):
            return None
        for known, value in self._given:
            if _is_same(known, slot):
                return value.to(getattr(torch, slot.dtype)) if _floats(value, slot) else value
        if slot.leaf or not slot.producers:
            return self._bodies.leaf(slot)
        if self._is_constant(slot.producers):
            return None
        raise _NotJudged(f"the reference's {record.op} in it reads more than the call was given")

    def _is_constant(self, producers: tuple[Value, ...]) -> bool:
        """Whether something was made of parameters and constants of the program alone."""
        for seq, index in producers:
            record = self._bodies._ref.record(seq)
            if record.kind == "param":
                continue
            if record.kind != "op" or record.random:
                return False
            own = record.slots[index] if index >= 0 else None
            if own is not None and own.role == "in":
                if dtype_class(own.dtype) in "fc" and not own.content >= 0:
                    return False
                continue
            if seq not in self._constants:
                self._constants[seq] = False  # what depends on itself is written in place
                self._constants[seq] = is_factory(record) or all(
                    bool(s.producers) and self._is_constant(s.producers)
                    for s in record.slots
                    if s.role == "in" and s.is_tensor
                )
            if not self._constants[seq]:
                return False
        return True


def _is_same(given: StoredSlot, read: StoredSlot) -> bool:
    """Whether an op reads just what a module was given."""
    if given.shape != read.shape or given.dtype != read.dtype:
        return False
    if given.producers or read.producers:
        return given.producers == read.producers
    return given.content == read.content >= 0


def _floats(value: torch.Tensor, slot: StoredSlot) -> bool:
    return value.is_floating_point() and dtype_class(slot.dtype) == "f"


def _decides(record: StoredRecord) -> bool:
    floats = any(s.role == "in" and dtype_class(s.dtype) in "f8" for s in record.slots if s.is_tensor)
    return floats and (short(record.op) in DISCRETE or any(decides(record, s) for s in record.slots))


def _border(record: StoredRecord) -> float:
    return max((roundoff(s.dtype) for s in record.slots if s.is_tensor), default=0.0)


__all__ = ["Bodies", "Body"]
