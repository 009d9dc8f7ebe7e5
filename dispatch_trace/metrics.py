"""How far two values are apart, and how far rounding alone may take them.

Everything runs in float64 (complex128) on NumPy arrays; torch tensors are accepted and widened, and torch
is never imported here. Elements that are equal, NaN with NaN and inf with the same inf included, count
as no difference; a non-finite element that faces anything else makes a distance infinite: a NaN
reference never passes a finite target.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dispatch_trace.errors import ConfigError, ShapeMismatchError

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A binary floating point format.

    Attributes:
      mantissa_bits: explicit ones.
      min_exponent: of the smallest normal number.
      max_finite: the largest finite number.
      overflow: what torch makes of larger ones (with their sign): inf, NaN or the largest finite number.
    """

    mantissa_bits: int
    min_exponent: int
    max_finite: float
    overflow: float = math.inf

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of rounding to nearest, 2^-(mantissa_bits + 1)."""
        return 2.0 ** -(self.mantissa_bits + 1)


_FLOAT64 = FloatFormat(52, -1022, float(np.finfo(np.float64).max))
_FLOAT32 = FloatFormat(23, -126, float(np.finfo(np.float32).max))
_FLOAT16 = FloatFormat(10, -14, 65504.0)
FLOAT_FORMATS: dict[str, FloatFormat] = {
    "float64": _FLOAT64,
    "complex128": _FLOAT64,
    "float32": _FLOAT32,
    "complex64": _FLOAT32,
    "float16": _FLOAT16,
    "complex32": _FLOAT16,
    "bfloat16": FloatFormat(7, -126, float.fromhex("0x1.fep127")),
    "float8_e4m3fn": FloatFormat(3, -6, 448.0, overflow=448.0),
    "float8_e4m3fnuz": FloatFormat(3, -7, 240.0, overflow=math.nan),
    "float8_e5m2": FloatFormat(2, -14, 57344.0),
    "float8_e5m2fnuz": FloatFormat(2, -15, 57344.0, overflow=math.nan),
    "float8_e8m0fnu": FloatFormat(0, -127, 2.0**127, overflow=math.nan),
    "float4_e2m1fn_x2": FloatFormat(1, 0, 6.0, overflow=6.0),
}
_EXACT_PREFIXES = ("bool", "int", "uint", "qint", "quint", "bits")


def unit_roundoff(dtype: str) -> float:
    """Unit roundoff of a dtype by name, with or without "torch."; 0 for integers and booleans.

    Raises:
      ConfigError: no dtype of that name is known.
    """
    name = dtype.removeprefix("torch.")
    known = FLOAT_FORMATS.get(name)
    if known is not None:
        return known.unit_roundoff
    if name.startswith(_EXACT_PREFIXES):
        return 0.0
    raise ConfigError(f"dtype={dtype!r}: expected one of {', '.join(FLOAT_FORMATS)} or an integer dtype.")


def coarser(first: str, second: str) -> str:
    """The dtype with the larger unit roundoff; the first when they tie."""
    return second if unit_roundoff(second) > unit_roundoff(first) else first


def round_to(values: Any, dtype: str) -> npt.NDArray[np.float64]:
    """Rounds real numbers to the nearest ones (ties to even) that a float dtype holds.

    Args:
      values: [*shape], real.
      dtype: name of a float dtype.
    Returns: [*shape] float64.
    Raises:
      ConfigError: no float dtype of that name is known.
    """
    known = _format(dtype)
    given = as_numpy(values)
    if given.dtype == np.float32 and known is FLOAT_FORMATS["bfloat16"]:
        return _to_bfloat16(given).astype(np.float64)
    x = given.astype(np.float64)
    if known.mantissa_bits == 52:
        return x
    for name in ("float16", "float32"):
        if known is FLOAT_FORMATS[name]:
            with np.errstate(over="ignore"):
                return x.astype(name).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        _, exponent = np.frexp(x)
        step = np.ldexp(1.0, np.maximum(exponent - 1, known.min_exponent) - known.mantissa_bits)
        rounded = np.rint(x / step) * step
    beyond = np.abs(rounded) > known.max_finite
    rounded = np.where(beyond, np.copysign(known.overflow, x), rounded)
    return np.where(np.isnan(x), np.nan, rounded)


def _to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """float32 numbers rounded to bfloat16, which is their upper half: ties to even, overflow to inf."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(values), values, rounded.view(np.float32))


