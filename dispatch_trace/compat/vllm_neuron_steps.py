"""In which order the steps of a vLLM-Neuron dump ran.

Names tell it within one phase and size only: the counter runs for each. Between those, a request's
positions grow, so steps that share a request are in order too. What is still open is taken from file times,
which a copy may have changed; how often that was, is counted.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from dispatch_trace.compat.vllm_neuron_names import Phase

_Place: TypeAlias = tuple[int, bool, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDirectory:
    """One step of a dump.

    Attributes:
      path: its directory.
      phase, size, counter: from its name.
      meta: `req_ids`, `positions` and `dp_rank` as far as they are known.
      time_ns: when it was written.
    """

    path: Path
    phase: Phase
    size: int
    counter: int
    meta: Mapping[str, Any] = field(default_factory=dict)
    time_ns: int = 0

    @property
    def place(self) -> _Place:
        """Where it stands when nothing but file times tells."""
        return (self.time_ns, self.phase != "prefill", self.size, self.counter)


@dataclass(frozen=True, slots=True)
class Order:
    """Steps in the order of the run.

    Attributes:
      steps: all of them.
      num_by_time: how many have their place from file times alone.
      contradictory: counters and positions cannot both be right (a request id used twice, say).
    """

    steps: list[StepDirectory]
    num_by_time: int
    contradictory: bool


def in_order(steps: Iterable[StepDirectory]) -> Order:
    """Puts steps in order."""
    ordered = sorted(steps, key=lambda step: (step.place, step.path.name))
    by_counter, by_request = _counter_edges(ordered), _request_edges(ordered)
    found, open_places = _sorted(ordered, [*by_counter, *by_request])
    if len(found) == len(ordered):
        return Order(found, open_places, contradictory=False)
    found, open_places = _sorted(ordered, by_counter)
    return Order(found, open_places, contradictory=True)


def _sorted(
    steps: Sequence[StepDirectory], edges: Iterable[tuple[int, int]]
) -> tuple[list[StepDirectory], int]:
    """A topological order, the earliest first; how often more than one step could have come next."""
    later: dict[int, set[int]] = defaultdict(set)
    missing = [0] * len(steps)
    for before, after in set(edges):
        later[before].add(after)
        missing[after] += 1
    ready = [index for index, count in enumerate(missing) if not count]  # steps are sorted by place
    found, open_places = [], 0
    while ready:
        open_places += len(ready) > 1
        index = heapq.heappop(ready)
        found.append(steps[index])
        for after in later[index]:
            missing[after] -= 1
            if not missing[after]:
                heapq.heappush(ready, after)
    return found, open_places


def _counter_edges(steps: Sequence[StepDirectory]) -> list[tuple[int, int]]:
    series: dict[tuple[str, int], list[int]] = defaultdict(list)
    for index, step in enumerate(steps):
        series[(step.phase, step.size)].append(index)
    edges = []
    for indices in series.values():
        indices.sort(key=lambda index: steps[index].counter)
        edges += list(itertools.pairwise(indices))
    return edges


def _request_edges(steps: Sequence[StepDirectory]) -> list[tuple[int, int]]:
    seen: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, step in enumerate(steps):
        for request, position in first_positions(step).items():
            seen[request][position].append(index)
    edges = []
    for places in seen.values():
        groups = [places[position] for position in sorted(places)]
        for before, after in itertools.pairwise(groups):
            edges += [(a, b) for a in before for b in after]
    return edges


def first_positions(step: StepDirectory) -> dict[str, int]:
    """The position of each request's first token in a step.

    A decode step has one position a request; in a prefill step those of a request increase, and
    those of the next begin anew. Padding repeats the last position.
    """
    requests = step.meta.get("req_ids") or []
    positions = step.meta.get("positions") or []
    if positions and isinstance(positions[0], list):
        positions = positions[0]  # several position ids a token (image, height, width): the first will do
    if step.phase == "decode":
        firsts = positions
    else:
        firsts = [
            position
            for index, position in enumerate(positions)
            if index == 0 or position < positions[index - 1]
        ]
    return dict(zip(requests, firsts, strict=False))
