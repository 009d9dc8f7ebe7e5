"""What people ask of an alignment: what is upstream of this, where a row went wrong, which token is off.

Errors are relative L2 errors as in `metrics.errors_by`. Values come from the traces as they lie on disk, or
by running what led to them again where only leaves were kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dispatch_trace.align.lens import STRIDE
from dispatch_trace.align.pairs import Pair, main_slots
from dispatch_trace.errors import ConfigError, NoMatchError, NotExecutableError
from dispatch_trace.export.rows import flat_pair
from dispatch_trace.judge.findings import NEVER_FATAL, Finding
from dispatch_trace.metrics import as_numpy, errors_by
from dispatch_trace.patterns import closest_paths, compile_select, select_modules
from dispatch_trace.report.listing import what
from dispatch_trace.schema import NO_CALL, StoredRecord, StoredSlot
from dispatch_trace.session import Record
from dispatch_trace.store.reader import RankReader
from dispatch_trace.tables import Table

if TYPE_CHECKING:
    import pandas

    from dispatch_trace.alignment import Alignment

Array: TypeAlias = npt.NDArray[Any]
Site: TypeAlias = "Pair | Finding | Record | str | int | None"
Readers: TypeAlias = Mapping[int, RankReader]

AXES = {"batch": 0, "token": -2, "channel": -1}
NUM_WORST = 20
BAR = 24


def pair_table(pairs: Iterable[Pair], title: str = "") -> Table[Pair]:
    """Pairs as rows: where, what, error and band."""
    return Table(pairs, _cells, frame=flat_pair, title=title)


def pairs_of(alignment: Alignment, pattern: str) -> Table[Pair]:
    """The pairs of the modules that a pattern matches on either side, and of all beneath them.

    Raises:
      PatternError, NoMatchError: of the pattern.
    """
    select_modules(pattern, alignment_paths(alignment), option="module")
    selector = compile_select(pattern, option="module")
    return pair_table(
        pair
        for pair in alignment.pairs
        if any(record is not None and selector.covers(record.module) for record in (pair.ref, pair.target))
    )


def alignment_paths(alignment: Alignment) -> list[str]:
    """Paths of all modules in the rows, the target's first, each once; the root's is ""."""
    sides = [[pair.target for pair in alignment.pairs], [pair.ref for pair in alignment.pairs]]
    return list(dict.fromkeys(record.module for side in sides for record in side if record is not None))


def pair_at(alignment: Alignment, at: Site) -> Pair:
    """The row that someone means.

    Args:
      at: a pair; a finding; a record of the target or its number; the path of a module (what its first call
        returned). None: the first finding, without any the last row that was compared.
    Raises:
      NoMatchError: there is no such row.
    """
    if isinstance(at, Pair):
        return at
    if at is None:
        at = alignment.first or next(iter(alignment.findings), None) or _last_compared(alignment)
        if isinstance(at, Pair):
            return at
    if isinstance(at, str):
        return _of_module(alignment, at)
    side, seq = ("target", at) if isinstance(at, int) else ("target", at.seq)
    if isinstance(at, Finding) and at.seq < 0:
        side, seq = "ref", at.ref_seq
    for pair in alignment.pairs:
        record = getattr(pair, side)
        if record is not None and record.seq == seq:
            return pair
    raise NoMatchError(f"at={at!r}: no row of this alignment holds record {seq} of the {side}.")


def upstream(alignment: Alignment, at: Site = None, *, depth: int | None = None) -> Table[Pair]:
    """The rows whose results the site's record read, directly or through others, nearest first.

    Args:
      at: as in `pair_at`.
      depth: how many ops back; None: all the way.
    """
    start = pair_at(alignment, at)
    side = "target" if start.target is not None else "ref"
    by_seq: dict[tuple[int, int], Pair] = {}
    for pair in alignment.pairs:
        record: StoredRecord | None = getattr(pair, side)
        if record is not None:
            by_seq.setdefault((record.rank, record.seq), pair)
    found: dict[int, Pair] = {}
    level, distance = [start], 0
    seen = {id(start)}
    while level and (depth is None or distance < depth):
        distance += 1
        behind = []
        for pair in level:
            record = getattr(pair, side)
            for seq in _reads(record):
                other = by_seq.get((record.rank, seq))
                if other is not None and id(other) not in seen:
                    seen.add(id(other))
                    behind.append(other)
        found.update((id(pair), pair) for pair in behind)
        level = behind
    record = getattr(start, side)
    return pair_table(
        found.values(), f"upstream of {record.module or '(root)'} {what(record)}, nearest first"
    )


# Errors by token, head, channel -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative L2 errors of the parts of one value.

    Attributes:
      by: what the parts are.
      values: [parts] float64.
      site: which value, in words.
    """

    by: str
    values: npt.NDArray[np.float64]
    site: str

    def worst(self, count: int = NUM_WORST) -> list[tuple[int, float]]:
        """(index, error) of the parts that are furthest off, the worst first."""
        order = np.argsort(-self.values, kind="stable")[:count]
        return [(int(i), float(self.values[i])) for i in order]

    def to_pandas(self) -> pandas.Series[float]:
        """One error a part. Needs pandas."""
        import pandas

        return pandas.Series(
            self.values, index=pandas.RangeIndex(len(self.values), name=self.by), name="error"
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.values, dtype=dtype, copy=copy)

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        return repr(self._table())

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()

    def _table(self) -> Table[tuple[int, float]]:
        median = float(np.median(self.values)) if len(self.values) else 0.0
        equal = int((self.values == 0).sum())
        title = f"error by {self.by} of {self.site}: {len(self)} in all, median {median:.3g}, {equal} equal"
        top = max((e for _, e in self.worst(1)), default=0.0)

        def bar(error: float) -> str:
            whole = 1.0 if math.isinf(error) else error / top if top and math.isfinite(top) else 0.0
            return "#" * round(whole * BAR)

        off = [(index, error) for index, error in self.worst() if error]
        return Table(off, lambda row: {self.by: row[0], "error": row[1], "": bar(row[1])}, title=title)


