"""The compiled statistics against the plain ones, on everything that a tensor can be."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from test_stats import FLOATS, INTEGERS, random_floats, random_integers

from dispatch_trace import builds, kernel_build
from dispatch_trace import kernel as kernels
from dispatch_trace.schema import STATISTICS
from dispatch_trace.sketch import BLOCK, CHUNK, K
from dispatch_trace.stats import Summary, accumulate, accumulate_many

SIZES = [0, 1, K, K + 1, 5000, BLOCK, BLOCK + 1, CHUNK, CHUNK + BLOCK + 7]
SUMS = ("sum", "abs_sum", "sq_sum", "quad_sum")
EXPONENT = {torch.float16: 31 << 10, torch.bfloat16: 255 << 7, torch.float32: 255 << 23}


@pytest.fixture(scope="module")
def kernel() -> kernels.Kernel:
    found = kernels.find(wait=True)
    if found is None:
        pytest.skip(f"no kernel: {kernels.why_not()}")
    return found


def assert_same(compiled: Summary, plain: Summary) -> None:
    """Counts, bounds and sketches bit for bit, sums within what is documented."""
    assert tuple(compiled.stats) == tuple(plain.stats) == STATISTICS
    for name, expected in plain.stats.items():
        found = compiled.stats[name]
        assert type(found) is type(expected), f"{name} is {found!r}, expected {expected!r}"
        if name in SUMS and isinstance(expected, float) and math.isfinite(expected):
            scale = plain.stats["abs_sum"] if name == "sum" else expected
            assert abs(found - expected) <= 1e-6 * scale, f"{name} is {found}, expected {expected}"
        else:
            assert found == expected, f"{name} is {found}, expected {expected}"
    assert (compiled.sketch is None) == (plain.sketch is None)
    if plain.sketch is not None:
        assert compiled.sketch.tobytes() == plain.sketch.tobytes()


def check(kernel: kernels.Kernel, tensor: torch.Tensor) -> None:
    plain = accumulate(tensor)
    assert_same(accumulate(tensor, kernel=kernel), plain)
    assert_same(accumulate_many([tensor], kernel=kernel)[0], plain)


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_every_dtype_and_size(kernel: kernels.Kernel, dtype: torch.dtype) -> None:
    for n in SIZES:
        check(kernel, (random_floats if dtype in FLOATS else random_integers)(n, dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_bit_pattern_of_16_bits(kernel: kernels.Kernel, dtype: torch.dtype) -> None:
    check(kernel, torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype))


@pytest.mark.parametrize("dtype", [t for t in FLOATS + INTEGERS if t.itemsize == 1 and t != torch.bool])
def test_every_code_of_8_bits(kernel: kernels.Kernel, dtype: torch.dtype) -> None:
    check(kernel, torch.arange(256, dtype=torch.uint8).repeat(70).view(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_random_bit_patterns(kernel: kernels.Kernel, dtype: torch.dtype) -> None:
    """NaNs of every payload, infinities, subnormals, huge and tiny values, signed zeros."""
    bits = np.random.default_rng(3).integers(0, 256, 8 * 30_000, dtype=np.uint8)
    check(kernel, torch.from_numpy(bits).view(dtype))


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-42, -3e-39, 3e38, -1e20, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_constants_of_extreme_size(kernel: kernels.Kernel, dtype: torch.dtype, value: float) -> None:
    for n in (3, 5000, CHUNK + 5):
        check(kernel, torch.full((n,), value, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sizes_where_single_precision_would_not_do(kernel: kernels.Kernel, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = torch.randn(3 * 13562 + 5)
    for exponent in (-120, -60, -40, -21, -19, 0, 14, 28, 31, 60, 120):
        check(kernel, (values * 2.0**exponent).to(dtype))
        check(kernel, (values * 2.0**exponent).relu().to(dtype))
    spread = values * torch.exp2(torch.randint(-90, 20, values.shape))
    check(kernel, spread.to(dtype))
    check(kernel, (values - values.mean()).cumsum(0).to(dtype))  # what nearly cancels


@pytest.mark.parametrize("value", [1e-200, 1e200, -1e308, 5e-324])
def test_doubles_whose_powers_leave_the_range(kernel: kernels.Kernel, value: float) -> None:
    values = random_floats(50_000, torch.float64)
    values[1234] = value
    check(kernel, values)
    check(kernel, torch.full((700,), value, dtype=torch.float64))


def test_few_values_that_are_not_finite(kernel: kernels.Kernel) -> None:
    values = random_floats(2 * CHUNK, torch.float32)
    values[[7, BLOCK + 3, CHUNK + 1]] = torch.tensor([math.nan, math.inf, -math.inf])
    check(kernel, values)


def test_layouts(kernel: kernels.Kernel) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e5m2):
        base = (random_floats if dtype in FLOATS else random_integers)(60 * 70 * 80, dtype).view(60, 70, 80)
        for tensor in (
            base.transpose(0, 2),
            base[:, 3:50, ::2],
            base[5:],
            base[0, 0, :1].expand(300, 100),
            base[:1].expand(4, 70, 80).transpose(1, 2),
            base[3, :0],
        ):
            check(kernel, tensor)


def test_complex_and_lazily_negated_values(kernel: kernels.Kernel) -> None:
    values = torch.complex(random_floats(9000, torch.float32), random_floats(9000, torch.float32).flip(0))
    check(kernel, values)
    check(kernel, values.conj())
    check(kernel, values.conj().imag)
    check(kernel, values.to(torch.complex128).view(90, 100).t())


def test_parts_add_up(kernel: kernels.Kernel) -> None:
    values = random_floats(3 * CHUNK + 11, torch.float32)
    for start in (CHUNK, 3 * CHUNK, CHUNK + 5):
        part = values[start:]
        assert_same(accumulate(part, start=start, kernel=kernel), accumulate(part, start=start))


def test_subnormals_count_where_the_program_flushes_them(kernel: kernels.Kernel) -> None:
    values = torch.full((100,), 1e-40)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        found = accumulate(values, kernel=kernel).stats
    finally:
        torch.set_flush_denormal(False)
    assert found["zeros"] == 0
    assert found["max"] == float(values[0])


def test_a_lazy_clone_is_not_copied(kernel: kernels.Kernel) -> None:
    values = random_floats(5000, torch.float32)
    clone = torch._lazy_clone(values)
    accumulate(clone, kernel=kernel)
    accumulate_many([clone], kernel=kernel)
    assert torch._C._is_cow_tensor(clone)


def test_many_at_once(kernel: kernels.Kernel) -> None:
    tensors = [
        random_floats(40, torch.float32),
        random_integers(40, torch.int64),
        random_floats(300, torch.bfloat16).view(30, 10).t(),
        torch.full((5,), 1e300, dtype=torch.float64),
        random_integers(9, torch.bool),
        torch.empty(0),
        torch.zeros(3, device="meta"),
    ]
    for found, tensor in zip(accumulate_many(tensors, kernel=kernel), tensors, strict=True):
        assert isinstance(found, Summary)
        assert_same(found, accumulate(tensor))
    assert accumulate_many([], kernel=kernel) == []
    chosen = accumulate_many(tensors[:2], names=["max"], sketch=False, kernel=kernel)
    assert [(list(one.stats), one.sketch) for one in chosen] == [(["max"], None)] * 2


def why_not() -> str:
    """What a process that looks for the kernel now would find."""
    build = builds.Build(kernel_build._plan, kernel_build.Library)
    assert build.find(wait=True) is None
    return build.why_not


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(builds.SWITCH, "off")
    assert why_not() == "OSError: DISPATCH_TRACE_KERNEL is off"


def test_without_a_compiler_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert why_not() == "OSError: no C++ compiler"


def test_a_compiler_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert why_not().startswith("OSError: ")
    assert not list((tmp_path / "dispatch_trace").iterdir())


def test_what_others_can_write_to_is_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "dispatch_trace"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "can be written to by others" in why_not()
