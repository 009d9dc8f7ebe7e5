"""Which op of the target belongs to which of the reference, inside one pair of module calls.

A global alignment of two sequences (Needleman-Wunsch with gap costs): it maximises the total score over all
order-preserving pairings, so an op that one side lacks shifts nothing. What makes two ops alike is what
they are and where they stand: name, family, shape, dtype class, scalar arguments, what produces their
inputs and who reads their outputs. Values stay out of it: a wrong value would make its op unmatched
instead of wrong.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dispatch_trace.align.canon import dtype_class, family, short
from dispatch_trace.align.graph import Program, Value
from dispatch_trace.schema import StoredRecord

Matrix = npt.NDArray[np.float32]

GAP = 0.05
FORBIDDEN = -1e6
# Larger problems are cut at ops that occur once on both sides.
MAX_CELLS = 4_000_000


@dataclass(frozen=True, slots=True)
class Element:
    """One thing in the sequence of a body.

    Attributes:
      record: the op; for a child call its module record, or None where it has none.
      marker: identifies a child call on both sides, None for ops.
      edge: the op only moves values.
    """

    record: StoredRecord | None
    marker: Any = None
    edge: bool = False


@dataclass(frozen=True, slots=True)
class OpPair:
    """Two ops that belong together.

    Attributes:
      ref, target: sequence numbers.
      confidence: in (0, 1]: score over the best score that the op could reach.
      method: "same op" or "same family".
    """

    ref: int
    target: int
    confidence: float
    method: str


class Features:
    """What the ops of two bodies look like, as arrays to compare at once."""

    def __init__(self, program: Program, elements: Sequence[Element]) -> None:
        self.elements = elements
        self.names = [_name(e) for e in elements]
        self.families = [family(e.record.op) if e.record and e.marker is None else "" for e in elements]
        self.markers = [e.marker for e in elements]
        self.edges = np.array([e.edge for e in elements], dtype=bool)
        self.numel = np.array([_numel(program, e) for e in elements], dtype=np.float64)
        self.shapes = [_shape(program, e) for e in elements]
        self.classes = [_dtype_class(program, e) for e in elements]
        self.scalars = [
            scalars(e.record) if e.record is not None and e.marker is None else "" for e in elements
        ]
        self.producers = [_producers(program, e) for e in elements]
        self.readers = [_readers(program, e) for e in elements]


def score_matrix(
    ref: Features,
    target: Features,
    *,
    ignore_sizes: bool,
    ref_context: Sequence[Counter[Any]] | None = None,
    target_context: Sequence[Counter[Any]] | None = None,
) -> Matrix:
    """[n, m] scores; FORBIDDEN where two elements can never belong together.

    Args:
      ignore_sizes: sizes differ throughout (padding), so they say nothing.
      ref_context, target_context: partners of neighbours that are known already, in common terms.
    """
    same_name = _equal(ref.names, target.names)
    same_family = _equal(ref.families, target.families)
    same_marker = _equal(ref.markers, target.markers)
    is_marker = np.array([m is not None for m in ref.markers])[:, None]
    is_marker_t = np.array([m is not None for m in target.markers])[None, :]
    edge, edge_t = ref.edges[:, None], target.edges[None, :]
    same_numel = ref.numel[:, None] == target.numel[None, :]
    if ignore_sizes:
        same_numel = np.ones_like(same_numel)
    same_shape = _equal(ref.shapes, target.shapes)
    same_class = _equal(ref.classes, target.classes)
    same_scalars = _equal(ref.scalars, target.scalars)
    score = np.where(same_name, 4.0, 3.0)
    score += np.where(same_numel, np.where(same_shape, 1.5, 1.0), -2.5)
    score += np.where(same_class, 0.0, -2.0)
    score += np.where(same_scalars, 0.5, 0.0)
    score += 1.0 * _overlap(ref.producers, target.producers)
    score += 1.0 * _overlap(ref.readers, target.readers)
    if ref_context is not None and target_context is not None:
        score += 3.0 * _overlap(ref_context, target_context)
    score = np.where(edge & edge_t, 0.1 * score, score)
    # Results of different sizes cannot be compared: such ops belong to a region instead.
    comparable = same_numel | (edge & edge_t)
    allowed = same_family & (edge == edge_t) & ~is_marker & ~is_marker_t & comparable
    score = np.where(allowed & (score > 0), score, FORBIDDEN)
    markers = is_marker & is_marker_t & same_marker
    return np.where(markers, 50.0, score).astype(np.float32)


def align_sequences(score: Matrix) -> list[tuple[int, int]]:
    """The order-preserving pairing with the largest total score; each gap costs GAP.

    Args:
      score: [n, m].
    Returns: pairs (row, column), ascending.
    """
    n, m = score.shape
    if n == 0 or m == 0:
        return []
    best = np.empty((n + 1, m + 1), dtype=np.float64)
    columns = np.arange(m + 1, dtype=np.float64) * GAP
    best[0] = -columns
    for i in range(1, n + 1):
        row = best[i - 1] - GAP
        np.maximum(row[1:], best[i - 1, :-1] + score[i - 1], out=row[1:])
        # A run of gaps along the row is a running maximum, once the cost of the way is added back.
        best[i] = np.maximum.accumulate(row + columns) - columns
    pairs = []
    i, j = n, m
    while i > 0 and j > 0:
        here = best[i, j]
        diagonal = best[i - 1, j - 1] + score[i - 1, j - 1]
        if score[i - 1, j - 1] > FORBIDDEN / 2 and abs(here - diagonal) <= 1e-4:
            pairs.append((i - 1, j - 1))
            i, j = i - 1, j - 1
        elif abs(here - (best[i - 1, j] - GAP)) <= 1e-4:
            i -= 1
        else:
            j -= 1
    return pairs[::-1]


class BodyAligner:
    """Aligns bodies, one after the other; remembers what has been paired so far."""

    def __init__(self, ref: Program, target: Program, *, ignore_sizes: bool = False) -> None:
        self._ref = ref
        self._target = target
        self._ignore_sizes = ignore_sizes
        self.partner: dict[int, int] = {}  # target seq -> ref seq
        self._partner_of_ref: dict[int, int] = {}

    def align(self, ref: Sequence[Element], target: Sequence[Element]) -> list[OpPair]:
        """Pairs the ops of one body. A second pass weighs in where inputs come from and outputs go to."""
        found: list[OpPair] = []
        for rows, columns in _blocks(self._ref, self._target, ref, target):
            found += self._align_block(ref[rows], target[columns])
        return found

    def _align_block(self, ref: Sequence[Element], target: Sequence[Element]) -> list[OpPair]:
        if _are_alike(self._ref, ref, self._target, target):
            return self._one_by_one(ref, target)
        a, b = Features(self._ref, ref), Features(self._target, target)
        score = score_matrix(a, b, ignore_sizes=self._ignore_sizes)
        pairs = align_sequences(score)
        self._remember(a, b, pairs)
        gaps = len(ref) != len(pairs) or len(target) != len(pairs)
        for _ in range(2 if gaps else 0):
            ref_context = [self._context(self._ref, e, ref_side=True) for e in ref]
            target_context = [self._context(self._target, e, ref_side=False) for e in target]
            score = score_matrix(
                a, b, ignore_sizes=self._ignore_sizes, ref_context=ref_context, target_context=target_context
            )
            again = align_sequences(score)
            if again == pairs:
                break
            self._forget(a, pairs)
            pairs = again
            self._remember(a, b, pairs)
        top = score.max(axis=1) if score.size else score
        return [
            OpPair(
                ref[i].record.seq,  # type: ignore[union-attr]
                target[j].record.seq,  # type: ignore[union-attr]
                round(float(score[i, j] / max(top[i], 1e-6)), 3),
                "same op" if a.names[i] == b.names[j] else "same family",
            )
            for i, j in pairs
            if a.markers[i] is None
        ]

    def _one_by_one(self, ref: Sequence[Element], target: Sequence[Element]) -> list[OpPair]:
        """What aligning comes to where each element of one body is that of the other: no pair scores more."""
        found = []
        for ours, theirs in zip(ref, target, strict=True):
            if ours.marker is None and ours.record is not None and theirs.record is not None:
                self.partner[theirs.record.seq] = ours.record.seq
                self._partner_of_ref[ours.record.seq] = theirs.record.seq
                found.append(OpPair(ours.record.seq, theirs.record.seq, 1.0, "same op"))
        return found

    def _remember(self, a: Features, b: Features, pairs: Iterable[tuple[int, int]]) -> None:
        for i, j in pairs:
            ref, target = a.elements[i].record, b.elements[j].record
            if ref is not None and target is not None and a.markers[i] is None:
                self.partner[target.seq] = ref.seq
                self._partner_of_ref[ref.seq] = target.seq

    def _forget(self, a: Features, pairs: Iterable[tuple[int, int]]) -> None:
        for i, _ in pairs:
            record = a.elements[i].record
            if record is not None and a.markers[i] is None:
                target = self._partner_of_ref.pop(record.seq, None)
                if target is not None:
                    self.partner.pop(target, None)

    def _context(self, program: Program, element: Element, *, ref_side: bool) -> Counter[Any]:
        """Neighbours of an op by dataflow, named by the reference's numbers where they are paired."""
        found: Counter[Any] = Counter()
        record = element.record
        if record is None or element.marker is not None:
            return found

        def name(value: Value) -> Any:
            seq = value[0]
            owner = program.records[seq]
            if owner.kind == "param":
                return ("param", owner.module, owner.name)
            if ref_side:
                return (seq, value[1]) if seq in self._partner_of_ref else None
            partner = self.partner.get(seq)
            return None if partner is None else (partner, _slot_in(self._ref, partner, owner, value[1]))

        for value in _terms(program, record):
            key = name(value)
            if key is not None:
                found[("in", key)] += 1
        for slot in program.outputs(record):
            for seq, _ in program.consumers.get((record.seq, slot.index), ()):
                reader = seq if ref_side and seq in self._partner_of_ref else self.partner.get(seq)
                if reader is not None:
                    found[("out", reader)] += 1
        return found