def error_by(
    alignment: Alignment,
    by: str | int,
    at: Site = None,
    *,
    heads: int | None = None,
    ref: Readers,
    target: Readers,
) -> Errors:
    """The error of every token, head, channel or batch row of one value.

    Args:
      by: "batch" (the first dim), "token" (the last but one), "channel" (the last), "head" (the second of
        four dims, or the last dim in `heads` parts), or the number of a dim.
      at: as in `pair_at`.
      heads: how many heads the last dim holds side by side.
      ref, target: readers by rank.
    Raises:
      ConfigError: the value has no such dim.
      NotExecutableError: a side has no value there, or the trace not enough to compute it.
    """
    pair = pair_at(alignment, at)
    a, b, site = _values(pair, ref, target)
    if by == "head" and heads is not None:
        if not a.ndim or a.shape[-1] % heads:
            raise ConfigError(
                f"heads={heads}: the last dim of {site} {list(a.shape)} is no multiple of it. "
                "Give the number of heads that the model's config gives."
            )
        a, b = (x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads) for x in (a, b))
        return Errors("head", errors_by(b, a, (a.ndim - 2,)), site)
    return Errors(
        str(by) if isinstance(by, str) else f"dim {by}", errors_by(b, a, (_axis(by, a, site),)), site
    )


def _axis(by: str | int, value: Array, site: str) -> int:
    if by == "head":
        if value.ndim != 4:
            raise ConfigError(
                f"by='head': {site} has shape {list(value.shape)}, not [batch, heads, tokens, channels]. "
                "Where heads lie side by side in the last dim, say how many: heads=N."
            )
        return 1
    if isinstance(by, str) and by not in AXES:
        raise ConfigError(f"by={by!r}: expected one of {', '.join((*AXES, 'head'))} or the number of a dim.")
    axis = AXES[by] if isinstance(by, str) else by
    if not -value.ndim <= axis < value.ndim:
        raise ConfigError(f"by={by!r}: {site} has shape {list(value.shape)}, which has no such dim.")
    return axis % value.ndim


# One row through the program --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowError:
    """What one row is off by at one pair.

    Attributes:
      pair: where.
      error: relative L2 of the row.
      band: error up to which it is taken for noise: the pair's, or where it has none (what a module returns)
        the largest one before it.
    """

    pair: Pair
    error: float
    band: float

    @property
    def beyond(self) -> bool:
        """The row is off by more than noise explains there, or holds much of what a finding is about."""
        pair = self.pair
        if pair.label and pair.label not in NEVER_FATAL and pair.error:
            return self.error > pair.error / 2
        return self.error > self.band


@dataclass(frozen=True, slots=True)
class Trail:
    """One row, followed through the program.

    Attributes:
      row: its index in the leading dims of the value that it was chosen in.
      site: which value that was, in words.
      rows: what it is off by at every pair that holds it, in execution order.
      first: the first pair where it is off by more than noise explains, None when there is none.
    """

    row: tuple[int, ...]
    site: str
    rows: Table[RowError]

    @property
    def first(self) -> Pair | None:
        return next((row.pair for row in self.rows if row.beyond), None)

    def __repr__(self) -> str:
        return f"{self._summary()}\n{self._shown()!r}"

    def _repr_html_(self) -> str:
        return self._shown()._repr_html_()

    def _summary(self) -> str:
        first = self.first
        record = None if first is None else first.target or first.ref
        if record is None:
            return f"row {list(self.row)} of {self.site} stays within its bands"
        return (
            f"row {list(self.row)} of {self.site} goes wrong in {record.module or '(root)'}: {what(record)}"
        )

    def _shown(self) -> Table[RowError]:
        """The rows around the first that is off."""
        at = next((i for i, row in enumerate(self.rows) if row.beyond), 0)
        return self.rows[max(0, at - 5) : at + 15]


