"""What the metadata of a step says: which request and position each row of its tensors holds.

A step is a table of `batch` rows with `tokens` places each. What is padding has no cell: rows beyond the
request ids, places that valid lengths leave out, and, where no lengths are given, places whose position
does not strictly increase (a padded bucket repeats its last position, left padding its first).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dispatch_trace.schema import StepInfo

_TOKEN_KEYS = ("tokens", "input_ids", "token_ids")


@dataclass(frozen=True, slots=True)
class Cell:
    """One real place of a step.

    Attributes:
      row, place: where it stands: row of the batch, place in the row.
      request: id of its request; "row 2" where the step names none.
      position: of the token in its request; 0 where the step has none (a vision encoder).
      token: the input token there, None where unknown.
    """

    row: int
    place: int
    request: str
    position: int = 0
    token: int | None = None


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step.

    Attributes:
      batch, tokens: size of the table, padding included; tokens is 0 where nothing is known of tokens.
      cells: the real places, row by row.
      named: the step names its requests.
      packed: requests stand behind one another in one row.
    """

    batch: int
    tokens: int
    cells: tuple[Cell, ...]
    named: bool
    packed: bool = False

    @property
    def is_padded(self) -> bool:
        return len(self.cells) != self.batch * max(self.tokens, 1)


def rows_of(step: StepInfo, input_ids: Sequence[int] | None = None) -> StepRows | str | None:
    """The rows of a step.

    Args:
      step: with `req_ids`, `positions` ([tokens], [batch, tokens], or [batch] when `phase` is "decode"),
        and perhaps `valid_lengths` ([batch]) or `valid` (as positions), `tokens` (as positions).
      input_ids: flat, where the metadata has no tokens: what the program was seen to read.
    Returns: None where the step says nothing of requests and positions; a text where what it says
      contradicts itself.
    """
    meta = step.meta
    requests = _requests(meta.get("req_ids"))
    positions = meta.get("positions")
    if positions is None:
        return None if requests is None else _without_positions(requests)
    table = _table(positions)
    if table is None:
        return "positions are no table of integers"
    flat = not (positions and isinstance(positions[0], list))
    if flat and _is_decode(meta, requests, table[0]):
        table = [[p] for p in table[0]]
    packed = flat and len(table) == 1 and requests is not None and len(requests) > 1
    valid = _valid(meta, table, packed=packed)
    if isinstance(valid, str):
        return valid
    if packed:
        assert requests is not None
        owners = _segments(table[0], requests, meta.get("valid_lengths"))
        if owners is None:
            return f"{len(requests)} requests in {len(table[0])} places, and nothing says where each begins"
        segments = [[owners[place] for place in range(len(table[0]))]]
    else:
        if requests is not None and len(requests) > len(table):
            return f"{len(requests)} request ids, and positions of {len(table)} rows"
        names = [f"row {i}" for i in range(len(table))] if requests is None else requests
        segments = [[names[i] if i < len(names) else None] * len(row) for i, row in enumerate(table)]
    known = _tokens(meta, table)
    if known is None and input_ids is not None and len(input_ids) == sum(map(len, table)):
        width = len(table[0])
        known = [[int(t) for t in input_ids[i * width : (i + 1) * width]] for i in range(len(table))]
    cells = tuple(
        Cell(i, j, owner, position, None if known is None else known[i][j])
        for i, row in enumerate(table)
        for j, position in enumerate(row)
        if (owner := segments[i][j]) is not None and valid[i][j]
    )
    return StepRows(len(table), len(table[0]), cells, requests is not None, packed)


def _without_positions(requests: list[str | None]) -> StepRows:
    cells = tuple(Cell(i, 0, name) for i, name in enumerate(requests) if name is not None)
    return StepRows(len(requests), 0, cells, True)


def _requests(given: Any) -> list[str | None] | None:
    """Ids in order; None for a row that is padding."""
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, list) or not given:
        return None
    return [None if name is None or name == "" else str(name) for name in given]


