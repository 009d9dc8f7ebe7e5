"""The rows of an alignment in which steps repeat, and what is asked of all rows without making each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, overload

import numpy as np
import numpy.typing as npt

from dispatch_trace.align.pairs import Pair
from dispatch_trace.per_step import of_step

if TYPE_CHECKING:
    from dispatch_trace.align.repeated import FoldedReader

_AT_ONCE = 1024  # rows that are made in one go


class FoldedPairs(Sequence[Pair]):
    """Rows, each of which is made when it is asked for, from that of the step that stands for its own."""

    def __init__(
        self,
        ref: FoldedReader,
        target: FoldedReader,
        pairs: Sequence[Pair],
        where: npt.NDArray[np.int32],
    ) -> None:
        """
        Args:
          ref, target: the views that the rows are of.
          pairs: rows of the first steps.
          where: [num rows, 2], of each row which of these it is, and in which step.
        """
        self._ref = ref
        self._target = target
        self._pairs = pairs
        self._where = where

    def __len__(self) -> int:
        return len(self._where)

    @overload
    def __getitem__(self, at: int) -> Pair: ...
    @overload
    def __getitem__(self, at: slice) -> list[Pair]: ...
    def __getitem__(self, at: int | slice) -> Pair | list[Pair]:
        if isinstance(at, slice):
            return [self._row(*place) for place in self._where[at].tolist()]
        return self._row(*self._where[at].tolist())

    def __iter__(self) -> Iterator[Pair]:
        for start in range(0, len(self), _AT_ONCE):
            yield from self[start : start + _AT_ONCE]

    def _row(self, number: int, position: int) -> Pair:
        pair = self._pairs[number]
        return replace(
            pair,
            ref=None if pair.ref is None else self._ref.in_step(pair.ref, position),
            target=None if pair.target is None else self._target.in_step(pair.target, position),
            error=of_step(pair.error, position),
            band=of_step(pair.band, position),
            notes=[of_step(note, position) for note in pair.notes],
        )

    def kept(self, test: Callable[[Pair], bool]) -> FoldedPairs:
        """As `kept`."""
        passed = np.array([test(pair) for pair in self._pairs], dtype=bool)
        return FoldedPairs(self._ref, self._target, self._pairs, self._where[passed[self._where[:, 0]]])

    def row_with(self, seq: int, *, of_ref: bool) -> int | None:
        """As `row_with`."""
        reader = self._ref if of_ref else self._target
        for number, pair in enumerate(self._pairs):
            record = pair.ref if of_ref else pair.target
            positions = np.empty(0) if record is None else np.flatnonzero(reader.seqs(record) == seq)
            if positions.size:
                return int(np.flatnonzero((self._where == (number, positions[0])).all(1))[0])
        return None

    def shares(self) -> list[float]:
        """As `shares_of_band`."""
        return [
            _share(*(of_step(n, at) for n in (self._pairs[i].error, self._pairs[i].band)))
            for i, at in self._where
        ]


def kept(pairs: Sequence[Pair], test: Callable[[Pair], bool]) -> Sequence[Pair]:
    """The rows that pass a test; of steps that repeat, as the first of them does.

    Args:
      test: asks for nothing but what is the same in all such steps: not for numbers of records, nor figures.
    """
    return pairs.kept(test) if isinstance(pairs, FoldedPairs) else [pair for pair in pairs if test(pair)]


def row_with(pairs: Sequence[Pair], seq: int, *, of_ref: bool = False) -> int | None:
    """The place of the row that holds a record of the target, or of the reference; None where none does."""
    if isinstance(pairs, FoldedPairs):
        return pairs.row_with(seq, of_ref=of_ref)
    for row, pair in enumerate(pairs):
        record = pair.ref if of_ref else pair.target
        if record is not None and record.seq == seq:
            return row
    return None


def shares_of_band(pairs: Sequence[Pair]) -> list[float]:
    """Of each row how much of its noise band the error takes; 0 where one of both is not known or 0."""
    if isinstance(pairs, FoldedPairs):
        return pairs.shares()
    return [_share(pair.error, pair.band) for pair in pairs]


def _share(error: float | None, band: float | None) -> float:
    return error / band if error and band else 0.0


__all__ = ["FoldedPairs", "kept", "row_with", "shares_of_band"]
