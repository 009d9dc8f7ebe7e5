"""Numbers of several steps of which each follows from one of the step before.

Steps that repeat are judged all at once (`per_step`), but for what a step takes over from the one before: the
error that a wrong value would have without a defect, say, is made of that of the values it was computed from,
back to the fault. The rules run once, on such numbers: they are known for the first step, and how they come
about is noted. Then it is done again for one step after the other, by the very functions that work on plain
numbers. A comparison answers for the first step; whether it would have been another in the others is asked
at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


class SeveralNumbersError(Exception):
    """A rule looks something up by a number, or counts up to it, where there are several, or asks for one
    that is found only later."""


class Relay:
    """The numbers of some steps that are found one step after the other."""

    def __init__(self, num: int) -> None:
        """
        Args:
          num: of steps.
        """
        self.num = num
        self._finders: list[Callable[[int], None]] = []  # of each number, in order, for a step by its place
        self._questions: list[tuple[Callable[[Any, Any], bool], Sequence[Any], Sequence[Any]]] = []
        self._known: dict[Any, tuple[Later, Any]] = {}
        self._num_done = 1

    def handed(self, first: float, found: Callable[[int], float]) -> Later:
        """A number that another step hands over.

        Args:
          first: that of the first step.
          found: finds that of each further step, when its turn has come.
        """
        return self._noted(found, [range(self.num)], first)

    def made(self, function: Callable[..., float], *operands: Any) -> Later:
        """What a function makes of numbers, in each step.

        Args:
          function: of plain numbers.
        """
        key = function, *(_identity(operand) for operand in operands)
        known = self._known.get(key)
        if known is None:
            columns = [self._column(operand) for operand in operands]
            made = self._noted(function, columns, function(*(column[0] for column in columns)))
            known = self._known[key] = made, operands  # kept, so that no other takes their identity
        return known[0]

    def asked(self, test: Callable[[Any, Any], bool], first: Any, second: Any) -> bool:
        """What a comparison of two numbers gives in the first step."""
        columns = self._column(first), self._column(second)
        self._questions.append((test, *columns))
        return bool(test(columns[0][0], columns[1][0]))

    def advance(self) -> None:
        """Finds all numbers of the next step."""
        at = self._num_done
        for find in self._finders:
            find(at)
        self._num_done += 1

    def answers(self) -> Iterator[npt.NDArray[np.bool_]]:
        """[num] of each comparison, in order, what it gives in all steps; once all numbers are found."""
        for test, first, second in self._questions:
            yield np.array(list(map(test, first, second)), dtype=bool)

    def _column(self, number: Any) -> Sequence[Any]:
        if isinstance(number, Later):
            return number.values
        values = getattr(number, "values", None)  # of a `PerStep`
        return [number] * self.num if values is None else np.broadcast_to(values, self.num).tolist()

    def _noted(self, function: Callable[..., float], columns: list[Sequence[Any]], first: float) -> Later:
        if self._num_done > 1:
            raise SeveralNumbersError("the steps have gone on")
        number = Later(self, first)
        self._finders.append(_finder(number.values, function, columns))
        return number


class Later:
    """One number for each of the steps of a `Relay`; none is negative.

    Attributes:
      values: of the steps that had their turn.
    """

    __slots__ = ("relay", "values")
    __array_ufunc__ = None  # NumPy leaves arithmetic with it to this class

    def __init__(self, relay: Relay, first: float) -> None:
        self.relay = relay
        self.values: list[float] = [first]

    def __mul__(self, other: Any) -> Later:
        if type(other) is float and other == 1.0:
            return self
        return self.relay.made(_product, self, other)

    __rmul__ = __mul__

    def __lt__(self, other: Any) -> bool:
        return self.relay.asked(_less, self, other)

    def __le__(self, other: Any) -> bool:
        return self.relay.asked(_at_most, self, other)

    def __gt__(self, other: Any) -> bool:
        return self.relay.asked(_less, other, self)

    def __ge__(self, other: Any) -> bool:
        return self.relay.asked(_at_most, other, self)

    def _refuse(self, *_: Any) -> Any:
        raise SeveralNumbersError("found only later")

    __add__ = __radd__ = __sub__ = __rsub__ = __truediv__ = __rtruediv__ = __neg__ = __abs__ = _refuse
    __eq__ = __ne__ = __bool__ = __float__ = __index__ = __format__ = _refuse
    __hash__ = None  # type: ignore[assignment]


def _finder(
    values: list[float], function: Callable[..., float], columns: list[Sequence[Any]]
) -> Callable[[int], None]:
    """What appends to values what a function makes of the columns at a place: it runs for all steps, so that
    what nearly always is the case costs no more than it must."""
    append = values.append
    if len(columns) == 2:
        first, second = columns
        if function is _product:
            return lambda at: append(first[at] * second[at])
        return lambda at: append(function(first[at], second[at]))
    return lambda at: append(function(*[column[at] for column in columns]))


def _identity(number: Any) -> Any:
    return number if isinstance(number, (int, float)) else id(number)


def _product(first: float, second: float) -> float:
    return first * second


def _less(first: float, second: float) -> bool:
    return first < second


def _at_most(first: float, second: float) -> bool:
    return first <= second


__all__ = ["Later", "Relay", "SeveralNumbersError"]
