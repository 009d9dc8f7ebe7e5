"""Which parameter of the target is which of the reference, where names say nothing: by content.

Equal contents first. What is left is looked for row by row: a parameter of the target is laid out of rows or
columns of parameters of the reference, so one rule covers weights that are transposed, concatenated, split,
interleaved by head, permuted or padded with zeros. How it is laid out is said (`Layout.transform`).
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from dispatch_trace.align.canon import dtype_class, family
from dispatch_trace.align.content import OWN, ZEROS, Comparer, Layout, columns_of
from dispatch_trace.align.graph import Program, Value
from dispatch_trace.metrics import coarser, round_to
from dispatch_trace.schema import StoredRecord
from dispatch_trace.sketch import alike

Array: TypeAlias = npt.NDArray[Any]

# Of a parameter that is laid out anew, this share of the rows must be found; others may have been changed.
_MIN_FOUND = 0.5
# Rows shorter than this equal others by chance.
_MIN_ROW = 8
_MAX_ROWS = 1 << 20
# The number of a module among its siblings.
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class WeightPair:
    """A parameter of the target, and what it is in the reference.

    Attributes:
      ref: the parameters that it is laid out of, in order.
      target: the parameter.
      layout: how; None where both hold the same elements in the same order.
      method: "hash", "rounded", "layout" or "sibling".
      confidence: in [0, 1].
    """

    ref: tuple[StoredRecord, ...]
    target: StoredRecord
    layout: Layout | None
    method: str
    confidence: float


def pair_weights(
    ref: Program,
    target: Program,
    comparer: Comparer,
    taken: Collection[tuple[int, int]],
    notices: list[str],
) -> list[WeightPair]:
    """Pairs the first versions of parameters by content.

    Args:
      taken: records that are paired already: (0 for the reference's or 1, seq).
      notices: takes what people should know.
    """
    found = _Weights(ref, target, comparer, taken)
    if found.too_many:
        notices.append(
            f"weights were not looked for row by row: the reference has more than {_MAX_ROWS:,} rows and"
            " columns without partner"
        )
    return found.found


class _Weights:
    def __init__(self, ref: Program, target: Program, comparer: Comparer, taken: Collection[Any]) -> None:
        self._comparer = comparer
        self._programs = (ref, target)
        self._left = tuple(
            {
                versions[0].seq: versions[0]
                for versions in program.params.values()
                if versions[0].slots[0].content >= 0 and (side, versions[0].seq) not in taken
            }
            for side, program in enumerate(self._programs)
        )
        self.found: list[WeightPair] = []
        self.too_many = False  # rows to look through
        self._by_hash()
        self._by_rounding()
        layouts = dict(self._by_rows())
        layouts |= self._left_over(layouts)
        self._agree(layouts)
        self._siblings(layouts)

    def _pair(
        self,
        ref: Sequence[StoredRecord],
        target: StoredRecord,
        layout: Layout | None,
        method: str,
        sure: float,
    ) -> None:
        self.found.append(WeightPair(tuple(ref), target, layout, method, sure))
        self._left[1].pop(target.seq, None)
        if layout is None:
            self._left[0].pop(ref[0].seq, None)

    def _by_hash(self) -> None:
        groups: list[dict[Any, list[StoredRecord]]] = []
        for left, program in zip(self._left, self._programs, strict=True):
            group: dict[Any, list[StoredRecord]] = defaultdict(list)
            for record in left.values():
                content = program.reader.content(record.slots[0].content)
                if content.hash:
                    group[content.hash].append(record)
            groups.append(group)
        for key, ours in groups[1].items():
            theirs = groups[0].get(key, [])
            if len(theirs) == len(ours):  # in order: norms that nobody trained are all alike
                for a, b in zip(theirs, ours, strict=True):
                    self._pair([a], b, None, "hash", 1.0 if len(ours) == 1 else 0.8)

    def _by_rounding(self) -> None:
        """Of one shape and equal up to rounding to the coarser dtype."""
        by_shape: dict[Any, list[StoredRecord]] = defaultdict(list)
        for record in self._left[0].values():
            if dtype_class(record.slots[0].dtype) == "f":
                by_shape[record.slots[0].shape].append(record)
        tables = {}
        for shape, records in by_shape.items():
            known = [(r, self._programs[0].reader.sketch(r.slots[0].content)) for r in records]
            usable = [(r, s) for r, s in known if s is not None]
            if usable:
                tables[shape] = [r for r, _ in usable], np.stack([s for _, s in usable]).astype(np.float64)
        for target in list(self._left[1].values()):
            slot = target.slots[0]
            mine = self._programs[1].reader.sketch(slot.content)
            if mine is None or slot.shape not in tables or dtype_class(slot.dtype) != "f":
                continue
            candidates, table = tables[slot.shape]
            table, row = alike(table, mine.astype(np.float64))
            size = max(float(np.linalg.norm(row)), 1e-300)
            near = np.linalg.norm(table - row, axis=1) / size
            fitting = [at for at in np.flatnonzero(near <= 0.02) if candidates[at].seq in self._left[0]]
            if fitting:
                best = min(fitting, key=lambda at: float(near[at]))
                self._pair([candidates[best]], target, None, "rounded", 0.9 if len(fitting) == 1 else 0.6)

    # Rows -------------------------------------------------------------------------------------------

    def _by_rows(self) -> Iterator[tuple[int, tuple[tuple[StoredRecord, ...], Layout]]]:
        rounding = self._rounding()
        rows: dict[bytes, tuple[int, int, int]] = {}  # content of a row -> (seq, axis, number)
        targets, total = list(self._left[1].values()), 0
        for last in (0, 1):  # columns are looked at where rows do not tell
            for record in sorted(self._left[0].values(), key=lambda r: len(r.slots[0].shape)):
                for axis, lines in self._lines(0, record, rounding, [last]):
                    total += len(lines)
                    if total > _MAX_ROWS:
                        self.too_many = True
                        if len(record.slots[0].shape) > 2:
                            break  # stacks of matrices come last
                        return
                    filled: list[bool] = np.any(lines, axis=1).tolist()  # zeros are anybody's
                    for number, line in enumerate(lines):
                        if filled[number]:
                            rows.setdefault(_digest(line), (record.seq, axis, number))
            open_ones = []
            for target in targets if rows else ():
                best: tuple[int, int, list[tuple[int, int, int]]] | None = None
                for axis, lines in self._lines(1, target, rounding, range(last + 1)):
                    places = [rows.get(_digest(line)) or _missing(line) for line in lines]
                    hits = sum(place[2] >= 0 for place in places)
                    if hits >= max(_MIN_FOUND * len(places), 1) and (best is None or hits > best[0]):
                        best = hits, axis, places
                if not last and (best is None or best[0] < len(best[2])):
                    open_ones.append(target)
                    continue
                found = None if best is None else self._layout(target, best[1], best[2])
                if found is not None:
                    yield target.seq, found
            targets = open_ones
            if not targets:
                return

    def _rounding(self) -> str:
        """The coarsest float dtype of parameters: rows are compared in it."""
        dtypes = {r.slots[0].dtype for left in self._left for r in left.values()}
        floats = sorted(d for d in dtypes if dtype_class(d) == "f")
        found = floats[0] if floats else "float32"
        for dtype in floats[1:]:
            found = coarser(found, dtype)
        return found

    def _lines(
        self, side: int, record: StoredRecord, rounding: str, axes: Collection[int]
    ) -> Iterator[tuple[int, Array]]:
        """The rows (axis 0) or columns (axis 1) of a matrix; of a stack of matrices those of all of them."""
        slot = record.slots[0]
        dims = len(slot.shape)
        if dims not in (2, 3) or dtype_class(slot.dtype) != "f" or max(slot.shape[-2:]) < _MIN_ROW:
            return
        array = self._comparer.array(side == 0, slot.content)
        if array is None:
            return
        array = round_to(array, rounding) + 0.0  # no negative zeros
        if 0 in axes and array.shape[-1] >= _MIN_ROW:
            yield 0, np.ascontiguousarray(array).reshape(-1, array.shape[-1])
        if 1 in axes and array.shape[-2] >= _MIN_ROW:
            yield 1, np.ascontiguousarray(columns_of(array).T)

    def _layout(
        self, target: StoredRecord, axis: int, places: list[tuple[int, int, int]]
    ) -> tuple[tuple[StoredRecord, ...], Layout] | None:
        axes = Counter(place[1] for place in places if place[2] >= 0)
        ref_axis = axes.most_common(1)[0][0]
        places = [p if p[2] < 0 or p[1] == ref_axis else (0, 0, OWN) for p in places]
        hit = {place[0] for place in places if place[2] >= 0}
        _fill(places, {seq: _num_lines(self._left[0][seq], ref_axis) for seq in hit})
        found = max(n for n, place in enumerate(places) if place[2] >= 0)
        if any(place[2] == OWN for place in places[:found]):
            return None  # what lies behind the last row that was found is padding, whatever it holds
        order = list(dict.fromkeys(place[0] for place in places if place[2] >= 0))
        # In the order of the reference: a set of contents says nothing about which is which.
        order.sort()
        parts = tuple(self._left[0][seq] for seq in order)
        sizes = [_num_lines(part, ref_axis) for part in parts]
        starts = dict(zip(order, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True))
        index = tuple(n if n < 0 else starts[seq] + n for seq, _, n in places)
        return parts, Layout(
            parts=tuple(part.slots[0].content for part in parts),
            sizes=tuple(sizes),
            ref_axis=ref_axis,
            axis=axis,
            index=index,
        )

    def _left_over(
        self, layouts: Mapping[int, tuple[tuple[StoredRecord, ...], Layout]]
    ) -> dict[int, tuple[tuple[StoredRecord, ...], Layout]]:
        """The one of numbered siblings that equals nothing: what the others leave of one weight."""
        lists: dict[Any, list[StoredRecord]] = defaultdict(list)
        for target in self._left[1].values():
            for match in NUMBER.finditer(target.module):
                kind = target.name, target.slots[0].shape
                lists[target.module[: match.start()], target.module[match.end() :], kind].append(target)
        found = {}
        for siblings in lists.values():
            known = [layouts[r.seq] for r in siblings if r.seq in layouts]
            alone = [r for r in siblings if r.seq not in layouts]
            if len(alone) != 1 or not known or len({layout.parts for _, layout in known}) != 1:
                continue
            parts, first = known[0]
            taken = {i for _, layout in known for i in layout.index}
            rest = [i for i in range(sum(first.sizes)) if i not in taken]
            index = tuple(i + min(rest) - min(first.index) for i in first.index) if rest else ()
            if rest and min(taken) >= 0 and sorted(index) == rest:
                found[alone[0].seq] = parts, replace(first, index=index)
        return found

    def _agree(self, layouts: dict[int, tuple[tuple[StoredRecord, ...], Layout]]) -> None:
        """Where most weights of one kind are laid out alike, the odd one out is wrong."""
        kinds: dict[Any, Counter[Any]] = defaultdict(Counter)

        def kind(record: StoredRecord, sizes: tuple[int, ...]) -> Any:
            return record.slots[0].shape, NUMBER.sub("*", record.module), record.name, sizes

        def shape(layout: Layout) -> Any:
            return layout.ref_axis, layout.axis, layout.index

        for seq, (_, layout) in layouts.items():
            kinds[kind(self._left[1][seq], layout.sizes)][shape(layout)] += 1
        for pair in self.found:  # those that are laid out as in the reference
            slot = pair.target.slots[0]
            if pair.layout is None and slot.shape == pair.ref[0].slots[0].shape and len(slot.shape) == 2:
                for axis, size in enumerate(slot.shape):
                    plain = axis, axis, tuple(range(size))
                    kinds[kind(pair.target, (size,))][plain] += 1
        for seq, (parts, layout) in list(layouts.items()):
            target = self._left[1][seq]
            known = kinds[kind(target, layout.sizes)]
            common, count = known.most_common(1)[0]
            if count > 1 and 2 * count > known.total() and common != shape(layout):
                ref_axis, axis, index = common
                layout = Layout(layout.parts, layout.sizes, ref_axis, axis, index)
                layouts[seq] = parts, layout
            self.found.append(WeightPair(parts, target, layout, "layout", 0.9))
        for seq, (parts, _) in layouts.items():
            self._left[1].pop(seq)
            for part in parts:
                self._left[0].pop(part.seq, None)

    def _siblings(self, layouts: dict[int, tuple[tuple[StoredRecord, ...], Layout]]) -> None:
        """Biases of weights that are laid out anew are laid out alike."""
        homes: list[dict[tuple[str, str], list[StoredRecord]]] = [defaultdict(list), defaultdict(list)]
        for left, home in zip(self._left, homes, strict=True):
            for record in left.values():
                if len(record.slots[0].shape) == 1:
                    home[_home(record)].append(record)
        for pair in [p for p in self.found if p.layout is not None]:
            assert pair.layout is not None
            for target in homes[1].get(_home(pair.target), []):
                if target.seq not in self._left[1] or target.slots[0].shape != (len(pair.layout.index),):
                    continue
                theirs = [homes[0].get(_home(p), []) for p in pair.ref]
                parts = [r[0] for r in theirs if len(r) == 1]
                if tuple(p.slots[0].shape[0] for p in parts) == pair.layout.sizes:
                    contents = tuple(p.slots[0].content for p in parts)
                    layout = Layout(contents, pair.layout.sizes, 0, 0, pair.layout.index)
                    self._pair(parts, target, layout, "sibling", 0.8)


def _home(record: StoredRecord) -> tuple[str, str]:
    return record.model, record.module


def _num_lines(record: StoredRecord, axis: int) -> int:
    """Rows or columns of a matrix; those of all matrices of a stack."""
    shape = record.slots[0].shape
    return math.prod(shape) // shape[-2 if axis else -1]


def _digest(line: Array) -> bytes:
    """Stands for the row: the rows themselves would be another copy of the model."""
    return xxhash.xxh3_128_digest(line.tobytes())


def _missing(line: Array) -> tuple[int, int, int]:
    return (0, 0, OWN) if np.any(line) else (0, 0, ZEROS)


def _fill(places: list[tuple[int, int, int]], sizes: Mapping[int, int]) -> None:
    """Rows that were not found follow the row before them, or come before the row after them.

    Args:
      sizes: rows of each parameter.
    """
    used = {(seq, number) for seq, _, number in places if number >= 0}
    for step in (1, -1):
        walk = range(len(places)) if step == 1 else range(len(places) - 1, -1, -1)
        for i in walk:
            j = i - step
            if places[i][2] == OWN and 0 <= j < len(places) and places[j][2] >= 0:
                seq, axis, number = places[j]
                if 0 <= number + step < sizes[seq] and (seq, number + step) not in used:
                    places[i] = seq, axis, number + step
                    used.add((seq, number + step))


def products(program: Program, weight: Value) -> list[Value]:
    """What linear ops make of a weight, in order."""
    found = []
    for seq, _ in program.consumers.get(weight, ()):
        record = program.records[seq]
        outputs = program.outputs(record)
        if family(record.op) == "linear" and len(outputs) == 1 and len(outputs[0].shape) > 1:
            found.append((seq, outputs[0].index))
    return found