def follow_row(
    alignment: Alignment,
    row: int | Sequence[int] | None = None,
    at: Site = None,
    *,
    ref: Readers,
    target: Readers,
) -> Trail:
    """What one row (one token) is off by at every op that holds it.

    Args:
      row: its index in the leading dims of the site's value, or its flat number there. None: the worst row.
      at: as in `pair_at`, but None is the last value that was compared: the program's result.
      ref, target: readers by rank.
    Raises:
      ConfigError: there is no such row.
      NotExecutableError: a side has no value there, or the trace not enough to compute it.
    """
    anchor = _last_compared(alignment) if at is None else pair_at(alignment, at)
    a, b, site = _values(anchor, ref, target)
    if a.ndim < 2:
        raise ConfigError(f"{site} has shape {list(a.shape)}: it has no rows. Name another site with at=….")
    leading = a.shape[:-1]
    if row is None:
        errors = errors_by(b, a, tuple(range(a.ndim - 1)))
        row = [int(i) for i in np.unravel_index(int(errors.argmax()), leading)]
    index = _row_index(row, leading, site)
    number = int(np.ravel_multi_index(index, leading))
    followed = [pair for pair in alignment.pairs if _is_followed(pair) and _same_step(pair, anchor)]
    theirs, ours = (
        {id(pair): one for pair, one in _rows_of(followed, side, readers, leading, number)}
        for side, readers in enumerate((ref, target))
    )
    found, band = [], 0.0
    for pair in followed:
        band = max(band, pair.band or 0.0)
        first, second = theirs.get(id(pair)), ours.get(id(pair))
        if first is not None and second is not None and first[0].size == second[0].size:
            error = errors_by(second[0][None], first[0][None], (0,), floor=first[1])[0]
            found.append(RowError(pair, float(error), band if pair.band is None else pair.band))
    return Trail(index, site, Table(found, _trail_cells))


def _row_index(row: int | Sequence[int], leading: tuple[int, ...], site: str) -> tuple[int, ...]:
    index = [row] if isinstance(row, int) else list(row)
    if len(index) == 1 and len(leading) > 1:
        if not 0 <= index[0] < math.prod(leading):
            raise ConfigError(f"row={row}: {site} has {math.prod(leading)} rows ({list(leading)}).")
        return tuple(int(i) for i in np.unravel_index(index[0], leading))
    if len(index) != len(leading) or not all(0 <= i < n for i, n in zip(index, leading, strict=True)):
        raise ConfigError(f"row={row}: expected an index into {list(leading)}, the leading dims of {site}.")
    return tuple(index)


def _rows_of(
    pairs: Iterable[Pair], side: int, readers: Readers, leading: tuple[int, ...], number: int
) -> Iterator[tuple[Pair, tuple[Array, float]]]:
    """The row of every value that holds it, and the median norm of the value's rows that are not zero."""
    for pair, value in _each_value(pairs, side, readers):
        table = _as_rows(value, leading)
        if table is not None:
            norms = np.linalg.norm(np.abs(table).astype(np.float64), axis=1)
            yield pair, (table[number].copy(), float(np.median(norms[norms > 0])) if norms.any() else 0.0)


def _as_rows(value: Array, leading: tuple[int, ...]) -> Array | None:
    """The value with all that belongs to one row in one line, [rows, n]; None where it has no such rows.

    Rows lie in front as they are, or flattened into one dim; or, of [batch, tokens], behind a dim of heads,
    which may itself be folded into the batch.
    """
    count, shape = math.prod(leading), value.shape
    if value.size == 0 or value.ndim < 2:
        return None
    if shape[: len(leading)] == leading or shape[0] == count:
        return value.reshape(count, -1)
    if len(leading) == 2:
        batch, tokens = leading
        if value.ndim == 4 and shape[0] == batch and shape[2] == tokens:
            return value.transpose(0, 2, 1, 3).reshape(count, -1)
        if value.ndim == 3 and shape[0] % batch == 0 and shape[1] == tokens:
            return value.reshape(batch, -1, tokens, shape[2]).transpose(0, 2, 1, 3).reshape(count, -1)
    if len(leading) == 1 and shape[0] % count == 0:
        return value.reshape(count, -1)
    return None


# Values -----------------------------------------------------------------------------------------------


