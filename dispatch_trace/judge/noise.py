"""One pass over the target's values: which are what the reference says, up to noise, and which are not.

For each value the best link to a reference value is measured and held against what rounding alone may have
done: the op's own rounding plus the measured error of its inputs, grown as the op lets errors grow. So
noise that rises smoothly through a deep model is explained step by step, and a jump is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from dispatch_trace.align.canon import DISCRETE, decides, dtype_class, is_empty, is_factory, short
from dispatch_trace.align.content import Difference
from dispatch_trace.align.flow import Flow, has_inputs
from dispatch_trace.align.graph import Call, CallKey, Origin, Program, Value, slot_numel
from dispatch_trace.align.pairs import Link, Pairing
from dispatch_trace.judge.declared import Declaration
from dispatch_trace.judge.estimates import (
    UNKNOWN_GAIN,
    C,
    gains_of,
    is_rounding_alone,
    most_of,
    own_noise,
    roundoff,
)
from dispatch_trace.judge.handed_on import HandedOn
from dispatch_trace.judge.magnitudes import Magnitudes
from dispatch_trace.judge.quantised import Codes, codes_of, quantisation_noise
from dispatch_trace.judge.unordered import Unordered
from dispatch_trace.per_step import (
    greatest,
    hypot,
    is_finite,
    is_smaller,
    or_zero,
    per_step_of,
    root,
    smallest,
)
from dispatch_trace.schema import StoredRecord, StoredSlot

_Measured: TypeAlias = tuple[Link, Difference]

# A row may be this many times as wrong as a whole tensor is allowed to be, before it counts by itself.
ROW_FACTOR = 10.0
# A value stands for one of the reference that is up to this many times as far from it as the nearest one.
FARTHER = 10.0
# Noise that an op makes larger than this says nothing any more about what stands behind it.
GARBAGE = 0.25
STEEP = 4.0
# Integer tensors smaller than this are indices or sizes, not codes of a weight.
MIN_CODES = 64


@dataclass(slots=True, eq=False)
class State:
    """What is known of one value of the target.

    Attributes:
      rho: measured relative error against its best link, None where nothing could be compared.
      link, difference: that link and its difference.
      noise: relative error to reckon with downstream: rho where known, else predicted.
      predicted: what rounding and the inputs' measured errors lead to.
      clean: the error that the value would have without any defect.
      limit: error up to which it is taken for noise.
      explained: within noise; None where nothing could be compared.
      tainted: some input is wrong, or may be.
      flags: what had to be granted to explain it: ("cast", seq), ("ill", seq), ("flip", seq).
      notes: in words ("int8 grid, RMSE/step 0.288").
      elsewhere: explained by a value of the reference that no link names.
      alike: holds the reference's numbers as far as figures tell, in an order that they do not tell.
    """

    rho: float | None = None
    link: Link | None = None
    difference: Difference | None = None
    noise: float = 0.0
    predicted: float = 0.0
    clean: float = 0.0
    limit: float = 0.0
    explained: bool | None = None
    tainted: bool = False
    flags: frozenset[tuple[str, int]] = frozenset()
    notes: tuple[str, ...] = ()
    elsewhere: bool = False
    alike: bool = False

    @property
    def wrong(self) -> bool:
        return self.explained is False

    @property
    def suspicious(self) -> bool:
        """Wrong, or not comparable and fed by something wrong."""
        return self.explained is False or (self.explained is None and self.tainted)


@dataclass(slots=True)
class Budget:
    """Parts of a prediction: squared sums of what is granted freely, and by flag."""

    free: float = 0.0
    granted: float = 0.0
    clean: float = 0.0
    flags: set[tuple[str, int]] = field(default_factory=set)
    tainted: bool = False

    @property
    def full(self) -> float:
        return hypot(self.free, self.granted)


class NoisePass:
    """States of all values of the target, and predicted noise of the reference's.

    Attributes:
      states: by value of the target; leaves are added when first asked for.
      codes: integer leaves of the target that stand for float weights of the reference.
      flow: what modules of the target read that recorded no inputs.
      handed_on: what steps that repeat read of others.
      unordered: what is known of values that hold the reference's numbers in an order not known.
    """

    def __init__(
        self,
        pairing: Pairing,
        *,
        exact: bool = False,
        tolerance: float | None = None,
        declared: Declaration | None = None,
    ) -> None:
        self.pairing = pairing
        self.exact = exact
        self.tolerance = tolerance or 0.0
        self.declared = declared or Declaration()
        self.states: dict[Value, State] = {}
        self.ref_sizes = Magnitudes(pairing.ref, pairing.comparer, ref_side=True)
        self.sizes = Magnitudes(pairing.target, pairing.comparer, ref_side=False)
        self.codes: dict[Value, Codes] = {}
        self.flow = Flow(pairing)
        self.unordered = Unordered(pairing)
        self.handed_on = HandedOn(self)
        self._ref_noise: dict[Value, float] = {}
        self._borders: dict[tuple[int, Call], float] = {}
        self._measured: dict[Value, bool] = {}
        self._declared_within: dict[CallKey, float] = {}

    def run(self) -> None:
        """
        Raises:
          AstrayError: see `HandedOn.check`.
        """
        if not self.exact:
            for record in self.pairing.ref.records.values():
                if record.kind == "op" and not self.pairing.ref.is_edge(record):
                    self._predict_ref(record)
        for record in self.pairing.target.records.values():
            if record.kind == "op" and not self.pairing.target.is_edge(record):
                self.handed_on.come_to(record)
                for out in self.pairing.target.outputs(record):
                    self.states[(record.seq, out.index)] = self._judge(record, out)
        for value in self.flow.unfed():
            self.state(value)
        self.handed_on.settle()
        self.handed_on.check()

    # States -----------------------------------------------------------------------------------------

    def state(self, value: Value) -> State:
        """State of any value of the target, leaves and allocations included."""
        found = self.states.get(value)
        if found is None:
            record = self.pairing.target.records[value[0]]
            if is_empty(record):
                found = State()
            elif record.kind == "module" and record.slots[value[1]].role == "out":
                found = self._judge_opaque(record, record.slots[value[1]])
            else:
                found = self._judge_leaf(value)
            self.states[value] = found
        return found

    def slot_noise(
        self, record: StoredRecord, slot: StoredSlot
    ) -> tuple[float, float, frozenset[tuple[str, int]], bool]:
        """(noise, clean noise, flags, suspicious) of what an input slot of the target holds."""
        noise: list[float] = []
        clean: list[float] = []
        flags: frozenset[tuple[str, int]] = frozenset()
        suspicious = False
        if slot_numel(slot) == 0:  # what is empty carries nothing, wherever it was cut from
            return 0.0, 0.0, flags, suspicious
        for origin in self.pairing.target.origins(record, slot):
            state = self.state(origin.value)
            # Measured errors may sit in the part that is read; predicted ones are rounding, alike everywhere.
            measured = origin.share < 1.0 and state.rho is not None
            part = 1.0 / root(greatest(origin.share, 1e-6)) if measured else 1.0
            cast = _cast_noise(self.pairing.target, origin)
            noise.append(hypot(state.noise * part, cast))
            # What a wrong value would be off by without the defect is a prediction, whatever was measured.
            clean.append(hypot(state.clean * (part if state.explained else 1.0), cast))
            flags |= state.flags
            suspicious = suspicious or state.suspicious
        return greatest(*noise), greatest(*clean), flags, suspicious

    def best(self, links: Iterable[Link]) -> _Measured | None:
        """The link whose difference is known and smallest."""
        found: _Measured | None = None
        for link in links:
            difference = self.pairing.compare(link)
            if difference.known:
                found = (link, difference) if found is None else self._nearer(found, (link, difference))
            if difference.equal:
                break
        return found

    def _nearer(
        self, first: tuple[Link, Difference], second: tuple[Link, Difference]
    ) -> tuple[Link, Difference]:
        """The one of two with the smaller difference; of several steps for each its own."""
        steps = per_step_of(first[1].rho, second[1].rho)
        if steps is not None and first[0].ref == second[0].ref:
            nearer = is_smaller(second[1].rho, first[1].rho, steps)
            if nearer.any() and not nearer.all():
                link = self.pairing.chosen(first[0], second[0], nearer, steps)
                return link, self.pairing.compare(link)
        return second if _size(second[1]) < _size(first[1]) else first

    def _judge(self, record: StoredRecord, out: StoredSlot) -> State:
        value = (record.seq, out.index)
        links = self.pairing.links.get(value, ())
        budget = self._budget(record, out, links)
        found = self.best(links)
        state = State(
            predicted=budget.full,
            noise=budget.full,
            clean=budget.clean,
            tainted=budget.tainted,
            flags=frozenset(budget.flags),
        )
        if found is None:
            limit = self.band(budget.clean if budget.tainted else budget.full)
            self._judge_unordered(value, state, limit)
            return state
        link, difference = found
        state.link, state.difference, state.rho = link, difference, difference.rho
        ref_noise = self._ref_noise.get(link.ref, 0.0)
        # Predictions are relative to the target's own size, rho to the reference's: where a sum cancels to
        # nothing in the reference, what rounding leaves of it in the target is large beside it.
        ratio = self._size_ratio(link, record, out)
        budget.free, budget.granted, budget.clean = (
            ratio * part for part in (budget.free, budget.granted, budget.clean)
        )
        state.predicted = budget.full
        # With something wrong before it, a value is explained only if the wrong has healed.
        reckoned = budget.clean if budget.tainted else budget.full
        limit = self.floored(self.band(hypot(reckoned, ref_noise), difference), link)
        state.limit = limit
        state.explained = within(difference, limit)
        if not state.explained and not self.exact and self.pairing.ref.is_leaf(link.ref):
            self._excuse_grid(state, link, difference)  # a weight that the target keeps as codes and scales
        if not state.explained and not self.exact and self._are_nothing(record, out, link):
            state.explained = True
        if not state.explained and not budget.tainted and record.random:
            state.flags |= {("random", record.seq)}
        if state.explained:
            state.noise = state.clean = difference.rho if is_finite(difference.rho) else 1.0
            strict = self.floored(self.band(hypot(budget.free, ref_noise), difference), link)
            state.flags = frozenset(budget.flags)
            if within(difference, strict):
                # Behind something wrong even the free part is not noise: what a flip excuses stays one.
                state.flags = frozenset(f for f in budget.flags if budget.tainted and f[0] == "flip")
            if decides(record, out) and difference.rho and self._flipped(record, out, budget):
                state.flags |= {("flip", record.seq)}  # integers within the band are others all the same
            state.tainted = False
            # What is only predicted, of the reference or behind something wrong, would excuse anything.
            guessed = budget.tainted and reckoned > GARBAGE
            if guessed or ref_noise > GARBAGE:
                alone = self.floored(self.band(0.0 if guessed else reckoned, difference), link)
                state.flags |= set() if within(difference, alone) else {("ill", record.seq)}
        else:
            state.noise = difference.rho if is_finite(difference.rho) else 1.0
            if self._flipped(record, out, budget):
                state.explained, state.flags = True, state.flags | {("flip", record.seq)}
                state.clean = state.noise
            elif not budget.tainted and any(kind == "flip" for kind, _ in budget.flags):
                # Behind a flipped decision whole rows are others, by as much as they please.
                state.explained, state.clean = True, state.noise
        return state

    def _are_nothing(self, record: StoredRecord, out: StoredSlot, link: Link) -> bool:
        """Whether both sides add up to zero but for the rounding of their terms: no digit counts."""
        ref, owner = self.pairing.ref, self.pairing.ref.records[link.ref[0]]
        return (
            owner.kind == "op"
            and is_rounding_alone(self.pairing.target, record, out, self.sizes.of_slot)
            and is_rounding_alone(ref, owner, ref.slot(link.ref), self.ref_sizes.of_slot)
        )

    def doubts(self, flags: frozenset[tuple[str, int]]) -> bool:
        """Whether what had to be granted on the way leaves open if a difference means anything."""
        return False

    def _size_ratio(self, link: Link, record: StoredRecord, out: StoredSlot) -> float:
        """How much larger the target's value is than the reference's; at least 1."""
        ref, target = link.ref_content, self.sizes.of_slot(record, out).rms
        if ref < 0 or not target or self.pairing.comparer.layout(ref) is not None:
            return 1.0
        size = self.ref_sizes.of_content(ref).rms
        return greatest(1.0, target / size) if size else 1.0

    def band(self, predicted: float, difference: Difference | None = None) -> float:
        """Up to which relative error a difference is noise."""
        if self.exact:
            return 0.0
        floor = 0.0 if difference is None else difference.rounding
        return greatest(C * hypot(predicted, floor), self.tolerance)

    def floored(self, band: float, link: Link) -> float:
        """A band, or what runs of the reference differ by at this value, where that is more."""
        return band if self.exact else greatest(band, self.pairing.floors.get(link.ref, 0.0))

    def _flipped(self, record: StoredRecord, out: StoredSlot, budget: Budget) -> bool:
        """A decision that fell the other way because of noise in what it was made on."""
        if self.exact or budget.tainted or not decides(record, out):
            return False
        inputs = [s for s in self.pairing.target.inputs(record) if dtype_class(s.dtype) in "fc8"]
        return any(self.slot_noise(record, s)[0] > 0 for s in inputs)

    def _judge_opaque(self, record: StoredRecord, out: StoredSlot) -> State:
        """What a compiled region returned: no recorded op made it, its inputs stand for all inside."""
        value = (record.seq, out.index)
        found = self.best(self.pairing.links.get(value, ()))
        own = hypot(roundoff(out.dtype), self.declared_within(self.pairing.target.call_of(record)))
        budget = Budget(free=own, clean=own)
        for noise, clean, flags, suspicious in self._opaque_inputs(record, value):
            budget.free = hypot(budget.free, UNKNOWN_GAIN * noise)
            budget.clean = hypot(budget.clean, clean)
            budget.flags |= flags
            budget.tainted = budget.tainted or suspicious
        state = State(noise=budget.free, predicted=budget.free, clean=budget.clean, tainted=budget.tainted)
        if found is None:
            return state
        link, difference = found
        state.link, state.difference, state.rho = link, difference, difference.rho
        own = budget.clean if budget.tainted else budget.free
        band = self.band(hypot(own, self._ref_noise.get(link.ref, 0.0)), difference)
        state.limit = self.floored(band, link)
        state.explained = within(difference, state.limit)
        state.noise = difference.rho if is_finite(difference.rho) else 1.0
        if state.explained:
            state.clean, state.tainted = state.noise, False
        return state

    def declared_within(self, call: Call) -> float:
        """What declared roundings may add in a call of the target whose own ops were not recorded.

        They are those of the reference's ops in its place, each as large as the operand that is rounded.
        """
        if not self.declared.rules:
            return 0.0
        found = self._declared_within.get(call.key)
        if found is None:
            twin = next((r for r, t in self.pairing.calls.items() if t == call.key), None)
            parts = [0.0]
            if twin is not None:
                inside = self.pairing.ref.calls[twin]
                for record in self.pairing.ref.records.values():
                    if record.kind == "op" and inside.opened <= record.seq <= inside.closed:
                        parts += [self.declared.operands(record), self.declared.output(record)]
            found = self._declared_within[call.key] = hypot(*parts)
        return found

    def _opaque_inputs(
        self, record: StoredRecord, value: Value
    ) -> Iterator[tuple[float, float, frozenset[tuple[str, int]], bool]]:
        """`slot_noise` of what a module was given; where that was not recorded, of what it came from."""
        if not has_inputs(record):
            for before in self.flow.before(value):
                state = self.state(before)
                yield state.noise, state.clean, state.flags, state.suspicious
        for slot in record.slots:
            if slot.role == "in" and slot.is_tensor:
                yield self.slot_noise(record, slot)
        # What calls within returned: rounding adds up over all of them, however exact the inputs were.
        within_it = [child.record for child in self.pairing.target.call_of(record).children]
        for child in (inner for inner in within_it if inner is not None):
            for slot in child.slots:
                if slot.role == "out" and slot.is_tensor:
                    state = self.state((child.seq, slot.index))
                    yield state.noise, state.clean, state.flags, state.suspicious

    def _judge_leaf(self, value: Value) -> State:
        links = self.pairing.links.get(value, ())
        found = self.best(links)
        record = self.pairing.target.records[value[0]]
        if self.pairing.target.reader.sources(record, record.slots[value[1]]):
            if found is None:
                self.pairing.target.reader.lose(record)
                return State()
            state = self._measured_state(*found)
            self.handed_on.judge(record, record.slots[value[1]], state)
            return state
        if found is None:
            state = self._judge_codes(value)
            self._judge_unordered(value, state, self.unordered.rounding(value))
            return state
        link, difference = found
        state = self._measured_state(link, difference)
        if difference.equal:
            state.explained = True
            return state
        by = self._writer(value, record)
        if by is not None:  # judged where it was made
            state.explained, state.tainted = by.explained, by.wrong
            if by.wrong:
                state.noise, state.clean = by.noise, by.clean
            return state
        if self.exact:
            state.explained = False
            return state
        ref, target = self.pairing.ref.slot(link.ref), self.pairing.target.slot(value)
        u_ref, u_target = roundoff(ref.dtype), roundoff(target.dtype)
        limit = max(u_ref, u_target) * (1.0 if u_ref != u_target else C)
        if dtype_class(target.dtype) not in "fc8":
            limit = 0.0
        state.limit = self.floored(self.band(limit / C, difference), link)
        state.explained = within(difference, state.limit)
        if not state.explained:
            self._excuse_grid(state, link, difference)
        if not state.explained:
            state.noise = difference.rho if is_finite(difference.rho) else 1.0
            state.clean = 0.0
        return state

    def _writer(self, value: Value, record: StoredRecord) -> State | None:
        """What is known of a parameter where an op wrote it that was recorded, an optimiser's say."""
        target = self.pairing.target
        by = target.writers(record) if record.kind == "param" and target.slot(value).role != "in" else []
        if len(by) != 1 or target.slot(by[0]).content != target.slot(value).content:
            return None
        state = self.state(by[0])
        return None if state.explained is None else state

    def _judge_unordered(self, value: Value, state: State, limit: float) -> None:
        """For a value in no order that is known: whether it is certainly wrong."""
        found = None if self.exact else self.unordered.measure(value)
        if found is None:
            return
        link, difference = found
        limit = self.floored(hypot(limit, self.band(self._ref_noise.get(link.ref, 0.0), difference)), link)
        state.alike = within(difference, limit)
        if not state.alike:
            state.link, state.difference, state.rho = link, difference, difference.rho
            state.limit, state.explained = limit, False
            state.noise = difference.rho

    def _measured_state(self, link: Link, difference: Difference) -> State:
        rho = difference.rho
        return State(rho=rho, link=link, difference=difference, noise=rho, clean=rho)

    def _judge_codes(self, value: Value) -> State:
        """A leaf without counterpart: if it holds the codes of a quantised weight, their noise is known."""
        slot = self.pairing.target.slot(value)
        readers = self.pairing.target.consumers.get(value)
        if self.exact or dtype_class(slot.dtype) != "i" or not readers or slot_numel(slot) < MIN_CODES:
            return State()
        found = codes_of(self.pairing, value, self.pairing.target.records[readers[0][0]])
        if found is None:
            return State()
        self.codes[value] = found
        noise = found.noise or 0.0
        return State(noise=noise, predicted=noise, clean=noise, notes=(found.note,) if found.note else ())

    def _excuse_grid(self, state: State, link: Link, difference: Difference) -> None:
        found = quantisation_noise(self.pairing, link, difference)
        if found is not None:
            state.explained = True
            state.notes = (*state.notes, found)

    # Predictions ------------------------------------------------------------------------------------

    def _budget(self, record: StoredRecord, out: StoredSlot, links: Iterable[Link]) -> Budget:
        program = self.pairing.target
        budget = Budget()
        if self.exact:
            for slot in program.inputs(record):
                budget.tainted = budget.tainted or self.slot_noise(record, slot)[3]
            return budget
        paired = any(link.method == "op" for link in links)
        tau = self._own_noise(program, record, out)
        allowed = self._allowed(record, out, links)
        actual = roundoff(out.dtype)
        if actual > allowed > 0.0:
            budget.granted, budget.flags = tau, {("cast", record.seq)}
            tau = tau * allowed / actual
        parts = [tau]
        cleans = [0.0]
        declared = self.declared.operands(record)
        gains = gains_of(program, record, out, self.sizes.of_slot)
        most = most_of(program, record, out, self.sizes.of_slot)
        for slot, gain in gains:
            if _unread(record, slot):
                continue
            noise, clean, flags, suspicious = self.slot_noise(record, slot)
            noise, clean = hypot(noise, declared), hypot(clean, declared)
            cast = self._undeclared_cast(record, slot, allowed)
            share = smallest(gain * noise, most)
            if short(record.op) in DISCRETE and dtype_class(slot.dtype) in "fc8":
                share = _flip_noise(share, self.sizes.of_slot(record, out).rms)
            # One question, of both: steps part at each that they answer differently.
            if not suspicious and smallest(share / GARBAGE, gain / STEEP) > 1.0:
                flags |= {("ill", record.seq)}
            if cast:
                flags |= {("cast", cast)}
            budget.tainted = budget.tainted or suspicious
            cleans.append(smallest(gain, 1.0) * clean)
            if flags:
                budget.granted = hypot(budget.granted, share)
                budget.flags |= flags
            else:
                parts.append(share)
        worst_clean = greatest(*cleans)
        budget.clean = hypot(tau, worst_clean) if paired else greatest(tau, worst_clean)
        # Between anchors rounding is counted once: a long loop in low precision must not excuse itself.
        budget.free = hypot(*parts) if paired else greatest(*parts)
        return budget

    def _predict_ref(self, record: StoredRecord) -> None:
        program = self.pairing.ref
        for out in program.outputs(record):
            tau = self._own_noise(program, record, out)
            parts = [tau]
            for slot, gain in gains_of(program, record, out, self.ref_sizes.of_slot):
                noise = [0.0]
                for origin in program.origins(record, slot):
                    if self.is_measured(origin.value):
                        continue
                    noise += (self._ref_noise.get(origin.value, 0.0), _cast_noise(program, origin))
                parts.append(gain * greatest(*noise))
            value = (record.seq, out.index)
            paired = record.seq in self.pairing.ops_by_ref
            self._ref_noise[value] = hypot(*parts) if paired else greatest(*parts)

    def _own_noise(self, program: Program, record: StoredRecord, out: StoredSlot) -> float:
        sizes = self.ref_sizes if program is self.pairing.ref else self.sizes
        return own_noise(program, record, out, sizes.of_slot)

    def is_measured(self, value: Value) -> bool:
        """Whether some target value stands for this one: its error then counts on that side."""
        found = self._measured.get(value)
        if found is None:
            found = False
            for link in self.pairing.ref_links.get(value, ()):
                difference = self.pairing.compare(link)
                if difference.known and (self.pairing.made_alike(link) or difference.rho < GARBAGE):
                    found = True
                    break
            self._measured[value] = found
        return found

    def stands_for(self, value: Value) -> bool:
        """Whether a value of the target is this one of the reference: the same op's, or equal up to noise."""
        for link in self.pairing.ref_links.get(value, ()):
            if self.pairing.made_alike(link):
                return True
            state = self.state(link.target)
            difference = self.pairing.compare(link)
            if not (difference.known and state.explained and within(difference, state.limit)):
                continue
            own = greatest(or_zero(state.rho), roundoff(self.pairing.target.slot(link.target).dtype))
            if difference.rho <= FARTHER * own:  # or it is another value of the reference
                return True
        return False

    def border(self, record: StoredRecord) -> float:
        """Roundoff of what goes in or out of the target's call that an op stands in."""
        return self._border(0, self.pairing.target, self.pairing.target.call_of(record))

    def ref_border(self, record: StoredRecord) -> float:
        """The same in the reference."""
        return self._border(1, self.pairing.ref, self.pairing.ref.call_of(record))

    def _allowed(self, record: StoredRecord, out: StoredSlot, links: Iterable[Link]) -> float:
        """The coarsest roundoff that this op may have: the target module's border, or the reference's."""
        coarsest = [self.border(record)]
        for link in links:
            owner = self.pairing.ref.records[link.ref[0]]
            if owner.kind == "op":
                coarsest.append(roundoff(self.pairing.ref.slot(link.ref).dtype))
                coarsest.append(self.ref_border(owner))
        coarsest.append(self.declared.output(record))
        return max(coarsest)

    def _border(self, side: int, program: Program, call: Call) -> float:
        """Coarsest float that goes in or out of a call, or of the nearest one around it that shows any."""
        key = (side, call)
        found = self._borders.get(key)
        if found is None:
            found = 0.0
            if call.record is not None:
                found = max(
                    (
                        roundoff(s.dtype)
                        for s in call.record.slots
                        if s.is_tensor and dtype_class(s.dtype) == "f"
                    ),
                    default=0.0,
                )
            if found == 0.0 and call.parent is not None:
                found = self._border(side, program, call.parent)
            self._borders[key] = found
        return found

    def _undeclared_cast(self, record: StoredRecord, slot: StoredSlot, allowed: float) -> int:
        """The record of a cast to something coarser than anything around asks for; 0 where there is none."""
        if self.declared.operands(record):
            return 0
        for origin in self.pairing.target.origins(record, slot):
            source = roundoff(self.pairing.target.slot(origin.value).dtype)
            for dtype in origin.casts:
                if roundoff(dtype) > max(allowed, source) > 0:
                    return _cast_record(self.pairing.target, origin, dtype)
        return 0


