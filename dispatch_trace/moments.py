"""Running statistics of the chunks of one tensor, by kind of dtype: floats, bytes, integers.

Each kind has the same three methods: `add` takes in a chunk, `clean` gives the values of a chunk as
finite floats for the sketch, `result` hands out `schema.STATISTICS`. How precise they are is said in
`stats`, which chooses among them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from dispatch_trace.chunks import SERIAL, WORKSPACE, Numbers

Value = int | float | None


@dataclass(slots=True)
class Totals:
    """Running statistics; min > max as long as there is no finite value."""

    n: int = 0
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    zeros: int = 0
    min: int | float = math.inf
    max: int | float = -math.inf
    sum: int | float = 0.0
    abs_sum: int | float = 0.0
    sq_sum: float = 0.0
    quad_sum: float = 0.0

    def result(self, repeats: int = 1) -> dict[str, Value]:
        """The statistics, every element counted `repeats` times."""
        undefined = self.min > self.max
        return {
            "n": self.n * repeats,
            "nan": self.nan * repeats,
            "posinf": self.posinf * repeats,
            "neginf": self.neginf * repeats,
            "zeros": self.zeros * repeats,
            "min": None if undefined else self.min + 0,  # + 0: no negative zero
            "max": None if undefined else self.max + 0,
            "sum": self.sum * repeats,
            "abs_sum": self.abs_sum * repeats,
            "sq_sum": self.sq_sum * repeats,
            "quad_sum": self.quad_sum * repeats,
        }


class FloatMoments:
    """Floats: float32 chunks for dtypes up to 32 bits, float64 chunks for float64."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.chunk_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.totals = Totals()

    def add(self, x: Numbers) -> Numbers:
        """Takes in [m] floats; returns them with zeros in place of what is not finite."""
        totals = self.totals
        m = x.shape[0]
        x, missing, low, high = bounds(totals, x)
        totals.n += m
        if missing == m:
            return x
        totals.min, totals.max = min(totals.min, low), max(totals.max, high)
        if low <= 0 <= high or missing:
            is_zero = np.equal(x, 0, out=WORKSPACE.buffer("is_zero", np.bool_, m))
            totals.zeros += int(np.count_nonzero(is_zero)) - missing
        largest = max(-low, high)
        if x.dtype == np.float64:
            add_wide(totals, x, largest)
        elif 2.0**-22 < largest < 2.0**24 or largest == 0.0:
            self._add_narrow(x, low)
        else:  # float32 could not hold the fourth powers
            add_wide(totals, x.astype(np.float64), largest)
        return x

    def _add_narrow(self, x: Numbers, low: float) -> None:
        totals = self.totals
        scratch = WORKSPACE.buffer("scratch", np.float32, x.shape[0])
        total = _sum(x)
        totals.sum += total
        totals.abs_sum += _sum(np.abs(x, out=scratch)) if low < 0 else total
        totals.sq_sum += _sum(np.square(x, out=scratch))
        totals.quad_sum += _sum(np.square(scratch, out=scratch))

    def clean(self, x: Numbers) -> Numbers:
        """[m] floats with zeros in place of what is not finite."""
        return np.where(np.isfinite(x), x, x.dtype.type(0))

    def result(self, repeats: int) -> dict[str, Value]:
        return self.totals.result(repeats)


def _sum(x: Numbers) -> float:
    """Sum of [m] float32: 32 rows in float32, then float64 (within 4e-7 on constants, the worst case).

    A dot product with ones adds up in a row and was 1e-4 off; NumPy's pairwise sum takes thrice as long.
    """
    width, rest = divmod(x.shape[0], 32)
    rows = np.add.reduce(x[: 32 * width].reshape(32, width), axis=0)
    total = float(np.add.reduce(rows, dtype=np.float64))
    return total + float(np.add.reduce(x[32 * width :], dtype=np.float64)) if rest else total


class ByteMoments:
    """Dtypes of 8 bits: how often each of the 256 codes occurs gives every statistic exactly."""

    chunk_dtype = torch.uint8

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.values = _code_values(dtype)
        self.finite = np.where(np.isfinite(self.values), self.values, 0.0).astype(np.float32)
        self.counts: npt.NDArray[np.int64] = np.zeros(256, dtype=np.int64)

    def add(self, codes: Numbers) -> Numbers:
        """Takes in the codes [m] of values; returns the values as `clean` does."""
        if self.dtype == torch.bool:
            ones = int(np.count_nonzero(codes))
            self.counts[0] += codes.shape[0] - ones
            self.counts[1] += ones
        else:
            for part in torch.from_numpy(codes).split(SERIAL):
                self.counts += torch.bincount(part, minlength=256).numpy()
        return self.clean(codes)

    def clean(self, codes: Numbers) -> Numbers:
        """[m] values as float32, with zeros in place of what is not finite."""
        values = WORKSPACE.buffer("values", np.float32, codes.shape[0])
        if self.dtype.is_floating_point:
            np.take(self.finite, codes, out=values, mode="clip")
        else:
            np.copyto(values, codes.view(np.int8) if self.dtype == torch.int8 else codes)
        return values

    def result(self, repeats: int) -> dict[str, Value]:
        values, counts = self.values, self.counts
        finite = np.isfinite(values)
        present = values[finite & (counts > 0)]
        weights, x = counts[finite], values[finite]
        number = float if self.dtype.is_floating_point else int  # exact: sums stay below 2^53
        totals = Totals(
            n=int(counts.sum()),
            nan=int(counts[np.isnan(values)].sum()),
            posinf=int(counts[values == math.inf].sum()),
            neginf=int(counts[values == -math.inf].sum()),
            zeros=int(counts[values == 0].sum()),
            sum=number(weights @ x),
            abs_sum=number(weights @ np.abs(x)),
            sq_sum=float(weights @ x**2),
            quad_sum=float(weights @ x**4),
        )
        if present.size:
            totals.min, totals.max = number(present.min()), number(present.max())
        return totals.result(repeats)