def as_numpy(values: Any) -> Array:
    """A NumPy array of a tensor or array; dtypes that NumPy lacks are widened to float64."""
    if hasattr(values, "detach"):
        tensor = values.detach().cpu()
        if tensor.is_quantized:
            tensor = tensor.dequantize()
        name = str(tensor.dtype).removeprefix("torch.")
        if name in ("bfloat16", "complex32") or name.startswith("float8"):
            tensor = tensor.cfloat() if name == "complex32" else tensor.double()
        return np.asarray(tensor.resolve_conj().resolve_neg().numpy())
    return np.asarray(values)


def relative_l2(target: Any, ref: Any) -> float:
    """||target - ref|| / ||ref||, accumulated in float64.

    Args:
      target, ref: [*shape], same shape; any real or complex dtype.
    Returns: unitless, >= 0; 0 when they are equal, inf when only ref is zero or where a
      non-finite element faces another value.
    Raises:
      ShapeMismatchError: the shapes differ.
    """
    difference, scale = _difference(target, ref)
    return _ratio(_norm(difference), _norm(scale))


def cosine(target: Any, ref: Any) -> float:
    """<target, ref> / (||target|| ||ref||), the real part for complex values.

    Returns: in [-1, 1]; 1 when both are zero, 0 when only one is, nan when either is not finite.
      Blind to scale: to be shown, not to decide by.
    Raises:
      ShapeMismatchError: the shapes differ.
    """
    a, b = _pair(target, ref)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.nan
    norms = _norm(a), _norm(b)
    if 0.0 in norms:
        return 1.0 if norms[0] == norms[1] else 0.0
    product = np.vdot(a.reshape(-1) / norms[0], b.reshape(-1) / norms[1])
    return max(-1.0, min(1.0, float(product.real)))


def max_abs(target: Any, ref: Any) -> float:
    """max |target - ref|; 0 when empty, inf where a non-finite element faces another value.

    Raises:
      ShapeMismatchError: the shapes differ.
    """
    difference, _ = _difference(target, ref)
    return float(np.abs(difference).max(initial=0.0))


def sqnr(target: Any, ref: Any) -> float:
    """Signal to quantisation noise, 20 log10(||ref|| / ||target - ref||).

    Returns: in dB; inf when they are equal, -inf when only ref is zero.
    Raises:
      ShapeMismatchError: the shapes differ.
    """
    error = relative_l2(target, ref)
    if error == 0.0:
        return math.inf
    return -math.inf if math.isinf(error) else -20.0 * math.log10(error)


def max_ulp(target: Any, ref: Any, dtype: str) -> int:
    """Largest distance in units in the last place: how many numbers of a dtype lie between two elements.

    Args:
      target, ref: [*shape], same shape, real.
      dtype: name of the float dtype whose numbers are counted.
    Returns: >= 0; 0 when empty, 2^64 - 1 where a non-finite element faces another value.
    Raises:
      ShapeMismatchError: the shapes differ.
      ConfigError: no float dtype of that name is known.
    """
    known = _format(dtype)
    a, b = _pair(target, ref)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if not (np.isfinite(a) & np.isfinite(b) | same).all():
        return (1 << 64) - 1
    a, b = a[~same], b[~same]
    if a.size == 0:
        return 0
    first, second = _ordinal(a, known), _ordinal(b, known)
    low, high = np.minimum(first, second), np.maximum(first, second)
    # Modulo 2^64, because the distance across all of float64 overflows int64.
    return int((high.view(np.uint64) - low.view(np.uint64)).max())


def worst_row(ref: Any, target: Any) -> tuple[tuple[int, ...], float]:
    """The row (along the last dim) with the largest relative error: what a norm over all can hide.

    The error of a row is ||target_row - ref_row|| over ||ref_row||, or over the median norm of the
    reference's rows that are not zero where that is larger: nothing is divided by a row that is nearly zero.

    Args:
      ref, target: [*rows, n], same shape. In one dim every element is a row.
    Returns: (index of the row, its error); ((), 0.0) when empty.
    Raises:
      ShapeMismatchError: the shapes differ.
    """
    kept = max(1, np.ndim(as_numpy(ref)) - 1)
    relative = errors_by(target, ref, tuple(range(kept)))
    if relative.size == 0:
        return (), 0.0
    flat = int(relative.argmax())
    return tuple(int(i) for i in np.unravel_index(flat, relative.shape)), float(relative.reshape(-1)[flat])


