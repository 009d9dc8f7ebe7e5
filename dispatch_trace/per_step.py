"""One number for each of several steps, which rules written for one number take as they are.

Steps that repeat (`align.repeated`) are judged all at once: where a rule has a number of a step, it gets a
`PerStep`. Arithmetic runs on all steps. A comparison cannot: it answers for the first step, and the steps for
which it would have been another are noted as *astray*; whoever started it judges those by themselves. So one
set of rules serves both, and no step gets a result that its own numbers would not have given: whatever is not
known here (`float`, formatting, `math`) sends all but the first astray.

`hypot`, `greatest` and the like take plain numbers and `PerStep` alike, with the same bits; and numbers that
are found one step after the other (`later`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import xxhash

from dispatch_trace.later import Later, SeveralNumbersError

Floats: TypeAlias = npt.NDArray[np.float64]

# Between these, squares are neither too large to add up nor so small that they lose digits.
_LEAST_SQUARE, _MOST_SQUARE = 1e-290, 1e290


class Together:
    """Steps whose numbers are taken together.

    Attributes:
      astray: [num] which of them would have taken another way; never the first.
      parted_at: [num] the number of the question at which each went astray, -1 where it did not.
    """

    def __init__(self, num: int) -> None:
        self.astray: npt.NDArray[np.bool_] = np.zeros(num, dtype=bool)
        self.parted_at = np.full(num, -1, dtype=np.int64)
        self._num_questions = 0

    def decide(self, holds: npt.NDArray[np.bool_]) -> bool:
        """What holds for the first step; the others for which it does not are astray."""
        first = bool(holds[0])
        self._part(holds != first)
        return first

    def lose(self) -> None:
        """All but the first are astray."""
        others = np.ones(len(self.astray), dtype=bool)
        others[0] = False
        self._part(others)

    def leave(self, positions: Sequence[int] | npt.NDArray[np.int64]) -> None:
        """Some are astray; all others, where the first is one of them."""
        others = np.zeros(len(self.astray), dtype=bool)
        others[positions] = True
        if others[0]:
            self.lose()
        else:
            self._part(others)

    def _part(self, others: npt.NDArray[np.bool_]) -> None:
        self._num_questions += 1
        if others.any():
            self.parted_at[others & ~self.astray] = self._num_questions
            self.astray |= others


class PerStep:
    """One number for each of the steps of a `Together`; its values are never changed.

    Arithmetic overflows and divides by zero as floats of NumPy do: who judges with it silences the warnings.
    """

    __slots__ = ("together", "values")

    def __init__(self, values: Floats, together: Together) -> None:
        self.values = values
        self.together = together

    def _made(self, values: Floats) -> PerStep:
        return PerStep(values, self.together)

    def __add__(self, other: Any) -> PerStep:
        return self._made(self.values + _values(other))

    def __sub__(self, other: Any) -> PerStep:
        return self._made(self.values - _values(other))

    def __rsub__(self, other: Any) -> PerStep:
        return self._made(_values(other) - self.values)

    def __mul__(self, other: Any) -> PerStep:
        if type(other) is Later:
            return NotImplemented
        if type(other) is float and other == 1.0:
            return self
        return self._made(self.values * _values(other))

    def __truediv__(self, other: Any) -> PerStep:
        return self._made(self.values / _values(other))

    def __floordiv__(self, other: Any) -> PerStep:
        return self._made(self.values // _values(other))

    def __rtruediv__(self, other: Any) -> PerStep:
        return self._made(_values(other) / self.values)

    def __neg__(self) -> PerStep:
        return self._made(-self.values)

    def __abs__(self) -> PerStep:
        return self._made(np.abs(self.values))

    __radd__ = __add__
    __rmul__ = __mul__

    def __bool__(self) -> bool:
        return self.together.decide(self.values != 0)

    def __eq__(self, other: object) -> bool:
        return self.together.decide(self.values == _values(other))

    def __ne__(self, other: object) -> bool:
        return self.together.decide(self.values != _values(other))

    def __lt__(self, other: Any) -> bool:
        if type(other) is Later:
            return NotImplemented
        return self.together.decide(self.values < _values(other))

    def __le__(self, other: Any) -> bool:
        if type(other) is Later:
            return NotImplemented
        return self.together.decide(self.values <= _values(other))

    def __gt__(self, other: Any) -> bool:
        if type(other) is Later:
            return NotImplemented
        return self.together.decide(self.values > _values(other))

    def __ge__(self, other: Any) -> bool:
        if type(other) is Later:
            return NotImplemented
        return self.together.decide(self.values >= _values(other))

    def __hash__(self) -> int:
        raise SeveralNumbersError("numbers of several steps are no key to look something up by")

    def __index__(self) -> int:
        raise SeveralNumbersError("numbers of several steps are not counted up to")

    def __float__(self) -> float:
        self.together.lose()
        return float(self.values[0])

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

    def __repr__(self) -> str:
        # Told apart by all numbers: arguments of ops are compared as texts.
        digest = xxhash.xxh3_64_hexdigest(np.ascontiguousarray(self.values).tobytes())
        return f"PerStep({self.values[0]!r} to {self.values[-1]!r}, {len(self.values)} numbers, {digest})"


class TextPerStep:
    """One text, or None, for each of the steps of a `Together`: only told apart by `of_step`."""

    __slots__ = ("values",)

    def __init__(self, values: Sequence[str | None]) -> None:
        self.values = values

    def __repr__(self) -> str:
        return f"TextPerStep({self.values!r})"


def texts(values: Sequence[str | None]) -> str | None:
    """Texts of steps, for what takes one: a plain one where all are the same."""
    if len(set(values)) == 1:
        return values[0]
    text: Any = TextPerStep(values)
    made: str = text
    return made


def each(values: Floats, together: Together) -> float:
    """Numbers [num] of steps, for what takes a float: which says `float` takes a `PerStep` as well."""
    number: Any = PerStep(values, together)
    made: float = number
    return made


def _values(number: Any) -> Any:
    return number.values if isinstance(number, PerStep) else number


def of_step(number: Any, position: int) -> Any:
    """The number of one step, a plain one, or its text; what is neither is that of every step."""
    if isinstance(number, PerStep):
        return number.values[position].item()
    if type(number) is Later:
        return number.values[position]
    return number.values[position] if isinstance(number, TextPerStep) else number


def greatest(*numbers: float) -> float:
    """The largest of some numbers, step by step."""
    return _extreme(numbers, np.maximum, max)


def smallest(*numbers: float) -> float:
    """The smallest of some numbers, step by step."""
    return _extreme(numbers, np.minimum, min)


def _extreme(numbers: tuple[Any, ...], extreme: Any, plain: Any) -> float:
    kinds = [*map(type, numbers)]
    if Later in kinds:
        return (
            _noted(plain, numbers)
            if plain is max
            else cast(float, _later_of(numbers).relay.made(plain, *numbers))
        )
    if PerStep not in kinds:
        return cast(float, plain(numbers))
    found = _values(numbers[0])
    for number in numbers[1:]:
        found = extreme(found, _values(number))
    return each(found, _together(numbers))


def _noted(function: Any, numbers: tuple[Any, ...]) -> float:
    """What a function that no zero changes makes of numbers, none negative, some of which are found later."""
    counting = [number for number in numbers if type(number) not in (int, float) or number != 0]
    later = _later_of(numbers)
    return cast(float, later if len(counting) == 1 else later.relay.made(function, *counting))


def _later_of(numbers: tuple[Any, ...]) -> Later:
    return next(number for number in numbers if type(number) is Later)


def _together(numbers: tuple[Any, ...]) -> Together:
    return next(n.together for n in numbers if isinstance(n, PerStep))


def root(number: Any) -> float:
    """The square root."""
    if isinstance(number, PerStep):
        return each(np.sqrt(number.values), number.together)
    return math.sqrt(number)


def hypot(*numbers: Any) -> float:
    """The root of the sum of squares of numbers, none negative, without overflow on the way."""
    kinds = [*map(type, numbers)]
    if Later in kinds:
        return _noted(_plain_hypot, numbers)
    if PerStep not in kinds:
        return _plain_hypot(*numbers)
    together = _together(numbers)
    counting = [n for n in numbers if type(n) is PerStep or n != 0]  # zeros add nothing
    if len(counting) == 1:
        only: float = counting[0]
        return only
    values = [*map(_values, counting)]
    squares = values[0] * values[0]
    for value in values[1:]:
        squares = squares + value * value
    if squares.min() >= _LEAST_SQUARE and squares.max() <= _MOST_SQUARE:
        return each(np.sqrt(squares), together)
    largest = values[0]
    for value in values[1:]:
        largest = np.maximum(largest, value)
    odd = (largest == 0.0) | ~np.isfinite(largest)
    scale = np.where(odd, 1.0, largest)
    sums = sum((value / scale) * (value / scale) for value in values)
    found = np.where(odd, largest, scale * np.sqrt(sums))
    is_fine = (squares >= _LEAST_SQUARE) & (squares <= _MOST_SQUARE)
    return each(np.where(is_fine, np.sqrt(squares), found), together)


def _plain_hypot(*numbers: float) -> float:
    """`hypot` of plain numbers.

    Not `math.hypot`: it rounds otherwise than NumPy, and both kinds of numbers have to come out alike.
    """
    total = 0.0
    for number in numbers:
        total += number * number
    if _LEAST_SQUARE <= total <= _MOST_SQUARE:
        return math.sqrt(total)
    top: float = max(map(abs, numbers))
    if not 0.0 < top < math.inf:
        return top
    total = 0.0
    for number in numbers:
        part = number / top
        total += part * part
    return top * math.sqrt(total)


def or_zero(number: float | None) -> float:
    """A number, 0 where it is not known, without asking whether it is 0: steps may answer differently."""
    return 0.0 if number is None else number


def whole(number: Any) -> int:
    """A count as an integer; 0 where it is not known."""
    if isinstance(number, PerStep):
        counts: Any = number._made(number.values.astype(np.int64))
        return cast(int, counts)
    return int(number or 0)


def total(number: Any, count: int) -> int:
    """The sum of a count over steps: so many times a plain one."""
    return int(number.values.sum()) if isinstance(number, PerStep) else count * int(number)


def per_step_of(*numbers: Any) -> Together | None:
    """The steps that some of the numbers stand for; None where all are plain."""
    return next((n.together for n in numbers if isinstance(n, PerStep)), None)


def is_smaller(first: Any, second: Any, steps: Together) -> npt.NDArray[np.bool_]:
    """[num steps], where the first number is smaller than the second."""
    return np.broadcast_to(_values(first) < _values(second), steps.astray.shape)


def chosen(where: npt.NDArray[np.bool_], first: Any, second: Any, steps: Together) -> float:
    """The first number in some steps, the second in the others."""
    return each(np.where(where, _values(first), _values(second)), steps)


def is_finite(number: Any) -> bool:
    """Whether a number is finite."""
    if isinstance(number, PerStep):
        return number.together.decide(np.isfinite(number.values))
    return math.isfinite(number)


__all__ = [
    "PerStep",
    "SeveralNumbersError",
    "TextPerStep",
    "Together",
    "chosen",
    "each",
    "greatest",
    "hypot",
    "is_finite",
    "is_smaller",
    "of_step",
    "or_zero",
    "per_step_of",
    "root",
    "smallest",
    "texts",
    "total",
    "whole",
]