@lru_cache(maxsize=16)
def _code_values(dtype: torch.dtype) -> npt.NDArray[np.float64]:
    """The value of each of the 256 codes of a dtype of 8 bits."""
    codes = torch.arange(256, dtype=torch.uint8, device="cpu")
    if dtype == torch.bool:
        return (codes != 0).double().numpy()
    return codes.view(dtype).float().double().numpy()


class IntegerMoments:
    """Integers of 16 bits and more; sums are exact."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.chunk_dtype = dtype
        self.totals = Totals(sum=0, abs_sum=0)

    def add(self, x: Numbers) -> Numbers:
        """Takes in [m] integers; returns them as `clean` does."""
        return add_integers(self.totals, x)

    def clean(self, x: Numbers) -> Numbers:
        """[m] as float64."""
        return x.astype(np.float64)

    def result(self, repeats: int) -> dict[str, Value]:
        return self.totals.result(repeats)


def add_integers(totals: Totals, x: Numbers) -> npt.NDArray[np.float64]:
    """Takes in [m] integers or booleans, 0 < m <= CHUNK; returns them as float64."""
    low, high = int(x.item(x.argmin())), int(x.item(x.argmax()))
    totals.n += x.shape[0]
    totals.min, totals.max = min(totals.min, low), max(totals.max, high)
    totals.zeros += x.shape[0] - int(np.count_nonzero(x))
    total = _exact_sum(x, low, high)
    negative = _exact_sum(np.minimum(x, 0), low, 0) if low < 0 else 0
    totals.sum += total
    totals.abs_sum += total - 2 * negative
    wide = x.astype(np.float64)
    square = wide * wide
    totals.sq_sum += float(np.add.reduce(square))
    square *= square
    totals.quad_sum += float(np.add.reduce(square))
    return wide


def _exact_sum(x: Numbers, low: int, high: int) -> int:
    """Sum of at most CHUNK integers without overflow: in halves of 32 bits where needed."""
    if -low < 1 << 44 and high < 1 << 44:
        return int(np.add.reduce(x, dtype=np.int64))
    return (int((x >> 32).sum()) << 32) + int((x & 0xFFFFFFFF).sum())


def add_wide(totals: Totals, x: npt.NDArray[np.float64], largest: float) -> None:
    """Adds the sums of [m] finite float64 values, scaled where fourth powers would leave the range."""
    exponent = 0 if 1e-70 < largest < 1e70 or largest == 0.0 else math.frexp(largest)[1]
    if exponent:
        x = np.ldexp(x, -exponent)
    totals.sum += _ldexp(float(np.add.reduce(x)), exponent)
    scratch = np.abs(x)
    totals.abs_sum += _ldexp(float(np.add.reduce(scratch)), exponent)
    np.square(scratch, out=scratch)
    totals.sq_sum += _ldexp(float(np.add.reduce(scratch)), 2 * exponent)
    np.square(scratch, out=scratch)
    totals.quad_sum += _ldexp(float(np.add.reduce(scratch)), 4 * exponent)


def _ldexp(value: float, exponent: int) -> float:
    """value * 2**exponent, inf of its sign where float64 cannot hold it."""
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        return math.copysign(math.inf, value)


def bounds(totals: Totals, x: Numbers) -> tuple[Numbers, int, float, float]:
    """Finds the least and greatest finite value of [m] floats, 0 < m, and counts what is not finite.

    Returns: (x, a copy with zeros for what is not finite if need be; how many those are; least, greatest).
    """
    low, high = x.item(x.argmin()), x.item(x.argmax())  # NaN comes first; half the cost of min and max
    if math.isfinite(low - high):
        return x, 0, low, high
    finite = np.isfinite(x)
    missing = x.shape[0] - int(np.count_nonzero(finite))
    posinf = int(np.count_nonzero(x == math.inf))
    neginf = int(np.count_nonzero(x == -math.inf))
    totals.posinf += posinf
    totals.neginf += neginf
    totals.nan += missing - posinf - neginf
    low = float(np.where(finite, x, x.dtype.type(math.inf)).min())
    high = float(np.where(finite, x, x.dtype.type(-math.inf)).max())
    return np.where(finite, x, x.dtype.type(0)), missing, low, high
