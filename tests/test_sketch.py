"""The sketch: what it is, how well it tells distances apart, and that it is the same everywhere."""

from __future__ import annotations

import math
import subprocess
import sys
import zlib
from collections.abc import Callable

import numpy as np
import pytest
import torch

from dispatch_trace import sketch

IDEAL_NARROW_SD = 1 / math.sqrt(2 * sketch.NARROW)
IDEAL_SD = 1 / math.sqrt(2 * sketch.K)


def mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x85EBCA6B & 0xFFFFFFFF
    x ^= x >> 13
    x = x * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ (x >> 16)


def sign_and_bucket(i: int) -> tuple[int, int]:
    """The definition in the module's docstring, element by element, from the published parameters."""
    parameters = sketch.SKETCH_PARAMETERS
    block, num_blocks, k = parameters["block"], parameters["blocks_per_chunk"], parameters["k"]
    chunk, rest = divmod(i, block * num_blocks)
    q, p = divmod(rest, block)
    sign = 1
    for length in parameters["lengths"]:
        if p >= length:
            sign *= 1 - 2 * (mix(parameters["seed_position"] + q * block + p & 0xFFFFFFFF) >> 31)
            p -= length
    if (chunk, q) != (0, 0):
        row = mix(parameters["seed_block"] + num_blocks * chunk + q & 0xFFFFFFFF)
        sign *= 1 - 2 * (mix(row + p & 0xFFFFFFFF) >> 31)
    bucket = q * k + p
    for length in parameters["lengths"]:
        bucket -= length if bucket >= length else 0
    return sign, bucket


def test_every_element_goes_where_the_definition_says() -> None:
    rng = np.random.default_rng(0)
    edges = [edge + d for edge in (0, sketch.K, sketch.BLOCK, sketch.CHUNK) for d in (-1, 0, 1)][1:]
    for i in edges + rng.integers(0, 2_000_000, 150).tolist() + rng.integers(0, 1 << 40, 50).tolist():
        sign, bucket = sign_and_bucket(i)
        expected = np.zeros(sketch.K, dtype=np.float32)
        expected[bucket] = sign
        found = sketch.fold(torch.ones(1), start=i)
        assert np.array_equal(found, expected), f"element {i} belongs in bucket {bucket} with sign {sign}"


def test_whole_chunks_fold_as_single_elements_do() -> None:
    n = sketch.CHUNK + sketch.BLOCK + 1000
    values = torch.from_numpy(np.random.default_rng(1).integers(-9, 10, n).astype(np.float32))
    expected = np.zeros(sketch.K)
    for i, value in enumerate(values.tolist()):
        if i % 7 == 0:  # the rest is set to zero, to keep this loop short
            sign, bucket = sign_and_bucket(i)
            expected[bucket] += sign * value
    values[torch.arange(n) % 7 != 0] = 0
    assert np.array_equal(sketch.fold(values), expected.astype(np.float32))


def test_the_check_value_is_that_of_this_code() -> None:
    folded = sketch.fold(torch.from_numpy(sketch.check_values()))
    assert zlib.crc32(folded.astype("<f4").tobytes()) == sketch.SKETCH_PARAMETERS["check"], (
        "the sketch has changed: traces written before cannot be compared any more"
    )


@pytest.mark.parametrize("n", [1, 5, 250, 251])
def test_small_tensors_are_their_own_sketch(n: int) -> None:
    a, b = torch.randn(2, n, generator=torch.Generator().manual_seed(n))
    assert np.array_equal(sketch.fold(a)[:n], a.numpy())
    exact = float(torch.dist(a.double(), b.double()))
    assert sketch.distance(sketch.fold(a), sketch.fold(b)) == pytest.approx(exact, rel=1e-12)


Differences = Callable[[int, torch.Generator], torch.Tensor]


def offset(n: int, rng: torch.Generator) -> torch.Tensor:
    return torch.full((n,), 0.25)


