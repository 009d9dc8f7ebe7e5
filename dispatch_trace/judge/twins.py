"""Twins: both programs again, in float64, from the same leaves. Is the target another program?

Rounding, reassociation, depth and flipped decisions vanish, so equality becomes a test of programs. The
values of both runs are lined up as the recordings were, and judged by the same rules with other
noise: that of float64, with `LIMIT` as the floor. A value of the target is explained when a linked value of
the reference equals it; where none is linked to its op, any does: as it is, reshaped, or with dims permuted.

What twins cannot say is whether the target computes its program badly: casts between floats are elided and
kernels are this machine's. That is for the estimates (`joined`).
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy.typing as npt
import torch

from dispatch_trace.align.canon import dtype_class
from dispatch_trace.align.content import Comparer, Difference, unknown
from dispatch_trace.align.graph import Program, Value
from dispatch_trace.align.links import relinked
from dispatch_trace.align.pairs import Pairing, Progress
from dispatch_trace.judge.declared import Declaration
from dispatch_trace.judge.noise import Budget, NoisePass, State
from dispatch_trace.judge.twin_keys import Keys, recording
from dispatch_trace.judge.twin_leaves import Healed, Leaves
from dispatch_trace.judge.twin_trace import TwinTrace
from dispatch_trace.judge.twin_values import Fingerprint, distance, permutations, similar
from dispatch_trace.schema import StoredContent, StoredRecord, StoredSlot
from dispatch_trace.store.reader import RankReader

# Equal values are at most this far apart (relative L2): constants are often float32 numbers.
LIMIT = 2e-6
CLOUD = "cloud"


@dataclass(slots=True)
class Twins:
    """Both float64 runs, lined up.

    Attributes:
      pairing: of the two runs.
      ref, target: the runs.
      elsewhere: values of the target that equal a value of the reference which no link names: how.
      leaves: what was harmonised.
      codes: integer leaves of the target that stand for weights of the reference.
    """

    pairing: Pairing
    ref: TwinTrace
    target: TwinTrace
    elsewhere: dict[Value, str]
    leaves: Leaves
    codes: frozenset[Value]

    @property
    def healed(self) -> list[Healed]:
        return self.leaves.healed


def run_twins(
    pairing: Pairing, noise: NoisePass, leaves: Leaves, keys: Keys, progress: Progress | None = None
) -> Twins:
    """Executes both recordings in float64 and lines the runs up.

    Of the target nothing runs where it is known to be the reference's program, and no fingerprint is taken of
    what is known to equal a value of the reference.

    Args:
      pairing: of the recordings.
      noise: what the estimates say of their values.
      leaves: what the runs read; keys: of the values.
      progress: called with (done, total, what).
    """

    def running(what: str) -> Any:
        return None if progress is None else lambda done, total: progress(done, total, what)

    ref = TwinTrace(pairing.ref.reader, leaves.ref, partial(leaves.hash, 0))
    ref.run(
        keep=leaves.kept | pairing.whole[0],
        records=recording(pairing.ref),
        progress=running("running the reference in float64"),
    )
    made = {keys.ref[place]: found for place, found in ref.made() if place in keys.ref}
    known = {place: made[key] for place, key in keys.target.items() if key in made}

    def target_leaf(content: int) -> torch.Tensor | None:
        place = leaves.late(content)
        number = -1 if place is None else ref.at(place)
        data = ref.elements(number) if number >= 0 else None
        return leaves.target(content) if data is None else torch.from_numpy(data.copy())

    target = TwinTrace(pairing.target.reader, target_leaf, partial(leaves.hash, 1))
    search = _Search(pairing, ref)
    target.run(
        keep=frozenset(pairing.whole[1]),
        put=leaves.snapped,
        seen=search.look,
        records=recording(pairing.target),
        known=known,
        all_known=keys.one_program and not ref.cloudy,
        progress=running("running the target in float64"),
    )
    programs = [Program(cast(RankReader, twin), steps=pairing.steps) for twin in (ref, target)]
    return Twins(
        relinked(pairing, programs[0], programs[1], _TwinComparer(ref, target)),
        ref,
        target,
        search.found,
        leaves,
        frozenset(noise.codes),
    )


class TwinPass(NoisePass):
    """States of the target's values in float64."""

    def __init__(
        self, twins: Twins, *, tolerance: float | None = None, declared: Declaration | None = None
    ) -> None:
        super().__init__(twins.pairing, tolerance=max(LIMIT, tolerance or 0.0))
        self.twins = twins
        # Casts between floats are elided, those to eight bits are not: they may be what was declared.
        self._eight_bits_meant = declared is not None and bool(declared.rules)

    def doubts(self, flags: frozenset[tuple[str, int]]) -> bool:
        return any(kind in (CLOUD, "ill") for kind, _ in flags)

    def _judge(self, record: StoredRecord, out: StoredSlot) -> State:
        state = super()._judge(record, out)
        value = (record.seq, out.index)
        if state.explained is not True and value in self.twins.elsewhere:
            found = State(explained=True, notes=(self.twins.elsewhere[value],), elsewhere=True)
            found.link, found.difference, found.rho = state.link, state.difference, 0.0
            return found
        if state.explained is not True and self._is_cloudy(record, out, state):
            state.flags |= {(CLOUD, record.seq)}
        if state.wrong and self.doubts(state.flags):
            state.explained = None
        return state

    def _is_cloudy(self, record: StoredRecord, out: StoredSlot, state: State) -> bool:
        twins = self.twins
        if record.seq in twins.target.cloudy:
            return True
        if self._eight_bits_meant and dtype_class(out.dtype) == "8":
            return True
        return state.link is not None and state.link.ref[0] in twins.ref.cloudy

    def _judge_leaf(self, value: Value) -> State:
        state = super()._judge_leaf(value)
        if value in self.twins.codes:
            return State(flags=frozenset([(CLOUD, value[0])]))
        return state

    def _judge_opaque(self, record: StoredRecord, out: StoredSlot) -> State:
        state = super()._judge_opaque(record, out)
        if not state.explained:
            state.explained, state.flags = None, state.flags | {(CLOUD, record.seq)}
        return state

    def _judge_codes(self, value: Value) -> State:
        return State()

    def _excuse_grid(self, state: State, link: Any, difference: Difference) -> None:
        """Grids were harmonised, as far as they can be."""

    def _flipped(self, record: StoredRecord, out: StoredSlot, budget: Budget) -> bool:
        """In float64 decisions flip at exact ties only: that says nothing for or against the target."""
        if super()._flipped(record, out, budget):
            budget.flags.add((CLOUD, record.seq))
        return False

    def _own_noise(self, program: Program, record: StoredRecord, out: StoredSlot) -> float:
        if dtype_class(out.dtype) == "8":
            return 0.0  # a cast to eight bits is executed, on equal values
        return super()._own_noise(program, record, out)