def _terms(program: Program, record: StoredRecord, depth: int = 6) -> Iterator[Value]:
    """What an op reads; for a sum, the terms of all sums that it is made of, in whatever order."""
    for slot in program.inputs(record):
        for origin in program.origins(record, slot):
            source = program.records[origin.value[0]]
            if depth and short(record.op) == short(source.op) == "add":
                yield from _terms(program, source, depth - 1)
            else:
                yield origin.value


def _slot_in(ref: Program, ref_seq: int, record: StoredRecord, index: int) -> int:
    """The slot of the reference's op that has the name of a slot of its partner's."""
    name = record.slots[index].name
    for slot in ref.records[ref_seq].slots:
        if slot.name == name:
            return slot.index
    return index


def _blocks(
    ref_program: Program, target_program: Program, ref: Sequence[Element], target: Sequence[Element]
) -> list[tuple[slice, slice]]:
    """Cuts a problem that is too large, at elements that occur once on both sides and in one order."""
    if len(ref) * len(target) <= MAX_CELLS:
        return [(slice(0, len(ref)), slice(0, len(target)))]
    signatures = [
        [_signature(program, e) for e in elements]
        for program, elements in ((ref_program, ref), (target_program, target))
    ]
    counts = [Counter(s) for s in signatures]
    place = {s: j for j, s in enumerate(signatures[1]) if counts[1][s] == 1}
    unique = [(i, place[s]) for i, s in enumerate(signatures[0]) if counts[0][s] == 1 and s in place]
    cuts = [(0, 0)]
    for i, j in _longest_increasing(unique):
        if (i - cuts[-1][0]) * (j - cuts[-1][1]) > MAX_CELLS // 16:
            cuts.append((i, j))
    cuts.append((len(ref), len(target)))
    blocks = []
    for (i, j), (k, l) in itertools.pairwise(cuts):  # noqa: E741
        pieces = -(-((k - i) * (l - j)) // MAX_CELLS)
        for p in range(pieces):  # no anchors at all: cut both in proportion
            blocks.append(
                (
                    slice(i + (k - i) * p // pieces, i + (k - i) * (p + 1) // pieces),
                    slice(j + (l - j) * p // pieces, j + (l - j) * (p + 1) // pieces),
                )
            )
    return blocks


def _longest_increasing(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest subsequence in which the second numbers ascend; the first do already."""
    from bisect import bisect_left

    tails: list[int] = []
    at: list[int] = []
    previous = [-1] * len(pairs)
    for index, (_, j) in enumerate(pairs):
        position = bisect_left(tails, j)
        previous[index] = at[position - 1] if position else -1
        if position == len(tails):
            tails.append(j)
            at.append(index)
        else:
            tails[position] = j
            at[position] = index
    found = []
    index = at[-1] if at else -1
    while index >= 0:
        found.append(pairs[index])
        index = previous[index]
    return found[::-1]


def _are_alike(
    ref_program: Program, ref: Sequence[Element], target_program: Program, target: Sequence[Element]
) -> bool:
    """Whether two bodies have the same elements in the same order, as far as `Features` can tell."""
    return len(ref) == len(target) and all(
        a.marker == b.marker
        and a.edge == b.edge
        and (a.record is None) == (b.record is None)
        and (
            a.marker is not None
            or a.record is None
            or b.record is None
            or (
                a.record.op == b.record.op
                and a.record.args == b.record.args
                and _main_type(ref_program, a) == _main_type(target_program, b)
                and _producer_terms(ref_program, a.record) == _producer_terms(target_program, b.record)
                and _reader_terms(ref_program, a.record) == _reader_terms(target_program, b.record)
            )
        )
        for a, b in zip(ref, target, strict=True)
    )


def _main_type(program: Program, element: Element) -> Any:
    slot = _main(program, element)
    return (slot.shape, dtype_class(slot.dtype)) if slot is not None else None


# Features of one element ------------------------------------------------------------------------------


def _signature(program: Program, element: Element) -> Any:
    if element.marker is not None:
        return ("call", element.marker)
    assert element.record is not None
    return (
        _name(element),
        _shape(program, element),
        scalars(element.record),
        tuple(sorted(_producers(program, element).items())),
        tuple(sorted(_readers(program, element).items())),
    )


def _name(element: Element) -> str:
    return "" if element.record is None or element.marker is not None else short(element.record.op)


def scalars(record: StoredRecord) -> str:
    """The arguments that are no tensors, as text; a number that came from `.item()` is no constant."""
    plain = {name: value for name, value in record.args if not _holds_tensor(value)}
    return json.dumps(plain, sort_keys=True, default=str)


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "ref" in value or "item" in value or any(_holds_tensor(v) for v in value.values())
    return isinstance(value, (list, tuple)) and any(_holds_tensor(v) for v in value)


def _main(program: Program, element: Element) -> Any:
    if element.record is None or element.marker is not None:
        return None
    outputs = program.outputs(element.record)
    return outputs[0] if outputs else None


def _numel(program: Program, element: Element) -> float:
    slot = _main(program, element)
    return float(np.prod([float(s) for s in slot.shape])) if slot is not None else -1.0


def _shape(program: Program, element: Element) -> Any:
    slot = _main(program, element)
    return tuple(sorted(s for s in slot.shape if s != 1)) if slot is not None else None


def _dtype_class(program: Program, element: Element) -> str:
    slot = _main(program, element)
    return dtype_class(slot.dtype) if slot is not None else ""


def _producers(program: Program, element: Element) -> Counter[str]:
    if element.record is None or element.marker is not None:
        return Counter()
    return Counter(_producer_terms(program, element.record))


def _producer_terms(program: Program, record: StoredRecord) -> list[str]:
    found = []
    for slot in program.inputs(record):
        for origin in program.origins(record, slot)[:4]:
            owner = program.records[origin.value[0]]
            if owner.kind == "param":
                found.append(f"param {owner.name}")
            elif program.is_leaf(origin.value):
                found.append("leaf")
            else:
                found.append(family(owner.op))
    return found


def _readers(program: Program, element: Element) -> Counter[str]:
    if element.record is None or element.marker is not None:
        return Counter()
    return Counter(_reader_terms(program, element.record))


def _reader_terms(program: Program, record: StoredRecord) -> list[str]:
    found = []
    for slot in program.outputs(record):
        for seq, index in program.consumers.get((record.seq, slot.index), ())[:16]:
            reader = program.records[seq]
            found.append(f"{family(reader.op)} {reader.slots[index].name}")
    return found


def _equal(a: Sequence[Any], b: Sequence[Any]) -> npt.NDArray[np.bool_]:
    codes: dict[Any, int] = {}
    first = np.array([codes.setdefault(x, len(codes)) for x in a], dtype=np.int64)
    second = np.array([codes.setdefault(x, len(codes)) for x in b], dtype=np.int64)
    equal: npt.NDArray[np.bool_] = first[:, None] == second[None, :]
    return equal


def _overlap(a: Sequence[Counter[Any]], b: Sequence[Counter[Any]]) -> Matrix:
    """Shared terms over all terms, 1 where both have none."""
    terms: dict[Any, int] = {}
    for counter in (*a, *b):
        for term in counter:
            terms.setdefault(term, len(terms))
    tables = []
    for counters in (a, b):
        table = np.zeros((len(counters), len(terms)), dtype=np.float32)
        for row, counter in enumerate(counters):
            for term, count in counter.items():
                table[row, terms[term]] = count
        tables.append(table)
    sizes = [table.sum(axis=1) for table in tables]
    # The sum of minima would be exact; a product of roots is close enough, and fast.
    shared = np.minimum(
        np.sqrt(tables[0]) @ np.sqrt(tables[1]).T, np.minimum(sizes[0][:, None], sizes[1][None, :])
    )
    union = sizes[0][:, None] + sizes[1][None, :] - shared
    result: Matrix = np.where(union > 0, shared / np.maximum(union, 1e-9), 1.0).astype(np.float32)
    return result
