"""Differences straight from mapped files against those of arrays: counts alike, sums near enough."""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dispatch_trace as dt
from dispatch_trace import kernel_build
from dispatch_trace.align import ahead
from dispatch_trace.align.ahead import compare_ahead
from dispatch_trace.align.content import MIN_MAPPED, Comparer, arrays_difference, mapped_difference
from dispatch_trace.align.lineup import pair_traces
from dispatch_trace.align.row_sums import CHUNK, RowSums, mapped_row_sums, row_sums
from dispatch_trace.errors import TraceFormatError
from dispatch_trace.metrics import as_numpy
from dispatch_trace.store.mapped import Mapped, hash_of
from dispatch_trace.store.reader import open_ranks

FLOATS = ["float32", "bfloat16", "float16", "float64"]
WHOLE = ["int16", "int32", "int64", "uint16", "uint32", "uint64", "int8", "uint8", "bool"]
SHAPES = [(), (1,), (7,), (CHUNK + 5,), (3, 8), (5, 7), (2, 3, 33), (4, 20_000), (1, CHUNK * 2 + 9), (0, 8)]


@pytest.fixture(scope="module")
def library() -> kernel_build.Library:
    found = kernel_build.find(wait=True)
    if found is None:
        pytest.skip(f"no library: {kernel_build.why_not()}")
    return found


def mapped(tensor: torch.Tensor, digest: str | None = None) -> Mapped:
    data = np.frombuffer(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), dtype=np.uint8)
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    hasher = hash_of(dtype, shape)
    hasher.update(data)
    found = hasher.hexdigest() if digest is None else digest
    return Mapped(dtype=dtype, shape=shape, data=data, hash=found, where="here", sound=lambda: None)


