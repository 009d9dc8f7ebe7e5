"""Requests over the steps of one run: their names, the tokens they read, where each is computed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from dispatch_trace.align.positions import Cell, StepRows, rows_of
from dispatch_trace.schema import StepInfo
from dispatch_trace.store.reader import RankReader

StepKey: TypeAlias = tuple[str, int]  # model, number
# A request may come back (the same id again, or all of it computed anew): its n-th life.
Life: TypeAlias = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Place:
    step: StepKey
    cell: Cell


def prompts_of(rows: Mapping[StepKey, StepRows]) -> dict[str, tuple[int | None, ...]]:
    """The tokens of each request's first step, in order of appearance."""
    found: dict[str, tuple[int | None, ...]] = {}
    for table in rows.values():
        new: dict[str, list[int | None]] = defaultdict(list)
        for cell in table.cells:
            if cell.request not in found:
                new[cell.request].append(cell.token)
        found |= {request: tuple(tokens) for request, tokens in new.items()}
    return found


def match_ids(
    ref: Mapping[str, tuple[int | None, ...]], target: Mapping[str, tuple[int | None, ...]]
) -> tuple[dict[str, str], str]:
    """The target's ids to the reference's: by prompt where prompts are known and differ, else in order."""
    by_prompt = {tokens: request for request, tokens in ref.items()}
    known = None not in {token for tokens in ref.values() for token in tokens}
    if known and len(by_prompt) == len(ref) and set(by_prompt) == set(target.values()):
        return {request: by_prompt[tokens] for request, tokens in target.items()}, "by prompt"
    return dict(zip(target, ref, strict=True)), "in order of appearance"


def unnamed(rows: StepRows) -> StepRows:
    return renamed(rows, {c.request: f"row {c.row}" for c in rows.cells} if not rows.packed else {})


def renamed(rows: StepRows, names: Mapping[str, str]) -> StepRows:
    cells = tuple(
        Cell(c.row, c.place, names.get(c.request, c.request), c.position, c.token) for c in rows.cells
    )
    return StepRows(rows.batch, rows.tokens, cells, rows.named, rows.packed)


def lives_of(rows: Mapping[StepKey, StepRows]) -> dict[Life, dict[int, Place]]:
    """Where each position of each life of a request is computed for good.

    A later step that goes back (rejected proposals) replaces what it computes again. One that starts from
    position 0 again adds what is new (no cache), or is the next life where nothing is.
    """
    found: dict[Life, dict[int, Place]] = {}
    life: dict[str, int] = {}
    for step, table in rows.items():
        by_request: dict[str, list[Cell]] = defaultdict(list)
        for cell in table.cells:
            by_request[cell.request].append(cell)
        for request, cells in by_request.items():
            known = found.setdefault((request, life.setdefault(request, 0)), {})
            last = max(known, default=-2)
            again = bool(known) and cells[0].position == 0
            if again and max(c.position for c in cells) <= last:
                life[request] += 1
                known = found[(request, life[request])] = {}
                again = False
            for cell in cells:
                if not again or cell.position > last:
                    known[cell.position] = Place(step, cell)
    return found


def earlier_place(lives: Mapping[Life, dict[int, Place]], life: Life, position: int) -> Place | None:
    """A request that one run alone computed anew: what it had before is in an earlier life."""
    request, number = life
    for earlier in range(number - 1, -1, -1):
        place = lives.get((request, earlier), {}).get(position)
        if place is not None and (request, number) not in lives:
            return place
    return None


def left_padding(rows: Mapping[StepKey, StepRows], places: Mapping[int, Place]) -> int:
    """How far a request's tokens stand from their positions in the table of its first step."""
    first = places.get(0)
    if first is None or rows[first.step].packed:
        return 0
    return first.cell.place


def read_tokens(
    reader: RankReader, steps: Iterable[StepInfo], rows: Mapping[StepKey, StepRows]
) -> dict[StepKey, StepRows]:
    """Rows again, with the tokens that the root module was called with, where the metadata has none."""
    wanted = {
        (s.model, s.step): s
        for s in steps
        if (r := rows.get((s.model, s.step))) is not None and any(c.token is None for c in r.cells)
    }
    found: dict[StepKey, StepRows] = {}
    if not any(rows[key].tokens for key in wanted):
        return found
    for record in reader.records(kind="module", module="", call=0):
        key = (record.model, record.step)
        if key not in wanted or record.grad_phase != "fwd" or not rows[key].tokens:
            continue
        for slot in record.slots:
            named = slot.name == "in[0]" or slot.name.endswith(("ids", "tokens"))
            if slot.role != "in" or not named or "position" in slot.name:
                continue
            if slot.dtype not in ("int64", "int32"):
                continue
            count = 1
            for size in slot.shape:
                count *= size
            if slot.content < 0 or count != rows[key].batch * rows[key].tokens:
                continue
            array = reader.array(slot.content) if reader.content(slot.content).has_data else None
            if array is None:
                continue
            again = rows_of(wanted[key], [int(t) for t in array.reshape(-1)])
            if isinstance(again, StepRows):
                found[key] = again
            break
    return found


def differ(ref: Cell, target: Cell) -> bool:
    """Whether two places are known to hold other tokens."""
    return ref.token is not None and target.token is not None and ref.token != target.token
