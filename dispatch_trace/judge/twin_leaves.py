"""Harmonised leaves: both float64 runs start from the same numbers where the programs mean the same.

* Leaves of two float dtypes whose elements round to the same in the coarser one: both runs get that. Where
  they round to the same numbers in another order (a transposed weight), the finer is rounded as it stands.
* A leaf of one side that stands for what the other computes (a table, say), equal within rounding as
  recorded: both get the computed one (the leaf, where only the target computes).
* A weight that one side keeps rounded to a grid, as far as the estimates grant it: both get the grid's.
* Low precision leaves of one dtype that are one unit in the last place apart: both get the reference's.
* Leaves that are no farther apart than a measured floor (runs of the reference, or inputs of a partial
  recording, see `given`): both get the reference's.

What differs by more stays as it is, element by element: that is a `parameter` finding if it matters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dispatch_trace.align.canon import dtype_class
from dispatch_trace.align.graph import Program, Value
from dispatch_trace.align.pairs import Link, Pairing
from dispatch_trace.align.summaries import EXTREME
from dispatch_trace.errors import DispatchTraceError
from dispatch_trace.judge.estimates import roundoff
from dispatch_trace.judge.noise import NoisePass, within
from dispatch_trace.judge.quantised import quantisation_noise
from dispatch_trace.metrics import FLOAT_FORMATS, coarser
from dispatch_trace.schema import StoredContent, StoredRecord
from dispatch_trace.store.layouts import dtype_from_name
from dispatch_trace.store.reader import RankReader

# Rounding twice moves some elements by a unit in the last place; this share of all at most.
_TWICE_SHARE = 0.25
# In dtypes finer than this a unit in the last place is within what counts as equal anyway.
_COARSE = 2.0**-12

Make = Callable[[], torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Healed:
    """A leaf that was made equal on both sides.

    Attributes:
      ref, target: the values.
      error: ||target - ref|| / ||ref|| before.
      why: in words.
    """

    ref: Value
    target: Value
    error: float
    why: str


class Leaves:
    """What the two float64 runs read instead of what was recorded.

    Attributes:
      healed: what was made equal.
      kept: values of the reference that the target's leaves stand for, to be kept whole in its run.
    """

    def __init__(self, pairing: Pairing, noise: NoisePass) -> None:
        self._pairing = pairing
        self._noise = noise
        self._ref: dict[int, Make] = {}
        self._hashes: tuple[dict[int, str], dict[int, str]] = ({}, {})
        self._target: dict[int, Make] = {}
        self._late: dict[int, Value] = {}  # target content -> the reference's value that it stands for
        self._snapped: dict[Value, int] = {}  # computed value of the target -> leaf of the reference
        self.healed: list[Healed] = []
        self._roundings: Counter[tuple[str, str]] = Counter()
        self._unlike = 0
        self._compared: tuple[set[int], set[int]] = (set(), set())  # contents, by side
        for links in list(pairing.links.values()):
            for link in links:
                self._harmonise(link)
        self._round_unpaired()
        self.kept = frozenset(self._late.values())

    # For the runs -----------------------------------------------------------------------------------

    def ref(self, content: int) -> torch.Tensor | None:
        """What the reference's run reads for a recorded content; None for the recorded value."""
        make = self._ref.get(content)
        return None if make is None else make()

    def target(self, content: int) -> torch.Tensor | None:
        """The same for the target's run."""
        make = self._target.get(content)
        return None if make is None else make()

    def hash(self, side: int, content: int, recorded: str) -> str:
        """The hash of what a run reads for a content, "" where it has none.

        Args:
          side: 0 for the reference, 1 for the target.
          recorded: the hash of what was recorded.
        """
        known = self._hashes[side].get(content)
        if known is not None:
            return known
        replaced = content in (self._target if side else self._ref) or (side and content in self._late)
        return "" if replaced else recorded

    def late(self, content: int) -> Value | None:
        """The computed value of the reference that a leaf of the target stands for."""
        return self._late.get(content)

    def snapped(self, value: Value) -> torch.Tensor | None:
        """The leaf of the reference that a computed value of the target stands for."""
        content = self.snapped_to(value)
        if content is None:
            return None
        found = self.ref(content)
        return _load(self._pairing.ref.reader, content) if found is None else found

    def snapped_to(self, value: Value) -> int | None:
        """The content of that leaf, in the reference's recording."""
        return self._snapped.get(value)

    # Finding pairs ----------------------------------------------------------------------------------

    def _harmonise(self, link: Link) -> None:
        pairing = self._pairing
        theirs, ours = pairing.ref.is_leaf(link.ref), pairing.target.is_leaf(link.target)
        a, b = pairing.ref.slot(link.ref), pairing.target.slot(link.target)
        if not (theirs or ours) or a.content < 0 or b.content < 0:
            return
        if dtype_class(a.dtype) not in "fc" or dtype_class(b.dtype) not in "fc":
            return
        if (link.ref_content, link.target_content) != (a.content, b.content):
            return  # seen through views: not element by element
        if theirs and ours:
            if any(pairing.comparer.layout(k.ref_content) for k in pairing.links[link.target]):
                return  # laid out otherwise: rounded like the others, not element by element
            if [s for s in a.shape if s != 1] != [s for s in b.shape if s != 1]:
                return
            self._pair(link, a.content, b.content, a.dtype, b.dtype)
        elif self._is_close(link):
            if ours and pairing.ref.records[link.ref[0]].kind == "op":
                self._late.setdefault(b.content, link.ref)
            elif theirs and pairing.target.records[link.target[0]].kind == "op":
                self._snapped.setdefault(link.target, a.content)

    def _is_close(self, link: Link) -> bool:
        state = self._noise.state(link.target)
        return bool(state.explained and state.link is not None and state.link.ref == link.ref)

    def _pair(self, link: Link, a: int, b: int, a_dtype: str, b_dtype: str) -> None:
        pairing = self._pairing
        first, second = pairing.ref.reader.content(a), pairing.target.reader.content(b)
        if _numel(first) == _numel(second):
            self._compared[0].add(a)
            self._compared[1].add(b)
        if (first.hash and first.hash == second.hash) or not (first.has_data and second.has_data):
            return
        if a in self._ref or b in self._target:
            return
        ref, target = _load(pairing.ref.reader, a), _load(pairing.target.reader, b)
        if ref is None or target is None or ref.numel() != target.numel() or ref.numel() == 0:
            return
        if ref.is_complex() or target.is_complex():
            return
        difference = pairing.compare(link)
        floor = pairing.floors.get(link.ref, 0.0)
        if floor and difference.known and within(difference, floor):
            self._give_ref(a, b)  # its own runs differ by as much, or it came from outside the recording
            return
        error = difference.rho if difference.known else 0.0
        if a_dtype == b_dtype:
            if roundoff(a_dtype) > _COARSE and _one_unit_apart(ref, target, a_dtype):
                self._give_ref(a, b)
                self.healed.append(Healed(link.ref, link.target, error, "one unit in the last place"))
            else:
                self._grid(link, a, b, error)
            return
        if not {a_dtype, b_dtype} <= FLOAT_FORMATS.keys():
            return
        common = coarser(a_dtype, b_dtype)
        target = target.reshape(ref.shape)
        rounded = ref.to(dtype_from_name(common))
        same = _equal_rounded(ref, rounded, target, common)
        if same is None or bool(same.all()):
            # The coarser side's own values: both were rounded to the same, or one of them twice.
            if common == b_dtype:
                self._give_target(a, b)
            else:
                self._give_ref(a, b)
            self._roundings[a_dtype, b_dtype] += 1
            self.healed.append(Healed(link.ref, link.target, error, f"rounded to {common}"))
        elif _hold_same_numbers(rounded, target.to(rounded.dtype)):
            # In another order, which the program may undo: rounded where they stand.
            if common == b_dtype:
                self._ref[a] = _rounding(pairing.ref.reader, a, common)
            else:
                self._target[b] = _rounding(pairing.target.reader, b, common)
            self._roundings[a_dtype, b_dtype] += 1
        elif not self._grid(link, a, b, error):
            self._unlike += 1
            self._ref[a] = _holding(torch.where(same, rounded.double(), ref.double()))
            self._target[b] = _holding(torch.where(same, rounded.double(), target.double()))

    def _give_ref(self, a: int, b: int) -> None:
        """The target's run reads the reference's leaf."""
        self._target[b] = _taking(self._pairing.ref.reader, a)
        self._hashes[1][b] = self._pairing.ref.reader.content(a).hash

    def _give_target(self, a: int, b: int) -> None:
        """The reference's run reads the target's leaf."""
        self._ref[a] = _taking(self._pairing.target.reader, b)
        self._hashes[0][a] = self._pairing.target.reader.content(b).hash

    def _grid(self, link: Link, a: int, b: int, error: float) -> bool:
        """A weight rounded to a grid, as the estimates found, or would have but for the grid of its dtype."""
        state = self._noise.state(link.target)
        if not self._is_close(link):
            return False
        found = state.notes[0] if state.notes else None
        if found is None and state.difference is not None:
            found = quantisation_noise(self._pairing, link, state.difference)
        if found is None:
            return False
        self._give_target(a, b)
        self.healed.append(Healed(link.ref, link.target, error, found))
        return True

    def _round_unpaired(self) -> None:
        """Parameters without counterpart (laid out otherwise), where the others were merely rounded."""
        if len(self._roundings) != 1 or self._unlike > self._roundings.total() // 2:
            return
        ((a_dtype, b_dtype),) = self._roundings
        sides = (self._pairing.ref, self._ref, a_dtype), (self._pairing.target, self._target, b_dtype)
        lone = [
            _unpaired(program, compared, dtype)
            for (program, _, dtype), compared in zip(sides, self._compared, strict=True)
        ]
        if not (lone[0] and lone[1]):
            return
        common = coarser(a_dtype, b_dtype)
        for (program, known, dtype), records in zip(sides, lone, strict=True):
            if dtype != common:
                for record in records:
                    content = record.slots[0].content
                    known.setdefault(content, _rounding(program.reader, content, common))


