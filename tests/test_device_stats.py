"""Statistics where the values are: equal to the host's, fetched together. Runs on the CPU's float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dispatch_trace as dt
from dispatch_trace import device_stats, sketch
from dispatch_trace.device_stats import DeviceLane, launch, read
from dispatch_trace.sketch import BLOCK, CHUNK
from dispatch_trace.stats import Summary, accumulate
from dispatch_trace.store.reader import open_ranks

CPU = torch.device("cpu")


def on_device(tensor: torch.Tensor) -> Summary:
    return read(launch(tensor).numpy(), tensor, True)


def assert_like_the_host(tensor: torch.Tensor) -> None:
    found, expected = on_device(tensor), accumulate(tensor)
    assert list(found.stats) == list(expected.stats)
    for name, value in expected.stats.items():
        got = found.stats[name]
        if isinstance(value, float) and name not in ("min", "max"):
            scale = expected.stats["abs_sum"] if name == "sum" else value
            assert got == pytest.approx(value, rel=1e-6, abs=1e-6 * abs(scale or 0.0)), name
        else:
            assert (got, type(got)) == (value, type(value)), name
    assert found.sketch is not None and expected.sketch is not None
    error = np.linalg.norm(found.sketch.astype(np.float64) - expected.sketch)
    assert error <= 1e-6 * max(np.linalg.norm(expected.sketch.astype(np.float64)), 1e-30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("n", [0, 1, 251, 252, BLOCK, BLOCK + 1, CHUNK, 2 * CHUNK + 77])
def test_floats_of_every_size(dtype: torch.dtype, n: int) -> None:
    torch.manual_seed(n)
    assert_like_the_host(torch.randn(n).to(dtype))


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
)
def test_integers_are_exact(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    if dtype is torch.bool:
        assert_like_the_host(torch.rand(50_000) > 0.5)
    else:
        bounds = torch.iinfo(dtype)
        assert_like_the_host(torch.randint(bounds.min, bounds.max, (50_000,), dtype=dtype))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.5, -2.0, 3e38, -3.4028235e38, 1e-40]),
        max_size=12,
    )
)
def test_what_is_not_finite_is_counted_apart(values: list[float]) -> None:
    assert_like_the_host(torch.tensor(values, dtype=torch.float32))


def test_views_go_by_their_logical_order() -> None:
    base = torch.arange(60.0).reshape(3, 4, 5)
    assert_like_the_host(base.transpose(0, 2))
    assert_like_the_host(base[:1].expand(7, 4, 5))


def test_groups_of_chunks_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_stats, "_GROUP", CHUNK)
    torch.manual_seed(1)
    assert_like_the_host(torch.randn(3 * CHUNK + 5))


def test_the_sketch_is_that_of_the_check_value() -> None:
    import zlib

    found = on_device(torch.from_numpy(sketch.check_values())).sketch
    assert found is not None
    assert zlib.crc32(found.astype("<f4").tobytes()) == sketch.SKETCH_PARAMETERS["check"]


def test_a_lane_fetches_everything_in_one_transfer() -> None:
    lane = DeviceLane(CPU)
    tensors = [torch.randn(5), torch.randn(2, 3), torch.arange(4)]
    for key, tensor in enumerate(tensors):
        lane.add(key, tensor, ready=None, keep=key == 1, summarise=key != 2)
    assert lane
    arrived = lane.collect()
    assert lane.num_transfers == 1 and not lane and not lane.collect() and lane.num_transfers == 1
    assert [a.key for a in arrived] == [0, 1, 2]
    assert [a.summary is not None for a in arrived] == [True, True, False]
    assert arrived[0].host is None and arrived[1].host is not None
    assert torch.equal(arrived[1].host, tensors[1])


@pytest.mark.parametrize("save", ["stats", "tensors"])
def test_a_recording_through_a_lane_holds_what_one_without_holds(tmp_path: Path, save: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    inputs = torch.randn(3, 8)
    found: list[list[Any]] = []
    for lanes in (frozenset[str](), frozenset({"cpu"})):
        path = tmp_path / f"{len(lanes)}"
        with torch.no_grad(), dt.record(path, model, save=save) as rec:
            taker = rec._tracer.writer._taker  # type: ignore[union-attr]
            taker._lane_devices = lanes
            for _ in range(3):
                model(inputs)
        if lanes:
            assert 1 <= sum(lane.num_transfers for lane in taker._lanes.values()) <= 4
        (rank,) = open_ranks(path)
        assert not rank.verify() if hasattr(rank, "verify") else True
        rows = []
        for record in rank.records():
            for slot in record.slots:
                if slot.content >= 0:
                    content = rank.content(slot.content)
                    data = rank.tensor(slot.content).tolist() if content.has_data else None
                    rows.append((record.seq, slot.name, content.dtype, content.shape, content.stats, data))
        found.append(rows)
    plain, laned = found
    assert [r[:4] for r in laned] == [r[:4] for r in plain]
    assert [r[5] for r in laned] == [r[5] for r in plain]
    for (*_, expected, _), (*_, got, _) in zip(plain, laned, strict=True):
        assert got == pytest.approx(expected, rel=1e-6, abs=1e-6)
