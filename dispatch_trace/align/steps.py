"""Which step of the target belongs to which of the reference.

Where both traces carry request ids or positions (`positions`), the step that computes a token of a request
pairs with the step that computes it in the other trace. One batched step of the target may so pair with
several of the reference; pairs are then sorted into *rounds*, in each of which a step has one partner at
most. Steps that say nothing pair by phase and order, and where no step says anything, by number.

A request is compared only as far as both runs were given the same tokens: where greedy sampling picked
another one (a tie, not a fault), what follows is another text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dispatch_trace.align.positions import Cell, StepRows, rows_of
from dispatch_trace.align.requests import (
    StepKey,
    differ,
    earlier_place,
    left_padding,
    lives_of,
    match_ids,
    prompts_of,
    read_tokens,
    renamed,
    unnamed,
)
from dispatch_trace.errors import ConfigError
from dispatch_trace.schema import StepInfo
from dispatch_trace.store.reader import RankReader


@dataclass(slots=True, kw_only=True)
class StepPair:
    """A step of the reference, one of the target, and what of them belongs together.

    Attributes:
      ref, target: (model, number).
      ref_rows, target_rows: their tables; None where they pair as a whole.
      cells: (the reference's, the target's) places that hold one token.
      offsets: by request, place minus position of its tokens in a table padded on the left:
        (the reference's, the target's).
    """

    ref: StepKey
    target: StepKey
    ref_rows: StepRows | None = None
    target_rows: StepRows | None = None
    cells: list[tuple[Cell, Cell]] = field(default_factory=list)
    offsets: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """Whether both steps hold the same in the same places."""
        ours, theirs = self.ref_rows, self.target_rows
        if ours is None or theirs is None:
            return True
        same = (ours.batch, ours.tokens) == (theirs.batch, theirs.tokens)
        whole = len(self.cells) == len(ours.cells) == len(theirs.cells)
        return same and whole and all((a.row, a.place) == (b.row, b.place) for a, b in self.cells)


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """How the steps of two traces pair.

    Attributes:
      rounds: step pairs; within a round no step occurs twice.
      ref_only, target_only: steps without a partner.
      left_out: steps that no one compares by rule (behind a tie, or not asked for), by side.
      notices: what a reader should know of it.
    """

    rounds: list[list[StepPair]] = field(default_factory=list)
    ref_only: list[StepKey] = field(default_factory=list)
    target_only: list[StepKey] = field(default_factory=list)
    left_out: tuple[set[StepKey], set[StepKey]] = field(default_factory=lambda: (set(), set()))
    notices: list[str] = field(default_factory=list)


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
    # A program that calls no module has no steps, and its records are of no model.
    names = [sorted({step.model for step in reader.steps} or {""}) for reader in (ref, target)]
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


def pair_steps(
    ref: RankReader, target: RankReader, models: Mapping[str, str], steps: Collection[int] | None = None
) -> StepPlan | None:
    """Pairs steps by request and position.

    Args:
      models: models of the reference to models of the target.
      steps: only these numbers of the target's.
    Returns: None where no step of one of the traces says anything, or where pairing by number says the same
      and no tensor has to be cut.
    """
    plan = StepPlan()
    described = phased = False
    units: list[StepPair] = []
    for ref_model, target_model in models.items():
        found = _ModelSteps(ref, target, ref_model, target_model)
        described = described or found.described
        phased = phased or found.phased
        units += found.pair(plan)
    if not described and not phased:
        return None
    plain = all(unit.is_plain and unit.ref[1] == unit.target[1] for unit in units)
    if plain and not (plan.ref_only or plan.target_only or plan.left_out[0] or plan.left_out[1]):
        return None
    apart = (plan.ref_only, models.keys(), ref), (plan.target_only, models.values(), target)
    for only, names, reader in apart:
        only += [(s.model, s.step) for s in reader.steps if s.step >= 0 and s.model not in names]
    if steps is not None:
        dropped = [u for u in units if u.target[1] not in steps]
        units = [u for u in units if u.target[1] in steps]
        kept = ({u.ref for u in units}, {u.target for u in units})
        for unit in dropped:
            for side, key in enumerate((unit.ref, unit.target)):
                if key not in kept[side]:
                    plan.left_out[side].add(key)
        plan.left_out[1].update(k for k in plan.target_only if k[1] not in steps)
        plan.target_only = [k for k in plan.target_only if k[1] in steps]
        plan.left_out[0].update(plan.ref_only)
        plan.ref_only = []
    plan.rounds = _rounds(units)
    most = max((len({u.ref for u in group}) for group in _by_target(units).values()), default=1)
    several = f", up to {most} steps of the reference to one of the target" if most > 1 else ""
    by = "by request and position" if described else "by phase and order"
    plan.notices.insert(0, f"steps were paired {by}: {len(units)} pairs{several}")
    return plan


def _by_target(units: Iterable[StepPair]) -> dict[StepKey, list[StepPair]]:
    found: dict[StepKey, list[StepPair]] = defaultdict(list)
    for unit in units:
        found[unit.target].append(unit)
    return found


class _ModelSteps:
    """The steps of one model in both traces."""

    def __init__(self, ref: RankReader, target: RankReader, ref_model: str, target_model: str) -> None:
        self.steps = [
            [s for s in reader.steps if s.model == model and s.step >= 0]
            for reader, model in ((ref, ref_model), (target, target_model))
        ]
        self.rows: list[dict[StepKey, StepRows]] = [{}, {}]
        self.problems: list[str] = []
        self._readers = (ref, target)
        for side, name in ((0, "reference"), (1, "target")):
            for step in self.steps[side]:
                found = rows_of(step)
                if isinstance(found, str):
                    self.problems.append(f"step {step.step} of the {name}: {found}; it pairs by order")
                elif found is not None:
                    self.rows[side][(step.model, step.step)] = found
        self.described = bool(self.rows[0]) and bool(self.rows[1])
        phases = [{s.step: s.meta.get("phase") for s in steps} for steps in self.steps]
        self.phased = all(p is not None for side in phases for p in side.values()) and phases[0] != phases[1]

    def pair(self, plan: StepPlan) -> list[StepPair]:
        """Pairs of steps; what has no partner, and what is left out, goes to the plan."""
        plan.notices += self.problems
        units = self._by_cells(plan) if self.described else {}
        rest = [
            [s for s in self.steps[side] if not self.described or (s.model, s.step) not in self.rows[side]]
            for side in (0, 1)
        ]
        whole, only = _by_order(*rest)
        plan.ref_only += only[0]
        plan.target_only += only[1]
        return [*units.values(), *whole]

    def _by_cells(self, plan: StepPlan) -> dict[tuple[StepKey, StepKey], StepPair]:
        for side in (0, 1):
            tokens = read_tokens(self._readers[side], self.steps[side], self.rows[side])
            self.rows[side].update(tokens)
        rows = self._common_names(plan)
        lives = [lives_of(rows[side]) for side in (0, 1)]
        used: tuple[set[StepKey], set[StepKey]] = (set(), set())
        behind: tuple[set[StepKey], set[StepKey]] = (set(), set())
        units: dict[tuple[StepKey, StepKey], StepPair] = {}
        lonely = 0
        for life, ours in lives[1].items():
            theirs = lives[0].get(life, {})
            # Another prompt is another input, to be found as such; only what was sampled may differ by a tie.
            first = next(iter(theirs.values())).step if theirs else None
            tied = False
            for position in sorted(ours):
                b = ours[position]
                a = theirs.get(position) or earlier_place(lives[0], life, position)
                if a is None:
                    if tied:
                        behind[1].add(b.step)
                    lonely += not tied
                    continue
                if not tied and a.step != first and differ(a.cell, b.cell):
                    tied = True
                    plan.notices.append(
                        f"request {life[0]!r} is compared up to position {position - 1}: there the runs go "
                        f"on with tokens {a.cell.token} and {b.cell.token} (a tie, or an effect of what is "
                        "found before it)"
                    )
                if tied:
                    behind[0].add(a.step)
                    behind[1].add(b.step)
                    continue
                key = (a.step, b.step)
                unit = units.get(key)
                if unit is None:
                    unit = units[key] = StepPair(
                        ref=a.step,
                        target=b.step,
                        ref_rows=rows[0][a.step],
                        target_rows=rows[1][b.step],
                    )
                unit.cells.append((a.cell, b.cell))
                unit.offsets[life[0]] = (left_padding(rows[0], theirs), left_padding(rows[1], ours))
                used[0].add(a.step)
                used[1].add(b.step)
            if tied:
                behind[0].update(p.step for q, p in theirs.items() if q > max(ours))
        for side, lost in ((0, plan.ref_only), (1, plan.target_only)):
            behind[side].difference_update(used[side])
            plan.left_out[side].update(behind[side])
            lost += [step for step in rows[side] if step not in used[side] and step not in behind[side]]
        if lonely:
            plan.notices.append(f"{lonely} tokens of the target have no counterpart in the reference")
        return units

    def _common_names(self, plan: StepPlan) -> list[dict[StepKey, StepRows]]:
        """The rows of both sides with request ids that mean the same: those of the reference."""
        rows = [dict(self.rows[0]), dict(self.rows[1])]
        named = [all(r.named for r in side.values()) for side in rows]
        if not all(named):
            return [{k: unnamed(r) for k, r in side.items()} for side in rows]
        prompts = [prompts_of(side) for side in rows]
        if prompts[0] and len(prompts[0]) == len(prompts[1]) and not set(prompts[0]) & set(prompts[1]):
            same, how = match_ids(*prompts)
            rows[1] = {k: renamed(r, same) for k, r in rows[1].items()}
            plan.notices.append(f"no request id occurs in both traces: requests pair {how}")
        return rows


def _by_order(
    ref: list[StepInfo], target: list[StepInfo]
) -> tuple[list[StepPair], tuple[list[StepKey], list[StepKey]]]:
    """The n-th step of a phase with the n-th; where not every step has a phase, number with number."""
    phased = all(s.meta.get("phase") is not None for s in (*ref, *target))
    keyed: list[dict[Any, StepKey]] = []
    for steps in (ref, target):
        counts: dict[Any, int] = defaultdict(int)
        names: dict[Any, StepKey] = {}
        for step in steps:
            phase = step.meta.get("phase") if phased else None
            names[(phase, counts[phase]) if phased else step.step] = (step.model, step.step)
            counts[phase] += 1
        keyed.append(names)
    pairs = [StepPair(ref=key, target=keyed[1][name]) for name, key in keyed[0].items() if name in keyed[1]]
    return pairs, (
        [key for name, key in keyed[0].items() if name not in keyed[1]],
        [key for name, key in keyed[1].items() if name not in keyed[0]],
    )


def _rounds(units: list[StepPair]) -> list[list[StepPair]]:
    """Sorts pairs into rounds in which no step has two partners; the pairs of a request stay together."""
    if len({u.ref for u in units}) == len({u.target for u in units}) == len(units):
        return [units] if units else []
    by_request: dict[str, dict[tuple[StepKey, StepKey], StepPair]] = defaultdict(dict)
    for unit in units:
        if not unit.cells:
            by_request[""][(unit.ref, unit.target)] = unit
        for a, b in unit.cells:
            mine = by_request[b.request].get((unit.ref, unit.target))
            if mine is None:
                mine = by_request[b.request][(unit.ref, unit.target)] = StepPair(
                    ref=unit.ref,
                    target=unit.target,
                    ref_rows=unit.ref_rows,
                    target_rows=unit.target_rows,
                    offsets=unit.offsets,
                )
            mine.cells.append((a, b))
    rounds: list[dict[tuple[StepKey, StepKey], StepPair]] = []
    for mine_all in by_request.values():
        for layer in _layers(list(mine_all.values())):
            home = next((r for r in rounds if _fits(r, layer)), None)
            if home is None:
                rounds.append(home := {})
            for unit in layer:
                known = home.setdefault((unit.ref, unit.target), unit)
                if known is not unit:
                    known.cells += unit.cells
    return [list(r.values()) for r in rounds]


def _layers(units: list[StepPair]) -> list[list[StepPair]]:
    """One request's pairs, parted where a step has several partners (a prompt in chunks)."""
    layers: list[list[StepPair]] = []
    for unit in units:
        home = next(
            (k for k in layers if all(unit.ref != u.ref and unit.target != u.target for u in k)), None
        )
        if home is None:
            layers.append(home := [])
        home.append(unit)
    return layers


def _fits(home: Mapping[tuple[StepKey, StepKey], StepPair], layer: list[StepPair]) -> bool:
    refs = {ref: target for ref, target in home}
    targets = {target: ref for ref, target in home}
    return all(refs.get(u.ref, u.target) == u.target and targets.get(u.target, u.ref) == u.ref for u in layer)


__all__ = [
    "StepKey",
    "StepPair",
    "StepPlan",
    "chosen_steps",
    "pair_models",
    "pair_steps",
    "unpaired_steps",
]