def _unpaired(program: Program, compared: set[int], dtype: str) -> list[StoredRecord]:
    """Parameters of a dtype that somebody reads, and that no parameter of the other side was held against."""
    return [
        record
        for versions in program.params.values()
        for record in versions
        if record.slots[0].dtype == dtype
        and record.slots[0].content >= 0
        and record.slots[0].content not in compared
        and program.consumers.get((record.seq, 0))
    ]


# Values -----------------------------------------------------------------------------------------------


def _numel(content: StoredContent) -> int:
    return math.prod(content.shape)


def _load(reader: RankReader, content: int) -> torch.Tensor | None:
    try:
        value = reader.tensor(content)
    except DispatchTraceError:
        return None
    plain = value.layout is torch.strided and not value.is_nested and not value.is_quantized
    return value if plain and type(value) in (torch.Tensor, torch.nn.Parameter) else None


def _taking(reader: RankReader, content: int) -> Make:
    return lambda: _load(reader, content)


def _rounding(reader: RankReader, content: int, dtype: str) -> Make:
    def make() -> torch.Tensor | None:
        value = _load(reader, content)
        return None if value is None else value.to(dtype_from_name(dtype)).double()

    return make


def _holding(value: torch.Tensor) -> Make:
    return lambda: value.clone()  # a run takes over the memory of what it is given