def channel(n: int, rng: torch.Generator) -> torch.Tensor:
    values = torch.zeros(n // 768, 768)
    values[:, 300] = 0.5
    return values.view(-1)


def divisible_channel(n: int, rng: torch.Generator) -> torch.Tensor:
    """One channel of a dimension that k divides: with plain residues mod k, one bucket gets them all."""
    values = torch.zeros(n // 753, 753)
    values[:, 100] = torch.randn(n // 753, generator=rng)
    return values.view(-1)


def outlier_channel(n: int, rng: torch.Generator) -> torch.Tensor:
    values = torch.randn(n // 1024, 1024, generator=rng)
    values[:, 17] *= 100
    return values.view(-1)


def low_rank(n: int, rng: torch.Generator) -> torch.Tensor:
    rows = n // 1024
    return (torch.randn(rows, 2, generator=rng) @ torch.randn(2, 1024, generator=rng)).view(-1)


def sparse(n: int, rng: torch.Generator) -> torch.Tensor:
    values = torch.zeros(n)
    values[torch.randint(n, (n // 1000,), generator=rng)] = torch.randn(n // 1000, generator=rng)
    return values


def dense(n: int, rng: torch.Generator) -> torch.Tensor:
    return torch.randn(n, generator=rng)


DIFFERENCES = [dense, offset, channel, divisible_channel, outlier_channel, low_rank, sparse]


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_norms_are_unbiased_and_as_sharp_as_251_numbers_allow(difference: Differences) -> None:
    num_trials, n = 40, 200_000
    rng = torch.Generator().manual_seed(7)
    starts = torch.randint(1 << 38, (num_trials,), generator=rng).tolist()
    ratios = []
    for start in starts:  # another start gives other signs also to a difference that is always the same
        values = difference(n, rng)
        ratios.append(sketch.norm(sketch.fold(values, start=start)) / float(values.double().norm()))
    squares = np.square(ratios)
    bias = squares.mean() - 1
    assert abs(bias) < 4 * math.sqrt(2 / sketch.K / num_trials), (
        f"norms are off by {bias / 2:+.1%} on average"
    )
    sd = math.sqrt(np.mean(np.square(np.array(ratios) - 1)))
    assert 0.6 * IDEAL_SD < sd < 1.6 * IDEAL_SD, f"sd {sd:.3f} where {IDEAL_SD:.3f} is ideal"


@pytest.mark.parametrize("n", [1_000_000, 3_000_000, 10_000_000])
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_norms_of_large_differences(difference: Differences, n: int) -> None:
    values = difference(n, torch.Generator().manual_seed(n))
    ratio = sketch.norm(sketch.fold(values)) / float(values.double().norm())
    assert abs(ratio - 1) < 4 * IDEAL_SD, f"estimated {ratio:.3f} times the norm"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_distances_between_two_tensors_of_a_dtype(difference: Differences, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(3)
    change = difference(1_000_000, rng)
    a = torch.randn(change.shape, generator=rng)
    b = (a + change).to(dtype)
    a = a.to(dtype)
    exact = float(torch.dist(a.float().double(), b.float().double()))
    ratio = sketch.distance(sketch.fold(a), sketch.fold(b)) / exact
    assert abs(ratio - 1) < 4 * IDEAL_SD, f"estimated {ratio:.3f} times the distance"


def test_tiny_relative_differences_stay_visible() -> None:
    a = torch.randn(3_000_000, generator=torch.Generator().manual_seed(0)).double()
    b = a * (1 + 1e-5 * torch.randn(a.shape, generator=torch.Generator().manual_seed(1)))
    exact = float(torch.dist(a, b) / a.norm())
    for x, y in ((a, b), (a.float(), b.float())):
        estimate = sketch.relative_distance(sketch.fold(y), sketch.fold(x))
        assert estimate == pytest.approx(exact, rel=0.2), "rounding drowns a difference of 1e-5"


@pytest.mark.parametrize("exact", [-0.9, 0.0, 0.5, 0.99])
def test_cosines(exact: float) -> None:
    a, noise = torch.randn(2, 1_000_000, generator=torch.Generator().manual_seed(5))
    b = exact * a + math.sqrt(1 - exact**2) * noise
    assert sketch.cosine(sketch.fold(a), sketch.fold(b)) == pytest.approx(exact, abs=0.2)
    assert sketch.cosine(sketch.fold(a), sketch.fold(a)) == 1.0


def test_zeros_are_told_apart_from_something() -> None:
    zero, one = np.zeros(sketch.K, np.float32), np.ones(sketch.K, np.float32)
    assert sketch.relative_distance(zero, zero) == 0.0
    assert sketch.relative_distance(one, zero) == math.inf
    assert sketch.relative_distance(zero, one) == 1.0
    assert (sketch.cosine(zero, zero), sketch.cosine(zero, one)) == (1.0, 0.0)


@pytest.mark.parametrize("cuts", [(1,), (250, 251), (sketch.BLOCK,), (123_457, 700_000), (sketch.CHUNK,)])
def test_sketches_of_parts_add_up(cuts: tuple[int, ...]) -> None:
    whole = torch.from_numpy(np.random.default_rng(2).integers(-50, 50, 800_000).astype(np.float32))
    starts = (0, *cuts)
    parts = torch.tensor_split(whole, cuts)
    folded = [sketch.fold(part, start=start) for part, start in zip(parts, starts, strict=True)]
    assert np.array_equal(sketch.add(folded), sketch.fold(whole))


def test_values_that_are_not_finite_count_as_zero() -> None:
    values = torch.randn(500_000, generator=torch.Generator().manual_seed(0))
    for n in (200, 3000, 500_000):
        spoilt, cleaned = values[:n].clone(), values[:n].clone()
        spoilt[::50], spoilt[1::50], spoilt[2::50] = math.nan, math.inf, -math.inf
        for k in range(3):
            cleaned[k::50] = 0
        assert np.array_equal(sketch.fold(spoilt), sketch.fold(cleaned)), f"n = {n}"


@pytest.mark.parametrize("n", [100, 3000, 500_000])
@pytest.mark.parametrize("value", [torch.finfo(torch.float32).min, 1e300])
def test_huge_values_saturate(n: int, value: float) -> None:
    folded = sketch.fold(torch.full((n,), value, dtype=torch.float64))
    assert np.isfinite(folded).all()
    assert np.isfinite(sketch.norm(folded))
    assert not np.any(np.signbit(folded) & (folded == 0)), "a negative zero is a second pattern of bits"


def test_sums_beyond_float32_are_taken_in_float64() -> None:
    values = torch.full((100_000,), 3e38)
    values[50_000:] = -3e38
    in_float64 = sketch.fold(values.double())
    assert np.array_equal(sketch.fold(values), in_float64)
    assert np.isfinite(in_float64).all()


SUBPROCESS = """
import sys, torch
torch.set_num_threads(int(sys.argv[1]))
torch.set_default_dtype(torch.float64)
from dispatch_trace.stats import accumulate
for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32):
    for n in (100, 4000, 5000, 70_000, 500_000):
        x = torch.arange(n, dtype=torch.float32)
        summary = accumulate((torch.sin(x * x) * 100).to(dtype).view(2, -1).t())
        print(dtype, n, summary.sketch.tobytes().hex(), summary.stats)
"""


def test_processes_and_thread_counts_agree_to_the_bit() -> None:
    def printed(threads: int) -> str:
        command = [sys.executable, "-c", SUBPROCESS, str(threads)]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout

    once = printed(1)
    assert once.count("torch.") == 20
    assert printed(3) == once


def test_threads_do_not_disturb_each_other() -> None:
    from concurrent.futures import ThreadPoolExecutor

    tensors = [torch.randn(300_000, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    expected = [sketch.fold(t).tobytes() for t in tensors]
    with ThreadPoolExecutor(4) as pool:
        assert [s.tobytes() for s in pool.map(sketch.fold, tensors * 3)] == expected * 3


def test_estimates_never_import_torch() -> None:
    code = (
        "import sys, numpy as np; from dispatch_trace import sketch, metrics, patterns;"
        "a = np.arange(251, dtype=np.float32); sketch.distance(a, a); sketch.cosine(a, a);"
        "metrics.relative_l2(a, a); assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_narrow_sketch_is_linear_and_tells_distances() -> None:
    rng = np.random.default_rng(0)
    errors = []
    for number in range(200):
        a = rng.standard_normal((7, 900)).astype(np.float32)
        b = a + 1e-3 * rng.standard_normal(a.shape).astype(np.float32)
        wide = [sketch.fold(torch.from_numpy(x)) for x in (a, b)]
        slim = [sketch.narrow(x) for x in wide]
        assert slim[0].shape == (sketch.NARROW,) and slim[0].dtype == np.float32
        if not number:
            whole = sketch.narrow(wide[0].astype(np.float64) + wide[1])
            assert np.allclose(whole, slim[0].astype(np.float64) + slim[1], rtol=1e-5, atol=1e-4)
            assert np.array_equal(sketch.narrow(slim[0]), slim[0])
        exact = float(np.linalg.norm(b - a))
        errors.append(sketch.distance(*slim) / exact - 1)
        mixed = sketch.distance(wide[0], slim[1]), sketch.cosine(slim[0], wide[1])
        assert mixed[0] == pytest.approx(sketch.distance(*slim), rel=1e-3)
        assert mixed[1] == pytest.approx(1.0, abs=1e-5)
    assert abs(np.mean(errors)) < 4 * IDEAL_NARROW_SD / math.sqrt(len(errors))
    assert float(np.std(errors)) == pytest.approx(IDEAL_NARROW_SD, rel=0.2)


@pytest.mark.parametrize("n", [1, 17, sketch.NARROW])
def test_a_narrow_sketch_of_few_elements_is_exact(n: int) -> None:
    values = torch.randn(n, generator=torch.Generator().manual_seed(n))
    assert sketch.norm(sketch.narrow(sketch.fold(values))) == pytest.approx(float(values.norm()), rel=1e-6)
