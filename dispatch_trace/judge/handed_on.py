"""What one step hands on to another, where steps that repeat are judged all at once.

A value that another step made is a leaf where it is read (`align.repeated`). What is known of it there is
what is known of it where it was made: it is right, or wrong, and then with the error that it would have
without a defect. For the first of steps that stand for each other it is known before they are judged; the
others are taken to be handed the same, right or wrong, and that is checked at the end. The error without a
defect goes from step to step (`later`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch_trace.align.graph import Value
from dispatch_trace.align.pairs import Link, Pairing
from dispatch_trace.later import Later, Relay, SeveralNumbersError
from dispatch_trace.per_step import Together, each, is_finite, of_step
from dispatch_trace.schema import StoredRecord, StoredSlot

if TYPE_CHECKING:
    from dispatch_trace.judge.noise import NoisePass, State


class AstrayError(Exception):
    """Some steps do not take the way of the one that stands for them: what is found says nothing."""


class HandedOn:
    """Judges what steps of the target are handed by others."""

    def __init__(self, noise: NoisePass) -> None:
        self._noise = noise
        self._pairing = noise.pairing
        self._target = noise.pairing.target
        self._reader = noise.pairing.target.reader
        self._turns = list(reversed(self._reader.turns())) if self._reader.reads_across else []
        self._relays: dict[Together, Relay] = {}
        self._gone_on: set[Together] = set()
        self._is_settled = False
        self._makers: dict[Value, dict[int, list[tuple[Value, int]]]] = {}

    def come_to(self, record: StoredRecord) -> None:
        """Finds what steps before a record hand on; records come in order."""
        while self._turns and self._turns[-1][0] < record.seq:
            _, steps, position = self._turns.pop()
            if position:
                self._gone_on.add(steps)
                if steps in self._relays:
                    self._relays[steps].advance()

    def judge(self, record: StoredRecord, slot: StoredSlot, state: State) -> None:
        """Completes the state of a value that another step made.

        Args:
          record, slot: that reads it first.
          state: as far as it can be measured there.
        """
        handed = self._reader.handed(record, slot)
        source, places = min(handed.items(), key=lambda item: item[1][0].tolist())
        made = self._noise.states.get(source)
        state.explained = made is None or not _is_handed_wrong(made)  # `check`
        if made is not None and not state.explained:
            state.tainted = True
            state.noise = state.rho if state.rho is not None and is_finite(state.rho) else 1.0
            steps = self._reader.joined(record)
            if steps is None:
                state.clean = of_step(made.clean, int(places[0, 1]))
            else:
                state.clean = self._clean(steps, handed)

    def _clean(self, steps: Together, handed: Any) -> float:
        """What values would be off by without a defect, as they are handed to steps."""
        where = {
            reads: (source, made) for source, places in handed.items() for reads, made in places.tolist()
        }

        def found(position: int) -> float:
            source, made_at = where.get(position, (None, -1))
            state = None if source is None else self._noise.states.get(source)
            return 0.0 if state is None else float(of_step(state.clean, made_at))

        if self._is_settled:
            return each(np.array([found(at) for at in range(len(steps.astray))]), steps)
        if steps in self._gone_on:
            raise SeveralNumbersError("the steps have gone on")
        relay = self._relays.get(steps)
        if relay is None:
            relay = self._relays[steps] = Relay(len(steps.astray))
        number: Any = relay.handed(found(0), found)
        made: float = number
        return made

    def settle(self) -> None:
        """Once all values are judged: finds what is left, and which steps go another way because of it."""
        while self._turns:
            _, steps, position = self._turns.pop()
            if position and steps in self._relays:
                self._relays[steps].advance()
        self._is_settled = True
        steps_of = {relay: steps for steps, relay in self._relays.items()}
        if not steps_of:
            return
        for state in self._noise.states.values():
            for name in ("clean", "limit"):
                number = getattr(state, name)
                if type(number) is Later:
                    setattr(state, name, each(np.array(number.values), steps_of[number.relay]))
        for relay, steps in steps_of.items():
            for holds in relay.answers():
                steps.decide(holds)

    def check(self) -> None:
        """Loses steps that are handed something else than they were taken to be.

        Raises:
          AstrayError: not all steps that are judged at once go the same way.
        """
        if self._reader.reads_across:
            self._lose_mistaken()
        if self._reader.is_astray:
            raise AstrayError

    def _lose_mistaken(self) -> None:
        for value, state in self._noise.states.items():
            if state.suspicious and not state.tainted:  # wrong, and nothing that it was made of is
                self._reader.doubt(self._target.records[value[0]])
        ref = self._pairing.ref
        for value, links in list(self._pairing.links.items()):
            record, slot = self._target.records[value[0]], self._target.slot(value)
            sources = self._reader.sources(record, slot)
            if not sources:
                continue
            is_wrong = self._noise.state(value).wrong
            for source in sources:
                made = self._noise.state(source)
                fits = _is_handed_wrong(made) if is_wrong else _is_right(made)
                if not fits or any(
                    made.link is None
                    or made.link.ref not in ref.reader.sources(ref.records[link.ref[0]], ref.slot(link.ref))
                    or not (_is_plain(self._pairing, link) and _is_plain(self._pairing, made.link))
                    for link in links
                ):
                    self._reader.lose_readers(record, slot, source)

    def makers(self, value: Value, run: int) -> Sequence[tuple[Value, int]]:
        """What made a value that another step reads, where it is wrong, and in which run of steps it did.

        Args:
          run: of steps, in which it is read; -1 where its reader stands for itself.
        """
        found = self._makers.get(value)
        if found is None:
            found = self._makers[value] = self._makers_of(value)
        return found.get(run, ())

    def _makers_of(self, value: Value) -> dict[int, list[tuple[Value, int]]]:
        """`makers` in each run."""
        record, slot = self._target.records[value[0]], self._target.slot(value)
        found: dict[int, dict[tuple[Value, int], None]] = defaultdict(dict)
        if self._noise.state(value).wrong:
            for source, places in self._reader.handed(record, slot).items():
                maker = self._target.records[source[0]]
                if self._noise.state(source).suspicious:
                    for reads, made in places.tolist():
                        run = self._reader.run_of(record, reads)
                        found[run][source, self._reader.run_of(maker, made)] = None
        return {run: list(makers) for run, makers in found.items()}

    def runs(self, record: StoredRecord) -> Sequence[int]:
        """The runs of the steps that a record stands for; -1 where it stands for itself."""
        return range(self._reader.num_runs(record)) or (-1,)

    def run_in(self, value: Value, run: int) -> int:
        """The run of steps that a value is of which others, of one run, read within their step."""
        return run if self._reader.num_runs(self._target.records[value[0]]) else -1

    def lose_readers(self, value: Value) -> None:
        """Who reads what is to blame is looked at step by step."""
        if self._reader.reads_across and not self._reader.num_runs(self._target.records[value[0]]):
            for seq, _ in self._target.consumers.get(value, ()):
                self._reader.lose(self._target.records[seq])


def _is_handed_wrong(made: State) -> bool:
    return made.wrong and made.link is not None and not made.flags


def _is_right(made: State) -> bool:
    return bool(made.explained) and made.link is not None and not (made.flags or made.tainted)


def _is_plain(pairing: Pairing, link: Link) -> bool:
    """Whether a link compares its values as they were made, not views of them."""
    made = pairing.ref.slot(link.ref).content, pairing.target.slot(link.target).content
    return made == (link.ref_content, link.target_content)


__all__ = ["AstrayError", "HandedOn"]
