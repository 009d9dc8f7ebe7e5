"""Which rows of two tensors belong together, where two steps hold the same tokens in different places.

A tensor does not say which of its dims are the batch, the tokens or the keys of a cache. Sizes do: a dim is
the batch where the reference has as many rows as its step, and the target as its own; likewise the tokens, a
flattened batch of tokens, the batch with heads folded in, and the keys, where the reference or the target has
exactly as many as the request has positions. Every way of reading the shapes that leaves nothing unexplained
is a hypothesis. Where none is left, the tensors are not comparable, and that is what is said.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from dispatch_trace.align.positions import Cell, StepRows
from dispatch_trace.align.steps import StepPair

Array: TypeAlias = npt.NDArray[Any]
Role: TypeAlias = Literal["same", "batch", "tokens", "flat", "folded", "keys"]
_MAX_DIMS = 6
_MAX_READINGS = 4


@dataclass(frozen=True, slots=True)
class Selected:
    """What of two arrays belongs together.

    Attributes:
      ref, target: of one shape.
      transform: in words, from the target's point of view.
    """

    ref: Array
    target: Array
    transform: str


class RowMap:
    """Finds what belongs together in tensors of one pair of steps.

    Attributes:
      trivial: nothing moves and nothing is padding, as far as rows and tokens go.
    """

    def __init__(self, pair: StepPair) -> None:
        assert pair.ref_rows is not None and pair.target_rows is not None
        self._ref, self._target = pair.ref_rows, pair.target_rows
        self._cells = pair.cells
        self.trivial = pair.is_plain
        groups: dict[str, list[tuple[Cell, Cell]]] = {}
        for a, b in pair.cells:
            groups.setdefault(b.request, []).append((a, b))
        self._requests = [
            _Request(name, cells, pair.offsets.get(name, (0, 0)), self._ref, self._target)
            for name, cells in groups.items()
        ]

    def readings(
        self, ref: Sequence[int], target: Sequence[int], keys: int | None = None
    ) -> list[tuple[Role, ...]] | None:
        """The likeliest ways to read two shapes, best first; empty where there is none.

        Args:
          keys: the dim of the keys, where the tensors are known to be caches.
        Returns: None where the tensors belong together as they are.
        """
        if keys is not None:
            return self._of_cache(tuple(ref), tuple(target), keys)
        if tuple(ref) == tuple(target) and self.trivial:
            return None
        ref, target = self._same_rank(ref, target)
        if len(ref) != len(target) or len(ref) > _MAX_DIMS:
            return []
        ranked = sorted((self._rank(roles, ref), roles) for roles in self._readings(ref, target))
        likeliest = [roles for rank, roles in ranked if rank[0] == ranked[0][0][0]][:_MAX_READINGS]
        whole = tuple("same" for _ in ref)
        return None if likeliest[:1] == [whole] and tuple(ref) == tuple(target) else likeliest

    def select(self, readings: Iterable[tuple[Role, ...]], ref: Array, target: Array) -> list[Selected]:
        """What of two arrays belongs together, by each reading of their shapes."""
        shapes = self._same_rank(ref.shape, target.shape)
        ref, target = ref.reshape(shapes[0]), target.reshape(shapes[1])
        found = (self._apply(roles, ref, target) for roles in readings)
        return [selected for selected in found if selected is not None]

    # Readings -----------------------------------------------------------------------------------------

    def _of_cache(self, ref: tuple[int, ...], target: tuple[int, ...], keys: int) -> list[tuple[Role, ...]]:
        """A cache: rows first, and beyond the request's keys stands what earlier requests left."""
        if len(ref) != len(target) or not 0 < keys < len(ref):
            return []
        rest = [d for d in range(1, len(ref)) if d != keys]
        rows = (ref[0], target[0]) == (self._ref.batch, self._target.batch)
        if not rows or any(ref[d] != target[d] for d in rest):
            return []  # which row of a larger cache is the request's is not told
        if any(r.keys(ref[keys], target[keys], known=True) is None for r in self._requests):
            return []
        roles: list[Role] = ["same" for _ in ref]
        roles[0], roles[keys] = "batch", "keys"
        return [tuple(roles)]

    def _readings(self, ref: Sequence[int], target: Sequence[int]) -> Iterator[tuple[Role, ...]]:
        options = [self._roles(d, a, b) for d, (a, b) in enumerate(zip(ref, target, strict=True))]
        for roles in itertools.product(*options):
            rows = sum(role in ("batch", "flat", "folded") for role in roles)
            tokens = sum(role in ("tokens", "flat") for role in roles)
            if rows <= 1 and tokens <= 1 and roles.count("keys") <= 1:
                yield roles

    def _roles(self, dim: int, a: int, b: int) -> list[Role]:
        found: list[Role] = []
        ours, theirs = self._target, self._ref
        if a == b:
            found.append("same")
        if (a, b) == (theirs.batch, ours.batch) and (a > 1 or b > 1):
            found.append("batch")
        if (a, b) == (theirs.tokens, ours.tokens) and (a > 1 or b > 1):
            found.append("tokens")
        flat = theirs.batch * theirs.tokens, ours.batch * ours.tokens
        both = theirs.batch * ours.batch > 1 and theirs.tokens * ours.tokens > 1
        if (a, b) == flat and both:
            found.append("flat")
        fold = a // theirs.batch
        if fold > 1 and theirs.batch != ours.batch and (a, b) == (fold * theirs.batch, fold * ours.batch):
            found.append("folded")
        if dim and a != b and all(r.keys(a, b) is not None for r in self._requests):
            found.append("keys")
        return found

    def _rank(self, roles: tuple[Role, ...], shape: Sequence[int]) -> tuple[Any, ...]:
        """Smaller is likelier: rows and tokens are looked for first, and in the first dims."""
        rows = next((d for d, role in enumerate(roles) if role in ("batch", "flat", "folded")), None)
        tokens = next((d for d, role in enumerate(roles) if role in ("tokens", "flat")), None)
        moved_rows = [a.row for a, _ in self._cells] != [b.row for _, b in self._cells]
        moved_rows = moved_rows or self._ref.batch != self._target.batch
        moved_tokens = [a.place for a, _ in self._cells] != [b.place for _, b in self._cells]
        moved_tokens = moved_tokens or self._ref.tokens != self._target.tokens
        missing = (rows is None and moved_rows) + (tokens is None and moved_tokens)
        # Keys explain what nothing else does; a folded batch what a plain one does not.
        unlikely = missing + roles.count("folded")
        places = (
            len(shape) if rows is None else rows,
            len(shape) if tokens is None else tokens,
        )
        return unlikely, places, roles.count("keys")

    # Application --------------------------------------------------------------------------------------

    def _apply(self, roles: tuple[Role, ...], ref: Array, target: Array) -> Selected | None:
        if "keys" not in roles:
            a, b = (
                _gather(ref, roles, self._ref, [c for c, _ in self._cells]),
                _gather(target, roles, self._target, [c for _, c in self._cells]),
            )
            return Selected(a, b, self._describe(roles, ref, target)) if a.shape == b.shape else None
        dim = roles.index("keys")
        parts: list[tuple[Array, Array]] = []
        for request in self._requests:
            keys = request.keys(ref.shape[dim], target.shape[dim], known=True)
            assert keys is not None
            a = _gather(np.take(ref, keys[0], axis=dim), roles, self._ref, [c for c, _ in request.cells])
            b = _gather(
                np.take(target, keys[1], axis=dim), roles, self._target, [c for _, c in request.cells]
            )
            if a.shape != b.shape:
                return None
            parts.append((a, b))
        words = self._describe(roles, ref, target)
        if len(parts) == 1:
            return Selected(parts[0][0], parts[0][1], words)
        joined = [np.concatenate([p[side].reshape(-1) for p in parts]) for side in (0, 1)]
        return Selected(joined[0], joined[1], words)

    def _same_rank(
        self, ref: Sequence[int], target: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Parts a flattened batch of tokens where the other side has two dims for it."""
        if len(ref) == len(target) - 1:
            return _parted(ref, self._ref), tuple(target)
        if len(target) == len(ref) - 1:
            return tuple(ref), _parted(target, self._target)
        return tuple(ref), tuple(target)

    def _describe(self, roles: tuple[Role, ...], ref: Array, target: Array) -> str:
        cells = [b for _, b in self._cells]
        rows = sorted({c.row for c in cells})
        places = sorted({c.place for c in cells})
        words = []
        for dim, role in enumerate(roles):
            size = target.shape[dim]
            if role in ("batch", "folded") and (self._target.batch != len(rows) or not self.trivial):
                words.append(f"{_numbers('row', rows)} of {self._target.batch} (dim {dim})")
            elif role == "tokens" and len(places) != size:
                words.append(f"{_numbers('place', places)} of {size} (dim {dim})")
            elif role == "flat":
                words.append(f"{len(cells)} of {size} rows (dim {dim})")
            elif role == "keys":
                found = [r.keys(ref.shape[dim], size, known=True) for r in self._requests]
                counts = [len(k[0]) for k in found if k is not None]
                words.append(f"{'/'.join(map(str, counts))} of {size} keys (dim {dim})")
        return ", ".join(words)


class _Request:
    """What of a step pair belongs to one request."""

    def __init__(
        self,
        name: str,
        cells: list[tuple[Cell, Cell]],
        offsets: tuple[int, int],
        ref: StepRows,
        target: StepRows,
    ) -> None:
        self.name = name
        self.cells = cells
        self._offsets = offsets
        # Keys are what the request has seen up to here.
        self.num_keys = max((a.position for a, _ in cells), default=-1) + 1
        if not (ref.tokens and target.tokens):
            self.num_keys = 0  # nothing was said of positions
        self._in_step = tuple(_own_keys(rows, name, self.num_keys) for rows in (ref, target))
        self._tokens = (ref.tokens, target.tokens)

    def keys(self, ref: int, target: int, *, known: bool = False) -> tuple[list[int], list[int]] | None:
        """The places of the request's keys in dims of these sizes; None where they are no keys.

        Args:
          known: they are, if they can be.
        """
        if self.num_keys < 1:
            return None
        found = [self._of_side(side, size) for side, size in ((0, ref), (1, target))]
        if found[0] is None or found[1] is None:
            return None
        if known:
            return found[0], found[1]
        # One side at least must have just as many keys as there are, or as its step has tokens.
        fits = ref == self.num_keys or target == self.num_keys
        fits = fits or (ref == self._tokens[0] and self._in_step[0] is not None)
        fits = fits or (target == self._tokens[1] and self._in_step[1] is not None)
        return (found[0], found[1]) if fits else None

    def _of_side(self, side: int, size: int) -> list[int] | None:
        own = self._in_step[side]
        if size == self._tokens[side] and own is not None:
            return own
        offset = self._offsets[side]
        return list(range(offset, offset + self.num_keys)) if size >= offset + self.num_keys else None


def _own_keys(rows: StepRows, name: str, count: int) -> list[int] | None:
    """Places of positions 0, 1, … of a request where all of them stand in the step itself."""
    cells = {c.position: c.place for c in rows.cells if c.request == name}
    return [cells[p] for p in range(count)] if all(p in cells for p in range(count)) else None


def _gather(array: Array, roles: Sequence[Role], rows: StepRows, cells: Sequence[Cell]) -> Array:
    """The cells' part of an array: [cells, rest] where batch and tokens are dims of their own."""
    batch = roles.index("batch") if "batch" in roles else None
    tokens = roles.index("tokens") if "tokens" in roles else None
    if "folded" in roles:
        batch = roles.index("folded")
        fold = array.shape[batch] // rows.batch
        shape = array.shape
        array = array.reshape(*shape[:batch], rows.batch, fold, *shape[batch + 1 :])
        if tokens is not None and tokens > batch:
            tokens += 1
    if batch is not None and tokens is not None:
        moved = np.moveaxis(array, (batch, tokens), (0, 1))
        picked: Array = moved[[c.row for c in cells], [c.place for c in cells]]
        return picked
    if "flat" in roles:
        return np.take(array, [c.row * rows.tokens + c.place for c in cells], axis=roles.index("flat"))
    if batch is not None:
        return np.take(array, list(dict.fromkeys(c.row for c in cells)), axis=batch)
    if tokens is not None:
        return np.take(array, list(dict.fromkeys(c.place for c in cells)), axis=tokens)
    return array


def _parted(shape: Sequence[int], rows: StepRows) -> tuple[int, ...]:
    tokens = max(rows.tokens, 1)
    if shape and shape[0] == rows.batch * tokens:
        return (rows.batch, tokens, *shape[1:])
    return tuple(shape)


def _numbers(word: str, numbers: Sequence[int]) -> str:
    if not numbers:
        return f"no {word}"
    if len(numbers) == 1:
        return f"{word} {numbers[0]}"
    if list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{word}s {numbers[0]}-{numbers[-1]}"
    return f"{len(numbers)} {word}s"