def errors_by(
    target: Any, ref: Any, axes: tuple[int, ...], *, floor: float | None = None
) -> npt.NDArray[np.float64]:
    """The relative L2 error of every part that has one index along `axes`: of every row, channel, head.

    ||target_part - ref_part|| over ||ref_part||, or over the median norm of the reference's parts that are
    not zero where that is larger: nothing is divided by a part that is nearly zero.

    Args:
      target, ref: [*shape], same shape. A scalar is one part.
      axes: dims that stay, from 0.
      floor: the least norm to divide by, where another than the median is meant.
    Returns: [*sizes of axes], unitless, >= 0; inf where a non-finite element faces another value.
    Raises:
      ShapeMismatchError: the shapes differ.
    """
    difference, scale = (np.atleast_1d(x) for x in _difference(target, ref))
    others = tuple(dim for dim in range(difference.ndim) if dim not in axes)
    with np.errstate(over="ignore"):
        errors, norms = (np.sqrt((np.abs(x) ** 2).sum(others)) for x in (difference, scale))
    if floor is None:
        floor = float(np.median(norms[norms > 0])) if (norms > 0).any() else 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        relative: npt.NDArray[np.float64] = np.where(errors > 0, errors / np.maximum(norms, floor), 0.0)
    return relative.transpose(np.argsort(np.argsort(axes)))


def derived(stats: Mapping[str, int | float | None]) -> dict[str, float | None]:
    """What follows from the recorded moments: mean, std, abs_mean, rms, l2, over the finite values.

    Args:
      stats: by name, as recorded (`schema.STATISTICS`); missing ones make None what needs them.
    Returns: `schema.DERIVED_STATISTICS` by name; None where undefined. std is that of the population;
      it comes from sums, so below about 1e-3 |mean| it is noise.
    """
    counts = [stats.get(name) for name in ("n", "nan", "posinf", "neginf")]
    total, absolute, square = (stats.get(name) for name in ("sum", "abs_sum", "sq_sum"))
    n = None if counts[0] is None else counts[0] - sum(count or 0 for count in counts[1:])

    def mean_of(value: int | float | None) -> float | None:
        return value / n if n and value is not None else None

    mean, mean_square = mean_of(total), mean_of(square)
    std = None
    if mean is not None and mean_square is not None:
        std = math.sqrt(max(0.0, mean_square - mean * mean))
    return {
        "mean": mean,
        "std": std,
        "abs_mean": mean_of(absolute),
        "rms": None if mean_square is None else math.sqrt(mean_square),
        "l2": None if square is None else math.sqrt(square),
    }


def _format(dtype: str) -> FloatFormat:
    known = FLOAT_FORMATS.get(dtype.removeprefix("torch."))
    if known is None:
        raise ConfigError(f"dtype={dtype!r}: expected one of {', '.join(FLOAT_FORMATS)}.")
    return known


def _pair(target: Any, ref: Any) -> tuple[Array, Array]:
    a, b = as_numpy(target), as_numpy(ref)
    if a.shape != b.shape:
        raise ShapeMismatchError(f"target has shape {list(a.shape)}, ref {list(b.shape)}: expected the same.")
    wide = np.complex128 if np.iscomplexobj(a) or np.iscomplexobj(b) else np.float64
    return a.astype(wide), b.astype(wide)


def _difference(target: Any, ref: Any) -> tuple[Array, Array]:
    """(target - ref with 0 where they are equal and inf where not comparable, ref with 0 for non-finite)."""
    a, b = _pair(target, ref)
    finite = np.isfinite(a) & np.isfinite(b)
    if finite.all():
        return a - b, b
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    difference = np.where(finite, np.where(finite, a, 0) - np.where(finite, b, 0), np.where(same, 0, np.inf))
    return difference, np.where(np.isfinite(b), b, 0)


def _norm(x: Array) -> float:
    """L2 norm that neither overflows nor vanishes."""
    scale = float(np.abs(x).max(initial=0.0))
    if scale == 0.0 or not math.isfinite(scale):
        return scale
    return scale * float(np.linalg.norm((x / scale).reshape(-1)))


def _ratio(error: float, scale: float) -> float:
    if scale == 0.0:
        return 0.0 if error == 0.0 else math.inf
    return error / scale


def _ordinal(x: Array, known: FloatFormat) -> npt.NDArray[np.int64]:
    """Numbers the values of a format in ascending order, 0 at zero."""
    fraction, exponent = np.frexp(np.abs(x))
    per_binade = 1 << known.mantissa_bits
    normal = (exponent.astype(np.int64) - known.min_exponent) * per_binade + np.rint(
        (2.0 * fraction - 1.0) * per_binade
    ).astype(np.int64)
    is_normal = np.abs(x) >= 2.0**known.min_exponent
    small = np.where(is_normal, 0.0, np.abs(x))
    subnormal = np.rint(np.ldexp(small, known.mantissa_bits - known.min_exponent)).astype(np.int64)
    ordinal = np.where(is_normal, normal, subnormal)
    return np.where(x < 0, -ordinal, ordinal)