def _values(pair: Pair, ref: Readers, target: Readers) -> tuple[Array, Array, str]:
    """Both values of a pair, of one shape, and what they are in words."""
    record = pair.target or pair.ref
    assert record is not None, "a pair has at least one side"
    site = f"{record.module or '(root)'} {what(record)}"
    sides = list(zip((pair.ref, pair.target), _slots(pair), (ref, target), strict=True))
    arrays = []
    for one, slot, readers in sides:
        if one is None or slot is None or one.rank not in readers:
            which = "reference" if readers is ref else "target"
            raise NotExecutableError(f"{site}: the {which} has no value there. Name another site with at=….")
        reader = readers[one.rank]
        arrays.append(as_numpy(Record(reader, reader.record(one.seq)).tensor(slot.name)))
    a, b = arrays
    if a.size != b.size:
        raise NotExecutableError(
            f"{site}: the values have shapes {list(a.shape)} and {list(b.shape)}; only rows of one layout "
            "can be compared here."
        )
    return a, b.reshape(a.shape), site


def _slots(pair: Pair) -> tuple[StoredSlot | None, StoredSlot | None]:
    return main_slots(pair.ref, pair.target)


def _each_value(pairs: Iterable[Pair], side: int, readers: Readers) -> Iterator[tuple[Pair, Array]]:
    """One side's values of pairs: from shards, or in one run of the program where only leaves are kept."""
    computed: dict[int, dict[int, tuple[Pair, StoredSlot]]] = {}
    for pair in pairs:
        record, slot = (pair.ref, pair.target)[side], _slots(pair)[side]
        if record is None or slot is None or slot.content < 0 or record.rank not in readers:
            continue
        reader, content = readers[record.rank], slot.content % STRIDE
        if reader.content(content).has_data:
            yield pair, as_numpy(reader.tensor(content))
        elif record.kind == "op":
            computed.setdefault(record.rank, {})[record.seq] = pair, slot
    for rank, wanted in computed.items():
        from dispatch_trace import execute

        for record, values in execute.iterate(readers[rank], until=max(wanted)):
            if record.seq in wanted:
                pair, slot = wanted[record.seq]
                if slot.name in values:
                    yield pair, as_numpy(values[slot.name])


# Rows -------------------------------------------------------------------------------------------------


def _of_module(alignment: Alignment, path: str) -> Pair:
    for pair in alignment.pairs:
        record = pair.target or pair.ref
        if record is not None and record.kind == "module" and record.module == path:
            return pair
    for pair in reversed(alignment.pairs):  # a trace of ops only
        record = pair.target or pair.ref
        if record is not None and record.module == path and record.kind == "op":
            return pair
    near = closest_paths(path, alignment_paths(alignment))
    hint = f" Closest: {', '.join(near)}." if near else ""
    raise NoMatchError(f"at={path!r}: no module of that path in the rows.{hint}")


def _last_compared(alignment: Alignment) -> Pair:
    compared = [pair for pair in alignment.pairs if pair.error is not None]
    modules = [pair for pair in compared if pair.target is not None and pair.target.kind == "module"]
    if not compared:
        raise NoMatchError("no row of this alignment was compared: name a site with at=….")
    return (modules or compared)[-1]


def _is_followed(pair: Pair) -> bool:
    sides = (pair.ref, pair.target)
    return all(r is not None and r.kind != "param" and not r.light for r in sides)


def _same_step(pair: Pair, anchor: Pair) -> bool:
    return all(
        one is None or other is None or (one.step, one.rank) == (other.step, other.rank)
        for one, other in ((pair.ref, anchor.ref), (pair.target, anchor.target))
    )


def _reads(record: StoredRecord) -> Iterator[int]:
    for slot in record.slots:
        if slot.role == "in":
            yield from (seq for seq, _ in slot.producers)
    if record.kind == "module" and record.producer >= 0:
        yield record.producer


def _cells(pair: Pair) -> dict[str, Any]:
    record = pair.target or pair.ref
    assert record is not None, "a pair has at least one side"
    call = f"#{record.call}" if record.call not in (0, NO_CALL) else ""
    return {
        "record": record.seq,
        "module": f"{record.module or '(root)'}{call}",
        "what": what(record),
        "outcome": pair.outcome,
        "error": pair.error,
        "band": pair.band,
        "label": pair.label,
    }


def _trail_cells(row: RowError) -> dict[str, Any]:
    cells = _cells(row.pair)
    return {
        "record": cells["record"],
        "module": cells["module"],
        "what": cells["what"],
        "error of row": row.error,
        "of all rows": row.pair.error,
        "band": row.band,
        "": "<-- beyond its band" if row.beyond else "",
    }


__all__ = [
    "Errors",
    "RowError",
    "Trail",
    "error_by",
    "follow_row",
    "pair_at",
    "pair_table",
    "pairs_of",
    "upstream",
]
