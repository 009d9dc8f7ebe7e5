"""How far one recorded value is from another, from the best evidence that both traces hold.

In this order: equal hashes; the data of both (exact, float64, in chunks); sketches and statistics. A
difference that cannot be known is said to be unknown, with the reason; it is never guessed. Elements that are
not finite, or of the size by which masks stand for -inf, are compared by place and kept out of norms.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dispatch_trace import kernel_build
from dispatch_trace.align.canon import dtype_class
from dispatch_trace.align.lens import StepLens
from dispatch_trace.align.row_sums import Array, RowSums, mapped_row_sums, row_sums
from dispatch_trace.align.rows import RowMap
from dispatch_trace.align.steps import StepKey
from dispatch_trace.align.summaries import (
    SKETCH_FLOOR,
    WHY_UNKNOWN,
    KnownDifferences,
    Summaries,
    summary_differences,
)
from dispatch_trace.errors import ConfigError, DispatchTraceError, TraceFormatError
from dispatch_trace.kernel_build import Library
from dispatch_trace.metrics import as_numpy
from dispatch_trace.per_step import Together, each
from dispatch_trace.schema import StoredContent
from dispatch_trace.store.mapped import Mapped
from dispatch_trace.store.reader import RankReader

# Elements from which on tensors are compared where they lie, by the compiled functions.
MIN_MAPPED = 1 << 16
# Expanded views can have any number of elements; only real ones are compared one by one.
MAX_ELEMENTS = 1 << 32
_CACHED_BYTES = 1 << 28
# Numbers from here on stand for values laid out of several contents.
LAID_OUT = 1 << 60
# Places of a layout that no row of the reference fills: zeros, and what the target alone has.
ZEROS, OWN = -1, -2
_MAX_PERMUTED_DIMS = 5


@dataclass(frozen=True, slots=True)
class Rows:
    """Compare the first `keep` rows along `dim`, where sizes differ: the rest is padding."""

    dim: int
    keep: int

    @classmethod
    def of(cls, given: Any) -> Rows | None:
        """Checks what a user passed: None, a Rows, or {"dim": …, "keep": …}.

        Raises:
          ConfigError: anything else.
        """
        if given is None or isinstance(given, Rows):
            return given
        try:
            rows = cls(int(given["dim"]), int(given["keep"]))
        except (TypeError, KeyError, ValueError):
            raise ConfigError(
                f"rows={given!r}: expected {{'dim': D, 'keep': N}}, the first N rows along dim D."
            ) from None
        if rows.keep < 0:
            raise ConfigError(f"rows={given!r}: a number of rows is not negative.")
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """target against ref.

    Attributes:
      known: False where the traces do not hold enough; `why` says what is missing.
      equal: no element differs (a zero's sign does not count).
      rho: ||target - ref|| / ||ref|| over comparable elements; inf where only ref is zero.
      nonfinite: elements (or, from statistics, a difference of counts) finite on one side only, or not
        finite in different ways.
      method: "hash", "data" or "sketch".
      transform: "" or how the target was laid out anew ("reshaped", "permuted (1, 0)", "first 5 rows").
      worst: (row, its error relative to a typical row), from data only.
      floor: what sketches add by their own rounding; None: what `method` says.
    """

    known: bool = True
    why: str = ""
    equal: bool = False
    rho: float = 0.0
    nonfinite: int = 0
    method: str = "hash"
    transform: str = ""
    worst: tuple[tuple[int, ...], float] | None = None
    floor: float | None = None

    @property
    def rounding(self) -> float:
        """The relative error below which the difference is that of its own measurement."""
        if self.floor is not None:
            return self.floor
        return SKETCH_FLOOR if self.method == "sketch" else 0.0


EQUAL = Difference(equal=True)


def unknown(why: str) -> Difference:
    return Difference(known=False, why=why, method="")


@dataclass(frozen=True, slots=True)
class Layout:
    """How a value of the target is laid out of values of the reference, along one dim.

    Attributes:
      parts: contents of the reference, put one behind the other along `ref_axis`.
      sizes: of each along that axis.
      ref_axis, axis: of the parts, and of the target; a matrix is transposed where they differ.
      index: for each place along the target's axis the place among all parts; `ZEROS`, or `OWN` for what
        is padded with something else and not compared.
      numbers: the values are places along such an axis themselves (what a top-k chose).
      rows: the place of each row in the reference, where the first dim is in another order besides.
      ordered: False where the order is not known; the index then only counts.

    Stacks of matrices count as one matrix of all their rows (axis 0), or of all their columns (axis 1).
    """

    parts: tuple[int, ...]
    sizes: tuple[int, ...]
    ref_axis: int
    axis: int
    index: tuple[int, ...]
    numbers: bool = False
    rows: tuple[int, ...] = ()
    ordered: bool = True

    @property
    def transform(self) -> str:
        """In words, for people."""
        if not self.ordered:
            return "in an order not known"
        if self.numbers:
            return "numbers of places in another order"
        words = []
        total = sum(self.sizes)
        real = [i for i in self.index if i >= 0]
        if self.ref_axis != self.axis:
            words.append("transposed")
        if len(self.parts) > 1:
            words.append(f"{len(self.parts)} concatenated")
        if len(real) < len(self.index):
            own = " with values of its own" if OWN in self.index else ""
            words.append(f"padded from {len(real)} to {len(self.index)}{own}")
        if len(real) < total:
            words.append(f"{len(real)} of {total} rows")
        if real and real != list(range(real[0], real[0] + len(real))):
            blocks = sum(b != a + 1 for a, b in itertools.pairwise(real)) + 1
            words.append(f"in {blocks} pieces of another order")
        return ", ".join(words)

    @property
    def is_plain(self) -> bool:
        """Whether one value is laid out in its own order, transposed or not."""
        return self.ordered and len(self.parts) == 1 and self.index == tuple(range(self.sizes[0]))

    @property
    def in_order(self) -> Layout:
        """The same with the rows in the order of the reference, so that no more than padding is left."""
        rows = iter(sorted(i for i in self.index if i >= 0))
        return replace(self, index=tuple(next(rows) if i >= 0 else i for i in self.index))

    def of(self, parts: list[Array]) -> Array:
        """The value that the target ought to hold.

        Args:
          parts: the reference's values.
        """
        if self.numbers:
            return np.argsort(self.index)[parts[0]]
        if self.ref_axis == 0:
            parts = [
                p.reshape(-1, p.shape[-1]) if len(p) != n else p
                for p, n in zip(parts, self.sizes, strict=True)
            ]
        elif self.ref_axis == 1:
            parts = [columns_of(p) for p in parts]
        if self.rows:
            parts = [p[np.array(self.rows)] for p in parts]
        whole = np.concatenate(parts, axis=self.ref_axis) if len(parts) > 1 else parts[0]
        if self.index != tuple(range(whole.shape[self.ref_axis])):
            index = np.array(self.index)
            whole = np.take(whole, np.maximum(index, 0), axis=self.ref_axis)
            if (index < 0).any():
                zeros = [slice(None)] * whole.ndim
                zeros[self.ref_axis] = index < 0  # type: ignore[call-overload]
                whole[tuple(zeros)] = 0
        return whole if self.ref_axis == self.axis else np.swapaxes(whole, self.ref_axis, self.axis)


class Comparer:
    """Compares contents of two ranks, each pair once."""

    def __init__(
        self,
        ref: RankReader,
        target: RankReader,
        rows: Rows | None = None,
        maps: Mapping[tuple[StepKey, StepKey], RowMap | None] | None = None,
    ) -> None:
        """
        Args:
          rows: a cut that counts for all tensors.
          maps: by pair of steps which rows belong together; None for steps that pair as they are. Both
            readers are then lenses.
        """
        self.ref = ref
        self.target = target
        self.rows = rows
        self._maps = maps
        self._known: dict[tuple[int, int], Difference] = {}
        self._layouts: dict[int, Layout] = {}
        self._arrays: OrderedDict[tuple[bool, int], Array | None] = OrderedDict()
        self._cached_bytes = 0

    def compare(self, ref_id: int, target_id: int) -> Difference:
        """Difference of two contents, by number; -1 stands for a value that was not recorded."""
        if ref_id < 0 or target_id < 0:
            return unknown("no value was recorded")
        key = (ref_id, target_id)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._compare(*key)
        return found

    @property
    def is_plain(self) -> bool:
        """Whether contents are compared as they are, no rows cut off or looked up."""
        return self.rows is None and self._maps is None

    def compares_data(self, a: StoredContent, b: StoredContent) -> bool:
        """Whether `compare` will read the data of both, unless one cannot be read."""
        return (
            not (a.hash and a.hash == b.hash)
            and 0 < _numel(a.shape) == _numel(b.shape) <= MAX_ELEMENTS
            and a.has_data
            and b.has_data
        )

    def tell(self, ref_id: int, target_id: int, found: Difference) -> None:
        """Takes in what comparing two contents came to elsewhere."""
        self._known.setdefault((ref_id, target_id), found)

    def laid_out(self, layout: Layout) -> int:
        """The number under which a value laid out of several of the reference's is compared."""
        number = LAID_OUT + len(self._layouts)
        self._layouts[number] = layout
        return number

    def layout(self, ref_id: int) -> Layout | None:
        """The layout behind a number, None for a content that was recorded as it is."""
        return self._layouts.get(ref_id)

    def array(self, ref_side: bool, id: int) -> Array | None:
        """The data of a content as numbers, None where the trace holds none."""
        key = (ref_side, id)
        if key in self._arrays:
            self._arrays.move_to_end(key)
            return self._arrays[key]
        if ref_side and id in self._layouts:
            return self._laid_out(self._layouts[id])
        reader = self.ref if ref_side else self.target
        if reader.together(id) is not None:
            return None  # several contents, none of which has data
        array: Array | None = None
        content = reader.content(id)
        if content.has_data:
            try:
                array = reader.array(id)
                if array is None:
                    array = as_numpy(reader.tensor(id))
            except (DispatchTraceError, RuntimeError, TypeError, NotImplementedError):
                array = None
        self._arrays[key] = array
        self._cached_bytes += 0 if array is None else array.nbytes
        while self._cached_bytes > _CACHED_BYTES and len(self._arrays) > 2:
            _, dropped = self._arrays.popitem(last=False)
            self._cached_bytes -= 0 if dropped is None else dropped.nbytes
        return array

    def whole(self, ref_side: bool, id: int) -> Array | None:
        """All elements of a content, for layouts."""
        return self.array(ref_side, id)

    def _laid_out(self, layout: Layout) -> Array | None:
        parts = [self.whole(True, part) for part in layout.parts]
        return None if any(p is None for p in parts) else layout.of([p for p in parts if p is not None])

    def places(
        self, steps: tuple[StepKey, StepKey], ref: tuple[int, ...], target: tuple[int, ...], dim: int | None
    ) -> list[tuple[Array, Array]] | None:
        """Numbers of the elements that belong together in two tensors of paired steps.

        Args:
          steps: of the reference and of the target.
          ref, target: shapes.
          dim: of the keys, where both are caches.
        Returns: of both tensors, for every likely reading of their shapes; None where they pair as they are.
        """
        rows = None if self._maps is None else self._maps.get(steps)
        readings = None if rows is None else rows.readings(ref, target, dim)
        if rows is None or readings is None:
            return None
        first, second = (np.arange(_numel(shape)).reshape(shape) for shape in (ref, target))
        return [(part.ref, part.target) for part in rows.select(readings, first, second)]

    def permuted(self, ref_id: int, target_id: int, limit: float) -> Difference | None:
        """The best way to lay the target's dims out in another order, where that comes within `limit`."""
        ref, target = self.array(True, ref_id), self.array(False, target_id)
        if ref is None or target is None or ref.ndim < 2 or ref.ndim > _MAX_PERMUTED_DIMS:
            return None
        if sorted(ref.shape) != sorted(target.shape) or ref.ndim != target.ndim:
            return None
        best: Difference | None = None
        for order in itertools.permutations(range(target.ndim)):
            if order == tuple(range(target.ndim)) or tuple(target.shape[d] for d in order) != ref.shape:
                continue
            found = arrays_difference(ref, target.transpose(order))
            if found.rho <= limit and not found.nonfinite and (best is None or found.rho < best.rho):
                best = replace(found, transform=f"permuted {order}")
        return best

    # ----------------------------------------------------------------------------------------------

    def _compare_layout(self, ref_id: int, target_id: int) -> Difference:
        ref, target = self.array(True, ref_id), self.whole(False, target_id)
        if ref is None or target is None or not self._layouts[ref_id].ordered:
            return unknown("the values are laid out otherwise, and that takes the data of both")
        if ref.size != target.size:
            return unknown(f"shapes differ: {list(ref.shape)} against {list(target.shape)}")
        layout = self._layouts[ref_id]
        if layout.axis == 1:
            target = columns_of(target)
        if OWN in layout.index:
            axis = layout.axis - ref.ndim  # from the end: leading dims may be flattened on one side
            kept = np.flatnonzero(np.array(layout.index) != OWN)
            ref, target = np.take(ref, kept, axis), np.take(target, kept, axis)
        found = arrays_difference(ref.reshape(target.shape), target)
        return replace(found, transform=layout.transform)

    def _compare(self, ref_id: int, target_id: int) -> Difference:
        if ref_id in self._layouts:
            return self._compare_layout(ref_id, target_id)
        steps = self.ref.together(ref_id) or self.target.together(target_id)
        if steps is not None:
            return self._compare_steps(ref_id, target_id, steps)
        a, b = self.ref.content(ref_id), self.target.content(target_id)
        if self._maps is not None:
            found = self._mapped(self._maps, a, b)
            if found is not None:
                return found
        if a.hash and a.hash == b.hash:
            return EQUAL
        if a.shape != b.shape and _numel(a.shape) != _numel(b.shape):
            return self._cut(a, b)
        if _numel(a.shape) == 0 and a.shape == b.shape:
            return EQUAL
        if self.compares_data(a, b):
            found = self._from_mapped(ref_id, target_id)
            if found is not None:
                return found
            ref, target = self.array(True, ref_id), self.array(False, target_id)
            if ref is not None and target is not None:
                return self._from_arrays(ref, target)
        return self._from_sketches(a, b)

    def _mapped(
        self, maps: Mapping[tuple[StepKey, StepKey], RowMap | None], a: StoredContent, b: StoredContent
    ) -> Difference | None:
        """The difference of the rows that belong together; None where the tensors pair as they are."""
        assert isinstance(self.ref, StepLens) and isinstance(self.target, StepLens)
        steps = self.ref.step_of(a.id), self.target.step_of(b.id)
        if steps[0] is None or steps[1] is None:
            return None
        if (steps[0], steps[1]) not in maps:
            # What stands in steps that are no pair may still be one constant.
            return None if a.shape == b.shape and a.hash == b.hash else unknown("they stand in other steps")
        rows = maps[steps[0], steps[1]]
        picked = self.ref.is_picked(a.id) or self.target.is_picked(b.id)
        if picked and rows is not None and not rows.trivial:
            return unknown("which elements these are follows from values of all tokens of the step")
        dims = {d for d in (self.ref.cache_dim(a.id), self.target.cache_dim(b.id)) if d is not None}
        keys = dims.pop() if len(dims) == 1 else None
        readings = None if rows is None else rows.readings(a.shape, b.shape, keys)
        if rows is None or readings is None:
            return None
        shapes = f"{list(a.shape)} in the reference, {list(b.shape)} in the target"
        if not readings:
            return unknown(f"no way to read the shapes as rows of the same requests: {shapes}")
        ref, target = self.array(True, a.id), self.array(False, b.id)
        if ref is None or target is None:
            return unknown(f"rows lie in other places ({shapes}), and that takes the data of both")
        found = [
            replace(arrays_difference(part.ref, part.target), transform=part.transform)
            for part in rows.select(readings, ref, target)
        ]
        if not found:
            return unknown(f"the rows of the same requests have other shapes: {shapes}")
        return min(found, key=lambda d: (d.nonfinite, d.rho))

    def _from_arrays(self, ref: Array, target: Array) -> Difference:
        if ref.shape == target.shape:
            return arrays_difference(ref, target)
        return _as_reshaped(arrays_difference(ref.reshape(-1), target.reshape(-1)), ref.shape, target.shape)

    def mapped(self, ref_id: int, target_id: int) -> tuple[Mapped, Mapped] | None:
        """The data of two contents as it lies in files, where there is enough of it; else None."""
        if _numel(self.ref.content(ref_id).shape) < MIN_MAPPED:
            return None
        ref, target = self.ref.mapped(ref_id), self.target.mapped(target_id)
        return None if ref is None or target is None else (ref, target)

    def _from_mapped(self, ref_id: int, target_id: int) -> Difference | None:
        try:
            sides = self.mapped(ref_id, target_id)
            library = None if sides is None else kernel_build.find(wait=True)
            return None if sides is None or library is None else mapped_difference(library, *sides)
        except TraceFormatError:
            return None  # what can be said without the data is said by others

    def _cut(self, a: StoredContent, b: StoredContent) -> Difference:
        shapes = f"shapes differ: {list(a.shape)} against {list(b.shape)}"
        rows = self.rows
        if rows is None or len(a.shape) != len(b.shape) or not a.shape:
            return unknown(shapes)
        dim = rows.dim % len(a.shape) if -len(a.shape) <= rows.dim < len(a.shape) else None
        differing = [d for d in range(len(a.shape)) if a.shape[d] != b.shape[d]]
        if dim is None or differing != [dim]:
            return unknown(shapes)
        ref, target = self.array(True, a.id), self.array(False, b.id)
        if ref is None or target is None:
            return unknown(f"{shapes}, and padding cannot be cut off without data")
        keep = min(a.shape[dim], b.shape[dim])
        if keep % max(rows.keep, 1):
            return unknown(shapes)
        cut = tuple(slice(0, keep) if d == dim else slice(None) for d in range(len(a.shape)))
        found = arrays_difference(ref[cut], target[cut])
        return replace(found, transform=f"first {keep} rows of dim {dim}")

    def _from_sketches(self, a: StoredContent, b: StoredContent) -> Difference:
        ours, theirs = self.ref.content_table, self.target.content_table
        if ours is not None and theirs is not None:
            places = ours.places(np.array([a.id])), theirs.places(np.array([b.id]))
            known = ours.beside(theirs, KnownDifferences).at(*places)
            why, nonfinite, rho = (known[name][0].item() for name in ("why", "nonfinite", "rho"))
        else:
            ref, target = (
                Summaries.of([content], [reader.sketch(content.id) if content.has_sketch else None])
                for content, reader in ((a, self.ref), (b, self.target))
            )
            why, nonfinite, rho = (column[0].item() for column in summary_differences(ref, target))
        return sketch_difference(why, nonfinite, rho, a.shape == b.shape)

    def _compare_steps(self, ref_id: int, target_id: int, steps: Together) -> Difference:
        """As `_compare` of contents that have sketches only, for all steps that are taken together."""
        ours, theirs = self.ref.per_step(ref_id, steps), self.target.per_step(target_id, steps)
        found = ours.table.beside(theirs.table, KnownDifferences).at(ours.places, theirs.places)
        equal, why, nonfinite, rho = (found[name] for name in ("equal", "why", "nonfinite", "rho"))
        if equal.all():
            return EQUAL
        a, b = ours.first, theirs.first
        if a.shape != b.shape and _numel(a.shape) != _numel(b.shape):
            return self._cut(a, b)
        if _numel(a.shape) == 0 and a.shape == b.shape:
            return EQUAL
        steps.decide(why == why[0])
        steps.decide(nonfinite == nonfinite[0])
        if why[0]:
            return unknown(WHY_UNKNOWN[why[0]])
        if nonfinite[0]:
            return Difference(rho=math.inf, nonfinite=int(nonfinite[0]), method="sketch")
        return Difference(
            equal=not rho.any(),
            rho=each(rho, steps),
            method="sketch",
            transform="" if a.shape == b.shape else "reshaped",
            floor=each(np.where(equal, 0.0, SKETCH_FLOOR), steps),
        )


def columns_of(stack: Array) -> Array:
    """The columns of all matrices of a stack [n, rows, columns] side by side; a matrix as it is."""
    return stack if stack.ndim != 3 else np.moveaxis(stack, 1, 0).reshape(stack.shape[1], -1)


def sketch_difference(why: int, nonfinite: int, rho: float, same_shape: bool) -> Difference:
    """What `summary_differences` says of one pair."""
    if why:
        return unknown(WHY_UNKNOWN[why])
    return Difference(
        equal=rho == 0.0,
        rho=rho,
        nonfinite=nonfinite,
        method="sketch",
        transform="" if nonfinite or same_shape else "reshaped",
    )


def arrays_difference(ref: Array, target: Array) -> Difference:
    """The difference of two arrays of one shape; complex values by modulus."""
    return _difference_of(row_sums(ref, target))


def _difference_of(found: RowSums) -> Difference:
    if found.odd:
        return Difference(rho=math.inf, nonfinite=found.odd, method="data")
    squared, scale = float(found.errors.sum()), float(found.norms.sum())
    if squared == 0.0:
        return Difference(equal=True, method="data")
    rho = math.sqrt(squared / scale) if scale else math.inf
    worst = _worst_of(np.sqrt(found.errors), np.sqrt(found.norms), found.index) if found.index else None
    return Difference(rho=rho, method="data", worst=worst)


def mapped_difference(library: Library, ref: Mapped, target: Mapped) -> Difference | None:
    """As `arrays_difference` of two tensors with as many elements, straight from their files.

    Returns: None where the compiled functions do not take them.
    Raises:
      TraceFormatError: what lies in a file is not what its hash says.
    """
    found = mapped_row_sums(library, ref, target)
    if found is None:
        return None
    return _as_reshaped(_difference_of(found), ref.shape, target.shape)


def _as_reshaped(found: Difference, ref: tuple[int, ...], target: tuple[int, ...]) -> Difference:
    return found if ref == target else replace(found, transform="reshaped", worst=None)


def _worst_of(errors: Array, norms: Array, shape: tuple[int, ...]) -> tuple[tuple[int, ...], float]:
    """The worst row, from the L2 norms [m] of errors and of the reference."""
    typical = math.sqrt(float(np.mean(norms**2)))
    relative = errors / np.maximum(np.maximum(norms, typical), 1e-300)
    at = int(relative.argmax())
    index = tuple(int(i) for i in np.unravel_index(at, shape))
    return index, float(relative[at])


def _numel(shape: tuple[int, ...]) -> int:
    return math.prod(shape)


def same_class(a: str, b: str) -> bool:
    """Whether values of two dtypes are numbers of one kind: a code is not the number it stands for."""
    first, second = dtype_class(a), dtype_class(b)
    return first == second or {first, second} <= {"f", "c"}