def _equal_rounded(
    ref: torch.Tensor, rounded: torch.Tensor, target: torch.Tensor, dtype: str
) -> torch.Tensor | None:
    """Where two leaves round to the same; None for everywhere.

    Args:
      ref, target: [*shape].
      rounded: `ref` in `dtype`, the coarser one.
    """
    other = target.to(rounded.dtype)
    if torch.equal(rounded, other):
        return None
    same = _same(rounded.double(), other.double())
    twice = ~same & ((target.double() - ref.double()).abs() <= _unit(ref.double(), dtype))
    return same | twice if float(twice.double().mean()) <= _TWICE_SHARE else same


def _hold_same_numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one dtype hold the same numbers, in whatever order."""
    ends = a.aminmax(), b.aminmax()  # most that differ need no sorting
    if ends[0].min != ends[1].min or ends[0].max != ends[1].max:
        return False
    return torch.equal(a.flatten().sort().values, b.flatten().sort().values)


def _same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    huge = (a.abs() >= EXTREME) & (b.abs() >= EXTREME) & (a.sign() == b.sign())
    return (a == b) | (a.isnan() & b.isnan()) | huge


def _unit(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """One unit in the last place of `dtype` at each of these numbers."""
    known = FLOAT_FORMATS[dtype]
    _, exponent = torch.frexp(values)
    least = torch.clamp(exponent - 1, min=known.min_exponent)
    return torch.ldexp(torch.ones_like(values), least - known.mantissa_bits)


def _one_unit_apart(ref: torch.Tensor, target: torch.Tensor, dtype: str) -> bool:
    a, b = ref.double(), target.reshape(ref.shape).double()
    step = torch.maximum(_unit(a, dtype), _unit(b, dtype))
    return bool((_same(a, b) | ((a - b).abs() <= step)).all())