def _table(given: Any) -> list[list[int]] | None:
    """[batch, tokens]; positions of several kinds (text, height, width) count by the first."""
    if not isinstance(given, list) or not given:
        return None
    while isinstance(given[0], list) and given[0] and isinstance(given[0][0], list):
        given = given[0]
    rows = given if isinstance(given[0], list) else [given]
    widths = {len(row) if isinstance(row, list) else -1 for row in rows}
    if len(widths) != 1 or widths <= {0, -1}:
        return None
    if not all(isinstance(p, int) and not isinstance(p, bool) for row in rows for p in row):
        return None
    return [list(row) for row in rows]


def _is_decode(meta: dict[str, Any], requests: list[str | None] | None, flat: list[int]) -> bool:
    """Whether flat positions are one token of each row, rather than the tokens of one row."""
    phase = meta.get("phase")
    if phase is not None:
        return str(phase) == "decode"
    return requests is not None and len(requests) == len(flat) > 1


def _valid(meta: dict[str, Any], table: list[list[int]], *, packed: bool) -> list[list[bool]] | str:
    mask = meta.get("valid")
    if isinstance(mask, list) and mask:
        rows = mask if isinstance(mask[0], list) else [mask]
        if len(rows) == 1 and len(table) == len(rows[0]) > 1 and len(table[0]) == 1:
            rows = [[v] for v in rows[0]]
        if [len(r) for r in rows] != [len(r) for r in table]:
            return "valid and positions have different shapes"
        return [[bool(v) for v in row] for row in rows]
    lengths = meta.get("valid_lengths")
    if isinstance(lengths, int):
        lengths = [lengths]
    if isinstance(lengths, list) and lengths and not packed:
        if len(lengths) > len(table) or not all(isinstance(n, int) and n >= 0 for n in lengths):
            return f"valid_lengths={lengths!r} do not fit {len(table)} rows"
        lengths = [*lengths, *[0] * (len(table) - len(lengths))]
        # Positions ascend from left to right in the real part, wherever the padding stands.
        return [_run(row, min(n, len(row))) for row, n in zip(table, lengths, strict=True)]
    if packed:
        return [[position >= 0 for position in row] for row in table]
    return [_run(row, None) for row in table]


def _run(row: list[int], length: int | None) -> list[bool]:
    """The longest run of strictly increasing positions, or the first run that is at least so long."""
    best = (0, 0)
    start = 0
    for at in range(1, len(row) + 1):
        if at < len(row) and row[at] > row[at - 1]:
            continue
        first = next((i for i in range(start, at) if row[i] >= 0), at)
        if length is not None and at - first >= length:
            best = (first, first + length)
            break
        if length is None and at - first > best[1] - best[0]:
            best = (first, at)
        start = at
    return [best[0] <= i < best[1] for i in range(len(row))]


def _segments(row: list[int], requests: list[str | None], lengths: Any) -> list[str | None] | None:
    """The owner of each place of a packed row: by lengths, else a request begins where positions fall."""
    if isinstance(lengths, list) and len(lengths) == len(requests) and sum(lengths) <= len(row):
        owners = [name for name, n in zip(requests, lengths, strict=True) for _ in range(n)]
        return [*owners, *[None] * (len(row) - len(owners))]
    starts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(row)) if b != a + 1)]
    if len(starts) < len(requests):
        return None
    ends = [*starts[1:], len(row)]
    found: list[str | None] = [None] * len(row)
    for name, start, end in zip(requests, starts, ends, strict=False):
        found[start:end] = [name] * (end - start)
    return found


def _tokens(meta: dict[str, Any], table: list[list[int]]) -> list[list[int]] | None:
    for key in _TOKEN_KEYS:
        given = meta.get(key)
        if not isinstance(given, list) or not given:
            continue
        rows = given if isinstance(given[0], list) else [given]
        if len(rows) == 1 and len(table) > 1 and len(rows[0]) == len(table):
            rows = [[t] for t in rows[0]]
        if [len(r) for r in rows] == [len(r) for r in table]:
            return [[int(t) for t in row] for row in rows]
    return None