def within(difference: Difference, limit: float) -> bool:
    """Whether a difference is within a limit, its worst row included."""
    if difference.equal:
        return True
    if difference.nonfinite or not difference.rho <= limit:
        return False
    return difference.worst is None or difference.worst[1] <= greatest(ROW_FACTOR * limit, 0.0)


def _size(difference: Difference) -> tuple[float, int]:
    return (math.inf, difference.nonfinite) if difference.nonfinite else (difference.rho, 0)


def _cast_noise(program: Program, origin: Origin) -> float:
    """Rounding by the casts on the way."""
    source = roundoff(program.slot(origin.value).dtype)
    return max((u for u in map(roundoff, origin.casts) if u > source), default=0.0)


def _cast_record(program: Program, origin: Origin, dtype: str) -> int:
    for seq in origin.edges:
        record = program.records[seq]
        if any(slot.dtype == dtype for slot in program.outputs(record)):
            return seq
    return origin.edges[-1] if origin.edges else 0


def _flip_noise(share: float, size: float | None) -> float:
    """Error of rounded values whose inputs carry noise: some land on the next integer."""
    if not size:
        return share
    moved = share * size  # in units of one step
    return root(0.8 * moved + moved * moved) / size


def _unread(record: StoredRecord, slot: StoredSlot) -> bool:
    """Whether the op overwrites the argument without reading it."""
    if slot.name == "in.out" or is_factory(record):
        return True
    return short(record.op) in ("copy", "fill", "zero") and slot.name == "in.self"