def random(shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype in FLOATS:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(getattr(torch, dtype))
    bits = torch.randint(0, 256, (*shape, 8), generator=generator, dtype=torch.uint8)
    if dtype == "bool":
        return bits[..., 0] > 127
    size = getattr(torch, dtype).itemsize
    return bits[..., :size].contiguous().view(getattr(torch, dtype)).reshape(shape)


def check(library: kernel_build.Library, ref: torch.Tensor, target: torch.Tensor) -> RowSums:
    found = mapped_row_sums(library, mapped(ref), mapped(target))
    plain = row_sums(as_numpy(ref), as_numpy(target))
    assert found is not None
    assert (found.odd, found.index) == (plain.odd, plain.index)
    tolerance = 1e-5 if ref.dtype.itemsize == target.dtype.itemsize == 2 else 1e-12
    np.testing.assert_allclose(found.errors, plain.errors, rtol=tolerance)
    np.testing.assert_allclose(found.norms, plain.norms, rtol=tolerance)
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_every_pair_of_floats(library: kernel_build.Library, shape: tuple[int, ...]) -> None:
    for first, second in itertools.product(FLOATS, FLOATS):
        check(library, random(shape, first, 1), random(shape, second, 2))


@pytest.mark.parametrize("dtype", WHOLE)
def test_whole_numbers(library: kernel_build.Library, dtype: str) -> None:
    for shape in SHAPES:
        check(library, random(shape, dtype, 1), random(shape, dtype, 2))


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_out_of_bounds_counts_by_place(library: kernel_build.Library, dtype: str) -> None:
    ref, target = random((6, 5000), dtype, 1), random((6, 5000), dtype, 2)
    odd = [math.nan, math.inf, -math.inf, 1.0, -3e38 if dtype != "float16" else -math.inf]
    for row, (a, b) in enumerate(itertools.product(odd, odd)):
        ref[row % 6, 100 * row] = a
        target[row % 6, 100 * row] = b
    assert 10 < check(library, ref, target).odd < 25


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_bit_pattern_of_16_bits(library: kernel_build.Library, dtype: str) -> None:
    values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(getattr(torch, dtype))
    check(library, values.reshape(256, 256), values.flip(0).reshape(256, 256))


def test_small_and_large_numbers(library: kernel_build.Library) -> None:
    scales = torch.logspace(-44, 29, 64, dtype=torch.float64)[:, None]
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        ref, target = (random((64, 100), "float64", seed) * scales for seed in (1, 2))
        check(library, ref.to(dtype), target.to(dtype))
        check(library, ref.to(dtype), ref.to(dtype))
        check(library, ref.to(dtype), (ref * (1 + 2**-7)).to(dtype))


def test_sums_of_a_row_do_not_depend_on_the_others(library: kernel_build.Library) -> None:
    ref, target = random((300, 1000), "float32", 1), random((300, 1000), "float32", 2)
    whole = mapped_row_sums(library, mapped(ref), mapped(target))
    parts = [
        mapped_row_sums(library, mapped(ref[i : i + 77]), mapped(target[i : i + 77]))
        for i in range(0, 300, 77)
    ]
    assert whole is not None
    assert np.concatenate([part.errors for part in parts if part]).tobytes() == whole.errors.tobytes()


def test_what_is_not_compared_there_is_said(library: kernel_build.Library) -> None:
    ref = mapped(random((16, 16), "float32", 1))
    assert mapped_row_sums(library, ref, mapped(random((16, 16), "int32", 1))) is None
    shifted = Mapped("float32", (15, 16), ref.data[1 : 1 + 960], "", "here", lambda: None)
    assert mapped_row_sums(library, shifted, shifted) is None
    with pytest.raises(TraceFormatError, match="here does not match its hash"):
        mapped_row_sums(library, ref, mapped(random((16, 16), "float32", 2), digest="00" * 16))


def test_other_shapes_of_one_size_are_compared_in_order(library: kernel_build.Library) -> None:
    ref, target = random((64, 32), "float32", 1), random((64, 32), "float32", 1) * 1.01
    found = mapped_difference(library, mapped(ref), mapped(target.reshape(32, 64)))
    assert found is not None and found.transform == "reshaped" and found.worst is None
    assert found.rho == pytest.approx(arrays_difference(ref.numpy(), target.numpy()).rho, rel=1e-12)


class Wide(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(320, 320)

    def forward(self, x: torch.Tensor) -> Any:
        return torch.relu(self.linear(x)).sin()


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    model, x = Wide(), torch.randn(300, 320)
    for name, factor in (("ref", 1.0), ("target", 1.0 + 2**-20)):
        with torch.no_grad(), dt.record(folder / name, model, save="tensors"):
            model(x * factor)
    return folder / "ref", folder / "target"


def differences(traces: tuple[Path, Path]) -> dict[tuple[int, int], Any]:
    pairing = pair_traces(*(open_ranks(path)[0] for path in traces))
    compare_ahead(pairing)
    return {
        (link.ref_content, link.target_content): pairing.compare(link)
        for links in pairing.links.values()
        for link in links
    }


def test_threads_compare_what_judges_would(
    library: kernel_build.Library, traces: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    one_by_one = differences(traces)
    monkeypatch.setattr(ahead, "WORTHWHILE_HERE_BYTES", 0)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    pairing = pair_traces(*(open_ranks(path)[0] for path in traces))
    progress: list[tuple[int, int]] = []
    assert compare_ahead(pairing, progress=lambda *state: progress.append(state)) >= 3
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)
    for key, found in pairing.comparer._known.items():
        assert found == one_by_one[key]


def test_a_trace_compares_alike_with_the_library_and_without(
    library: kernel_build.Library, traces: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = [open_ranks(path)[0] for path in traces]
    known = Comparer(sides[0], sides[1]).mapped(*(max(c.id for c in side.contents()) for side in sides))
    assert known is not None and math.prod(known[0].shape) >= MIN_MAPPED
    compiled = differences(traces)
    monkeypatch.setattr(kernel_build, "find", lambda wait=False: None)
    plain = differences(traces)
    assert compiled.keys() == plain.keys() and len(plain) > 3
    for key, expected in plain.items():
        found = compiled[key]
        assert (found.equal, found.method, found.known) == (expected.equal, expected.method, expected.known)
        assert found.rho == pytest.approx(expected.rho, rel=1e-12)
        assert (found.worst is None) == (expected.worst is None)
        if found.worst is not None:
            assert found.worst[0] == expected.worst[0]
            assert found.worst[1] == pytest.approx(expected.worst[1], rel=1e-12)
    assert sum(not d.equal for d in plain.values()) >= 3


def test_data_that_does_not_match_its_hash_is_not_compared(traces: tuple[Path, Path], tmp_path: Path) -> None:
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(traces[1], broken)
    reader = open_ranks(broken)[0]
    last = max(c.id for c in reader.contents())
    data = reader.mapped(last)
    assert data is not None
    shard = Path(data.where.partition(",")[0])
    place = shard.read_bytes().find(data.data[:64].tobytes())
    with shard.open("r+b") as file:
        file.seek(place)
        file.write(b"\1\2\3\4")
    sides = open_ranks(traces[0])[0], open_ranks(broken)[0]
    found = Comparer(*sides).compare(max(c.id for c in sides[0].contents()), last)
    assert found.method == "sketch"
