"""Which step of the target belongs to which of the reference: the one with its number."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from dispatch_trace.errors import ConfigError
from dispatch_trace.store.reader import RankReader


def chosen_steps(given: Any) -> frozenset[int] | None:
    """Checks the `steps` of an alignment: None (all), an int, a range or a collection of ints.

    Raises:
      ConfigError: anything else.
    """
    if given is None:
        return None
    numbers = [given] if isinstance(given, int) else given
    if not isinstance(numbers, Collection) or not all(isinstance(n, int) for n in numbers):
        raise ConfigError(f"steps={given!r}: expected a step number or a collection of them.")
    return frozenset(numbers)


def pair_models(ref: RankReader, target: RankReader) -> dict[str, str]:
    """Models of the reference to models of the target: by name, or the only one to the only one."""
    names = [sorted({step.model for step in reader.steps}) for reader in (ref, target)]
    if len(names[0]) == len(names[1]) == 1:
        return {names[0][0]: names[1][0]}
    return {name: name for name in names[0] if name in names[1]}


def unpaired_steps(
    ref: RankReader, target: RankReader, steps: Collection[int] | None
) -> tuple[list[int], list[int]]:
    """Step numbers that only the reference, and only the target, has."""
    numbers = [
        {s.step for s in r.steps if s.step >= 0 and (steps is None or s.step in steps)} for r in (ref, target)
    ]
    return sorted(numbers[0] - numbers[1]), sorted(numbers[1] - numbers[0])
