"""The order of module calls, as far as a dump tells: which ran inside which, and how often."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence


def opened_by_path(sites: Sequence[tuple[Hashable, str]]) -> list[int]:
    """Where each call was entered, of calls in the order in which they returned.

    A module's call takes in those of modules beneath its path that returned before it and belong to none yet.

    Args:
      sites: (what keeps runs apart: step and model, path of the module) of each call.
    Returns: for each the place of the first call inside it, its own where there is none.
    """
    opened: list[int] = []
    free: list[int] = []  # calls that nothing has taken in yet
    for place, (run, path) in enumerate(sites):
        first = place
        while free and sites[free[-1]][0] == run and is_beneath(sites[free[-1]][1], path):
            first = opened[free.pop()]
        opened.append(first)
        free.append(place)
    return opened


def in_path_order(paths: Iterable[str]) -> list[tuple[str, int]]:
    """(path, place of the first call inside it) as if modules had run by their paths, inner ones first.

    For dumps that hold no order at all.
    """
    found: list[tuple[str, int]] = []
    open_calls: list[tuple[str, int]] = []
    for path in sorted(paths, key=natural):
        while open_calls and not is_beneath(path, open_calls[-1][0]):
            found.append(open_calls.pop())
        open_calls.append((path, len(found)))
    return found + open_calls[::-1]


def natural(path: str) -> tuple[tuple[tuple[int, int, str], ...], ...]:
    """Sorts numbers as numbers, and a path before those beneath it."""
    return tuple(
        tuple(
            (1, int(part), part) if part.isdecimal() else (0, 0, part) for part in re.split(r"(\d+)", piece)
        )
        for piece in (path.split(".") if path else ())
    )


def is_beneath(path: str, above: str) -> bool:
    """Whether a module stands inside another one, by their paths."""
    return path != above and (not above or path.startswith(f"{above}."))


class CallCounter:
    """Numbers the calls of modules: the n-th return of one site is call n."""

    def __init__(self) -> None:
        self._counts: Counter[Hashable] = Counter()

    def next(self, site: Hashable) -> int:
        number = self._counts[site]
        self._counts[site] += 1
        return number
