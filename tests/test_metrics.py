"""Distances between two values, rounding by dtype and what follows from recorded moments."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dispatch_trace import metrics
from dispatch_trace.errors import ConfigError, ShapeMismatchError
from dispatch_trace.schema import DERIVED_STATISTICS
from dispatch_trace.stats import accumulate

TWO_ARGUMENTS = [metrics.relative_l2, metrics.cosine, metrics.max_abs, metrics.sqnr, metrics.worst_row]
REAL_FORMATS = [name for name in metrics.FLOAT_FORMATS if "complex" not in name and not name.endswith("_x2")]


@pytest.mark.parametrize("metric", TWO_ARGUMENTS)
def test_unequal_shapes_are_an_error(metric: object) -> None:
    assert callable(metric)
    with pytest.raises(ShapeMismatchError, match=r"shape \[.\], .* expected the same"):
        metric(np.zeros(3), np.zeros(4))


def test_known_distances() -> None:
    ref, target = np.array([3.0, 4.0]), np.array([3.0, 4.5])
    assert metrics.relative_l2(target, ref) == pytest.approx(0.1)
    assert metrics.max_abs(target, ref) == 0.5
    assert metrics.sqnr(target, ref) == pytest.approx(20.0)
    assert metrics.cosine(target, ref) == pytest.approx(27 / (5 * math.hypot(3, 4.5)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int64, torch.bool])
def test_tensors_of_any_real_dtype(dtype: torch.dtype) -> None:
    ref = torch.tensor([[1, 0, 1], [0, 1, 1]]).to(dtype).t()
    assert metrics.relative_l2(ref, ref) == 0.0
    assert metrics.relative_l2(torch.zeros_like(ref), ref) == 1.0


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_complex_tensors() -> None:
    ref = torch.tensor([1 + 1j, 2 - 1j])
    for dtype in (torch.complex32, torch.complex64, torch.complex128):
        assert metrics.relative_l2(ref.to(dtype) * 1j, ref.to(dtype)) == pytest.approx(math.sqrt(2))
    assert metrics.cosine(ref.conj(), ref.resolve_conj()) == pytest.approx((0 + 3) / 7)
    assert metrics.cosine(ref * 1j, ref) == pytest.approx(0.0, abs=1e-12)


def test_zeros() -> None:
    zero, one = np.zeros(4), np.ones(4)
    assert metrics.relative_l2(zero, zero) == 0.0
    assert metrics.relative_l2(one, zero) == math.inf
    assert (metrics.sqnr(zero, zero), metrics.sqnr(one, zero)) == (math.inf, -math.inf)
    assert (metrics.cosine(zero, zero), metrics.cosine(one, zero)) == (1.0, 0.0)
    empty = np.zeros((0, 3))
    assert (metrics.relative_l2(empty, empty), metrics.max_abs(empty, empty)) == (0.0, 0.0)
    assert metrics.worst_row(empty, empty) == ((), 0.0)


def test_equal_non_finite_values_are_equal_and_others_infinitely_far() -> None:
    ref = np.array([1.0, math.nan, math.inf, -math.inf])
    assert metrics.relative_l2(ref, ref) == 0.0
    assert metrics.max_abs(ref, ref) == 0.0
    assert metrics.max_ulp(ref, ref, "float32") == 0
    for target in ([1, 0, math.inf, -math.inf], [1, math.nan, -math.inf, -math.inf], [math.nan, *ref[1:]]):
        assert metrics.relative_l2(target, ref) == math.inf
        assert metrics.max_abs(target, ref) == math.inf
        assert metrics.max_ulp(target, ref, "float32") == 2**64 - 1
        assert math.isnan(metrics.cosine(target, ref))
    assert metrics.relative_l2([2.0, *ref[1:]], ref) == 1.0


@pytest.mark.parametrize("scale", [1e-300, 1e300])
def test_norms_neither_overflow_nor_vanish(scale: float) -> None:
    ref, target = np.array([3.0, 4.0]) * scale, np.array([3.0, 4.5]) * scale
    assert metrics.relative_l2(target, ref) == pytest.approx(0.1)
    assert metrics.cosine(ref, ref) == pytest.approx(1.0)


def test_the_worst_row_is_found_behind_a_small_norm() -> None:
    rng = np.random.default_rng(0)
    ref = rng.standard_normal((8, 32, 64))
    target = ref + 1e-4 * rng.standard_normal(ref.shape)
    target[5, 20] *= -1
    assert metrics.relative_l2(target, ref) < 0.15
    index, error = metrics.worst_row(ref, target)
    assert index == (5, 20)
    assert error == pytest.approx(2.0, rel=0.3)


def test_rows_that_are_nearly_zero_are_not_divided_by() -> None:
    ref = np.ones((6, 10))
    ref[0] = 1e-12
    target = ref.copy()
    target[0] += 1e-9
    target[3] += 0.1
    assert metrics.worst_row(ref, target) == ((3,), pytest.approx(0.1))
    assert metrics.worst_row(np.zeros((2, 2)), np.array([[0, 0], [0, 1.0]])) == ((1,), math.inf)
    assert metrics.worst_row(np.array([1.0, 2, 3]), np.array([1.0, 2, 4])) == ((2,), pytest.approx(1 / 3))
    assert metrics.worst_row(np.array(2.0), np.array(3.0))[1] == 0.5


def test_unit_roundoffs() -> None:
    expected = {
        "float64": 2**-53,
        "torch.float32": 2**-24,
        "float16": 2**-11,
        "bfloat16": 2**-8,
        "float8_e4m3fn": 2**-4,
        "float8_e5m2": 2**-3,
        "complex64": 2**-24,
        "int8": 0.0,
        "bool": 0.0,
        "quint8": 0.0,
    }
    assert {name: metrics.unit_roundoff(name) for name in expected} == expected
    assert metrics.coarser("float32", "bfloat16") == metrics.coarser("bfloat16", "float32") == "bfloat16"
    assert metrics.coarser("bfloat16", "float16") == "bfloat16"
    assert metrics.coarser("int8", "float64") == "float64"
    with pytest.raises(ConfigError, match="dtype='float31': expected one of float64, "):
        metrics.unit_roundoff("float31")
    with pytest.raises(ConfigError, match="dtype='int8': expected one of float64, "):
        metrics.round_to(np.zeros(1), "int8")


@pytest.mark.parametrize("name", REAL_FORMATS)
def test_rounding_is_that_of_torch(name: str) -> None:
    rng = torch.Generator().manual_seed(0)
    values = torch.randn(20_000, generator=rng) * torch.exp(20 * torch.randn(20_000, generator=rng))
    codes = torch.arange(0, 1 << 8).to(torch.float32)
    values = torch.cat(
        [values, codes, torch.tensor([0.0, math.nan, 464.0, 465.0, 2.0**-9, 2.0**-10, 65520.0])]
    )
    if name == "float8_e8m0fnu":
        values = values.abs().clamp(1e-37, 1e38)
    expected = values.to(getattr(torch, name)).double().numpy()
    np.testing.assert_array_equal(metrics.round_to(values, name), expected)


@pytest.mark.parametrize("name", [name for name in REAL_FORMATS if "e8m0" not in name])
def test_ulps_count_the_numbers_between(name: str) -> None:
    dtype = getattr(torch, name)
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    codes = torch.randint(0, 120, (100,), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    values = codes.to(bits).view(dtype)
    exact = values.double().numpy()
    apart = int((codes.max() - codes.min()).item())
    assert metrics.max_ulp(exact, np.full(100, exact.min()), name) == apart
    assert metrics.max_ulp(exact, -exact, name) == 2 * int(codes.max())
    assert metrics.max_ulp(exact, exact, name) == 0


def test_ulps_across_the_whole_range_of_float64() -> None:
    largest = float(np.finfo(np.float64).max)
    apart = 2 * int(np.array(largest).view(np.int64))
    assert metrics.max_ulp(np.array(largest), np.array(-largest), "float64") == apart
    assert metrics.max_ulp(np.float32(1.0), np.nextafter(np.float32(1), np.float32(2)), "float32") == 1
    assert metrics.max_ulp(np.zeros(0), np.zeros(0), "float32") == 0


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40))
def test_derived_statistics_follow_from_the_moments(values: list[float]) -> None:
    found = metrics.derived(accumulate(torch.tensor(values, dtype=torch.float64)).stats)
    x = np.array(values)
    assert tuple(found) == DERIVED_STATISTICS
    largest = np.abs(x).max()
    assert found["mean"] == pytest.approx(x.mean(), abs=1e-12 * largest)
    assert found["std"] == pytest.approx(x.std(), abs=1e-6 * largest)
    assert found["abs_mean"] == pytest.approx(np.abs(x).mean())
    assert found["rms"] == pytest.approx(math.sqrt((x**2).mean()))
    assert found["l2"] == pytest.approx(float(np.linalg.norm(x)))


def test_derived_statistics_are_over_finite_values() -> None:
    found = metrics.derived(accumulate(torch.tensor([1.0, 3.0, math.nan, math.inf])).stats)
    assert (found["mean"], found["std"]) == (2.0, 1.0)


def test_derived_statistics_are_undefined_where_their_moments_are() -> None:
    empty = metrics.derived(accumulate(torch.empty(0)).stats)
    assert empty == {"mean": None, "std": None, "abs_mean": None, "rms": None, "l2": 0.0}
    assert set(metrics.derived({"n": 3}).values()) == {None}
    assert set(metrics.derived({}).values()) == {None}
    assert metrics.derived({"n": 2, "sum": 3})["mean"] == 1.5