class _TwinComparer(Comparer):
    """Compares values of two float64 runs."""

    def __init__(self, ref: TwinTrace, target: TwinTrace) -> None:
        super().__init__(cast(RankReader, ref), cast(RankReader, target))
        self._twins = (ref, target)

    def whole(self, ref_side: bool, id: int) -> npt.NDArray[Any] | None:
        if ref_side and self.layout(id) is not None:
            return self.array(ref_side, id)
        return self._twins[0 if ref_side else 1].whole(id)

    def _from_sketches(self, a: StoredContent, b: StoredContent) -> Difference:
        first, second = self._twins[0].value(a.id), self._twins[1].value(b.id)
        if first is None or second is None:
            return unknown("no ordinary tensor")
        if first.numel != second.numel:
            return unknown(f"shapes differ: {list(first.shape)} against {list(second.shape)}")
        if first.pattern != second.pattern:
            counts = [
                abs(int(second.stats[name] or 0) - int(first.stats[name] or 0))
                for name in ("nan", "posinf", "neginf")
            ]
            return Difference(rho=math.inf, nonfinite=max(sum(counts), 1), method="sketch")
        rho = distance(first, second)
        transform = "" if first.shape == second.shape else "reshaped"
        return Difference(equal=rho == 0.0, rho=rho, method="sketch", transform=transform)


class _Search:
    """Looks for each value of the target among all of the reference's, where its links do not explain it."""

    def __init__(self, pairing: Pairing, ref: TwinTrace) -> None:
        self._pairing = pairing
        self._ref = ref
        self.found: dict[Value, str] = {}
        # By number of elements, in the order of their squares' sums.
        self._by_size: defaultdict[int, list[tuple[float, Fingerprint]]] = defaultdict(list)
        for _, value in ref.computed():
            if value.is_telling:
                self._by_size[value.numel].append((value.square_sum, value))
        for values in self._by_size.values():
            values.sort(key=_square_sum)

    def look(self, place: Value, value: torch.Tensor | None, mine: Fingerprint) -> None:
        if place[0] in self._pairing.ops:
            return  # its counterpart is known: that another value is the same proves nothing
        for link in self._pairing.links.get(place, ()):
            number = self._ref.at(link.ref)
            theirs = self._ref.value(number) if number >= 0 else None
            if theirs is not None and theirs.numel == mine.numel and distance(theirs, mine) <= LIMIT:
                return
        if not mine.is_telling:
            return
        alike = self._alike(mine)
        for theirs in alike:
            if distance(theirs, mine) <= LIMIT:
                self.found[place] = "equals another value of the reference"
                return
        if not alike or value is None:
            return
        for how, turned in permutations(value):
            if any(distance(theirs, turned) <= LIMIT for theirs in alike):
                self.found[place] = f"equals a value of the reference, {how}"
                return

    def _alike(self, mine: Fingerprint) -> list[Fingerprint]:
        """Values that may hold the same elements in some order."""
        values, square = self._by_size.get(mine.numel, []), mine.square_sum
        first = bisect_left(values, square * (1.0 - 4.0 * LIMIT), key=_square_sum)
        found = []
        for total, theirs in itertools.islice(values, first, None):
            if total > square * (1.0 + 4.0 * LIMIT):
                break
            if similar(theirs, mine, LIMIT):
                found.append(theirs)
        return found


def _square_sum(entry: tuple[float, Fingerprint]) -> float:
    return entry[0]


__all__ = ["CLOUD", "LIMIT", "TwinPass", "Twins", "run_twins"]
