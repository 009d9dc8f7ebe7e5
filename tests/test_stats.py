"""Statistics of a tensor against references taken in float64 or in Python integers."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest
import torch

from dispatch_trace import sketch, stats
from dispatch_trace.schema import STATISTICS
from dispatch_trace.stats import accumulate

FLOATS = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
INTEGERS = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]
SIZES = [1, 2, 300, 5000, 50_000, 230_000]  # on either side of the NumPy path, a block and a chunk


def random_floats(n: int, dtype: torch.dtype) -> torch.Tensor:
    values = 3 * torch.randn(n, generator=torch.Generator().manual_seed(n))
    values[torch.arange(n) % 7 == 1] = 0
    return (values.abs() + 1 if dtype == torch.float8_e8m0fnu else values).to(dtype)


def random_integers(n: int, dtype: torch.dtype) -> torch.Tensor:
    rng = np.random.default_rng(n)
    if dtype == torch.bool:
        return torch.from_numpy(rng.random(n) < 0.3)
    info = torch.iinfo(dtype)
    values = rng.integers(info.min, info.max, n, dtype=str(dtype).removeprefix("torch."), endpoint=True)
    values[::5] = 0
    return torch.from_numpy(values)


def reference(tensor: torch.Tensor) -> dict[str, Any]:
    """Statistics of finite values in float64, each by its plain definition."""
    x = (tensor.float() if tensor.dtype.itemsize < 4 else tensor).double().reshape(-1)
    finite = x[x.isfinite()]
    return {
        "n": x.numel(),
        "nan": int(x.isnan().sum()),
        "posinf": int((x == math.inf).sum()),
        "neginf": int((x == -math.inf).sum()),
        "zeros": int((x == 0).sum()),
        "min": float(finite.min()) if finite.numel() else None,
        "max": float(finite.max()) if finite.numel() else None,
        "sum": float(finite.sum()),
        "abs_sum": float(finite.abs().sum()),
        "sq_sum": float((finite**2).sum()),
        "quad_sum": float((finite**4).sum()),
    }


def assert_close(found: dict[str, Any], expected: dict[str, Any], rel: float = 1e-6) -> None:
    assert tuple(found) == STATISTICS
    for name, value in expected.items():
        if name in ("sum", "abs_sum", "sq_sum", "quad_sum"):
            scale = expected["abs_sum"] if name == "sum" else value
            assert abs(found[name] - value) <= rel * scale, f"{name} is {found[name]}, expected {value}"
        else:
            assert found[name] == value, f"{name} is {found[name]}, expected {value}"


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_floats(dtype: torch.dtype, n: int) -> None:
    values = random_floats(n, dtype)
    assert_close(accumulate(values).stats, reference(values))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_exact(dtype: torch.dtype, n: int) -> None:
    values = random_integers(n, dtype)
    numbers = [int(v) for v in values.numpy()]
    found = accumulate(values).stats
    exact = {
        "n": n,
        "nan": 0,
        "posinf": 0,
        "neginf": 0,
        "zeros": numbers.count(0),
        "min": min(numbers),
        "max": max(numbers),
        "sum": sum(numbers),
        "abs_sum": sum(map(abs, numbers)),
    }
    for name, value in exact.items():
        assert type(found[name]) is int, f"{name} is a {type(found[name])}"
        assert found[name] == value, f"{name} is {found[name]}, expected {value}"
    assert found["sq_sum"] == pytest.approx(float(sum(v**2 for v in numbers)), rel=1e-12)
    assert found["quad_sum"] == pytest.approx(float(sum(v**4 for v in numbers)), rel=1e-12)


def test_integer_sums_beyond_64_bits() -> None:
    values = torch.tensor([2**63 - 1, 2**63 - 1, -(2**63), 2**53 + 1]).repeat(100_000)
    found = accumulate(values).stats
    assert found["sum"] == (2**63 - 2 + 2**53 + 1 + 2**63 - 1 - 2**63 + 1) * 100_000
    assert found["abs_sum"] == (2**63 - 1 + 2**63 - 1 + 2**63 + 2**53 + 1) * 100_000
    unsigned = torch.tensor(np.full(300_000, 2**64 - 1, dtype=np.uint64))
    assert accumulate(unsigned).stats["sum"] == (2**64 - 1) * 300_000
    assert accumulate(unsigned).stats["max"] == 2**64 - 1


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128])
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_complex_goes_by_its_real_view(dtype: torch.dtype) -> None:
    for n in (100, 20_000):
        values = torch.randn(n, dtype=torch.complex64, generator=torch.Generator().manual_seed(n)).to(dtype)
        real = torch.view_as_real(values)
        assert accumulate(values).stats == accumulate(real).stats
        assert_close(accumulate(values).stats, reference(real))
        lazy = values.conj()
        assert lazy.is_conj()
        assert accumulate(lazy).stats == accumulate(lazy.resolve_conj()).stats
        assert np.array_equal(accumulate(lazy).sketch, accumulate(lazy.resolve_conj()).sketch)


def test_lazily_negated_values_are_negated() -> None:
    negated = torch.randn(20_000, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    assert accumulate(negated).stats == accumulate(negated.resolve_neg()).stats
    assert accumulate(negated[:100]).stats == accumulate(negated[:100].resolve_neg()).stats


@pytest.mark.parametrize("dtype", [t for t in FLOATS if t != torch.float8_e8m0fnu])
@pytest.mark.parametrize("n", [40, 5000, 300_000])
def test_nan_and_inf_are_counted_apart(dtype: torch.dtype, n: int) -> None:
    values = random_floats(n, torch.float32)
    values[3::10], values[4::10], values[5::20] = math.nan, math.inf, -math.inf
    values = values.to(dtype)
    expected = reference(values)
    assert expected["nan"] > 0
    found = accumulate(values)
    assert_close(found.stats, expected)
    assert found.sketch is not None
    assert np.isfinite(found.sketch).all()


@pytest.mark.parametrize("n", [3, 300_000])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_without_a_finite_value_the_range_is_undefined(value: float, n: int) -> None:
    found = accumulate(torch.full((n,), value))
    assert (found.stats["min"], found.stats["max"]) == (None, None)
    assert [found.stats[name] for name in ("zeros", "sum", "abs_sum", "sq_sum", "quad_sum")] == [0] * 5
    assert found.sketch is not None
    assert not found.sketch.any()


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.complex64])
def test_empty_tensors(dtype: torch.dtype) -> None:
    for shape in ((0,), (3, 0, 2)):
        found = accumulate(torch.empty(shape, dtype=dtype))
        assert (found.stats["min"], found.stats["max"]) == (None, None)
        assert [found.stats[name] for name in STATISTICS if name not in ("min", "max")] == [0] * 9
        assert found.sketch is not None
        assert not found.sketch.any()


def test_zero_dim_tensors() -> None:
    found = accumulate(torch.tensor(-2.5))
    assert found.stats["sum"] == found.stats["min"] == -2.5
    assert found.sketch is not None
    assert found.sketch[0] == -2.5
    assert accumulate(torch.tensor(True)).stats["sum"] == 1


def test_there_is_no_negative_zero() -> None:
    for n in (3, 20_000):
        found = accumulate(torch.full((n,), -0.0))
        assert found.stats["zeros"] == n
        assert math.copysign(1, found.stats["min"] or 0.0) == 1.0
        assert found.sketch is not None
        assert not np.signbit(found.sketch).any()


@pytest.mark.parametrize("scale", [1e-44, 1e-30, 1e-12, 1e-6, 1e6, 1e10, 1e25, 1e38])
@pytest.mark.parametrize("n", [500, 300_000])
def test_powers_neither_overflow_nor_vanish(scale: float, n: int) -> None:
    values = (torch.rand(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * scale).float()
    assert_close(accumulate(values).stats, reference(values), rel=2e-6)


def test_powers_that_float64_cannot_hold_are_infinite() -> None:
    for n in (10, 10_000):
        found = accumulate(torch.full((n,), 1e200, dtype=torch.float64)).stats
        assert found["sum"] == pytest.approx(n * 1e200)
        assert (found["sq_sum"], found["quad_sum"]) == (math.inf, math.inf)
        tiny = accumulate(torch.full((n,), 1e-100, dtype=torch.float64)).stats
        assert tiny["sq_sum"] == pytest.approx(n * 1e-200)


@pytest.mark.parametrize("value", [0.1, 1.2345, 0.7, 3.3])
def test_constants_do_not_drift(value: float) -> None:
    """A float32 dot product is 1e-4 off here."""
    values = torch.full((1_000_000,), value)
    assert_close(accumulate(values).stats, reference(values), rel=1e-6)


LAYOUTS = {
    "transposed": lambda x: x.t(),
    "rows apart": lambda x: x[::3],
    "columns apart": lambda x: x[:, 1::2],
    "slice": lambda x: x[5:, 3:-4],
    "permuted": lambda x: x.view(40, -1, 50).permute(2, 0, 1),
    "expanded in front": lambda x: x[:20].unsqueeze(0).expand(7, -1, -1),
    "expanded behind": lambda x: x[:, :10].unsqueeze(-1).expand(-1, -1, 9),
    "overlapping": lambda x: x.reshape(-1).unfold(0, 40, 7),
}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_make_no_difference(layout: str, dtype: torch.dtype) -> None:
    base = (5 * torch.randn(400, 600, generator=torch.Generator().manual_seed(0))).to(dtype)
    view = LAYOUTS[layout](base)
    assert not view.is_contiguous()
    found, expected = accumulate(view), accumulate(view.contiguous())
    assert np.array_equal(found.sketch, expected.sketch)
    if "expanded" in layout:
        assert_close(found.stats, dict(expected.stats), rel=1e-6)
    else:
        assert found.stats == expected.stats


def test_a_huge_expanded_view_is_instant() -> None:
    view = torch.tensor([1, 2, 3]).expand(1 << 20, 1 << 20, 3)
    begin = time.perf_counter()
    found = accumulate(view)
    assert time.perf_counter() - begin < 1.0
    assert found.sketch is None
    assert found.stats["n"] == 3 << 40
    assert found.stats["sum"] == 6 << 40
    assert found.stats["quad_sum"] == 98.0 * 2**40


def test_a_huge_overlapping_view_has_only_a_count() -> None:
    found = accumulate(torch.zeros(1 << 20).as_strided((1 << 19, 1 << 19), (1, 1)))
    assert found.sketch is None
    assert found.stats.pop("n") == 1 << 38
    assert set(found.stats.values()) == {None}


def no_arithmetic() -> list[torch.Tensor]:
    names = ("float4_e2m1fn_x2", "uint4", "int4", "uint1", "bits8")
    tensors = [torch.empty(8, dtype=getattr(torch, name)) for name in names if hasattr(torch, name)]
    return [*tensors, torch.empty(8, device="meta"), torch.eye(4).to_sparse()]


@pytest.mark.parametrize("tensor", no_arithmetic(), ids=lambda t: f"{t.dtype}-{t.device}-{t.layout}")
def test_what_has_no_arithmetic_has_only_a_count(tensor: torch.Tensor) -> None:
    found = accumulate(tensor)
    assert found.sketch is None
    assert found.stats.pop("n") == tensor.numel()
    assert set(found.stats.values()) == {None}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*quantiz.*")
def test_quantised_tensors_go_by_their_values() -> None:
    quantised = torch.quantize_per_tensor(torch.linspace(-1, 1, 100), 0.1, 0, torch.qint8)
    assert_close(accumulate(quantised).stats, reference(quantised.dequantize()))


def test_only_the_statistics_asked_for() -> None:
    for n in (10, 10_000):
        found = accumulate(torch.ones(n), names=["max", "zeros"], sketch=False)
        assert found.stats == {"zeros": 0, "max": 1.0}
        assert found.sketch is None


def test_surroundings_play_no_part_and_nothing_is_changed() -> None:
    values = torch.randn(300_000, generator=torch.Generator().manual_seed(0))
    plain, kept = accumulate(values), values.clone()
    random_state = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode():
            inference = accumulate(values.clone())
        with torch.device("meta"):
            elsewhere = accumulate(values)
        parameter = accumulate(torch.nn.Parameter(values))
        wide = accumulate(torch.nn.Parameter(values).bfloat16())
    finally:
        torch.set_default_dtype(torch.float32)
    for other in (inference, elsewhere, parameter):
        assert other.stats == plain.stats
        assert np.array_equal(other.sketch, plain.sketch)
    assert wide.stats["n"] == 300_000
    assert torch.equal(values, kept)
    assert torch.equal(torch.get_rng_state(), random_state)


def test_the_paths_for_few_and_many_elements_agree() -> None:
    for dtype in (*FLOATS, *INTEGERS):
        values = (random_floats if dtype.is_floating_point else random_integers)(4000, dtype)
        few, many = stats._small(values, True), stats._chunked(values, True, 0)
        assert np.array_equal(few[1], many[1]), dtype
        for name in ("n", "nan", "zeros", "min", "max"):
            assert few[0][name] == many[0][name], f"{name} of {dtype}"
        assert_close(many[0], few[0], rel=1e-6)
        assert few[1] is not None
        assert few[1].shape == (sketch.K,)
