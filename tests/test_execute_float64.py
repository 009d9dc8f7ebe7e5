"""Execution in float64: the values that the judges compare, whatever precision was recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from execute_programs import batch, last_op, record, wide_values
from torch import nn
from torch.nn import functional as F

import dispatch_trace as dt
from dispatch_trace import execute, execute_ops
from dispatch_trace.errors import NotExecutableError
from dispatch_trace.store.reader import open_ranks


def test_float_casts_vanish_and_others_are_executed(tmp_path: Path) -> None:
    def program(m: Any, x: Any) -> Any:
        low = x.to(torch.bfloat16) * 3
        codes = (low.float() * 10).to(torch.int8)
        eighths = (x / 8).to(torch.float8_e4m3fn)
        return low, codes, eighths, torch.arange(3) / 7, torch.ones(2) / 3

    rank = record(tmp_path / "t", program)
    x = batch().double()
    values = {}
    for step, found in execute.iterate(rank, dtype=torch.float64):
        if step.kind == "module":
            values = {name: value.clone() for name, value in found.items()}
    expected = {
        "out[0]": x * 3,
        "out[1]": (x * 30).to(torch.int8),
        "out[2]": (x / 8).to(torch.float8_e4m3fn),
        "out[3]": torch.arange(3).double() / 7,
        "out[4]": torch.ones(2, dtype=torch.float64) / 3,
    }
    for name, wanted in expected.items():
        assert values[name].dtype == wanted.dtype, name
        assert torch.equal(values[name].to(torch.float64), wanted.to(torch.float64)), name


def test_memory_grows_though_somebody_has_looked_at_it_through_numpy(tmp_path: Path) -> None:
    def program(m: Any, x: Any) -> Any:
        grown = torch.zeros(2)
        grown.resize_(4, 8)
        grown.copy_(x.repeat(2, 1))
        return grown * 3

    rank, done, shapes = record(tmp_path / "t", program), execute.Execution(), []
    for _, found in execute.iterate(rank, dtype=torch.float64, execution=done, inputs=True):
        for value in found.values():
            shapes.append(value.numpy().shape)  # torch no longer resizes this storage
    assert (done.failed, dict(done.narrowed), shapes[-1]) == ([], {}, (4, 8))
    (value,) = wide_values(rank, "aten.mul.Tensor")
    assert torch.equal(value, batch().double().repeat(2, 1) * 3)


def test_what_values_size_goes_on_in_its_own_size(tmp_path: Path) -> None:
    def program(m: Any, x: Any) -> Any:
        found = (x[0] > 0).nonzero()
        (place,) = found.unbind(1)
        part = x[:, place]
        part[:1].mul_(2)
        return torch.zeros_like(x).index_add_(1, place, part.t().contiguous().t() + 1)

    rank, x = record(tmp_path / "t", program), batch()
    other = x.flip(1).double() + 0.5
    expected = program(None, other)
    for resizes in (True, False):
        done, last = execute.Execution(), None
        runs = execute.iterate(
            rank, dtype=torch.float64, execution=done, leaf=lambda content, slot: other, resizes=resizes
        )
        for step, found in runs:
            if step.kind == "module":
                last = found["out"].clone() if "out" in found else None
        if resizes:
            assert not done.skipped and last is not None and torch.equal(last, expected)
        else:
            assert done.skipped, "it came out in the recorded size: no test of it"


def test_another_number_of_results_is_counted(tmp_path: Path) -> None:
    def program(m: Any, x: Any) -> Any:
        return sum(x[0, place] for (place,) in (x[0] > 0).nonzero().unbind(0))

    rank, done = record(tmp_path / "t", program), execute.Execution()
    runs = execute.iterate(
        rank,
        dtype=torch.float64,
        execution=done,
        leaf=lambda content, slot: batch().double().abs(),
        resizes=True,
    )
    assert len(list(runs)) and any("as many results" in why for _, why in done.skipped)


def test_aliases_alias_and_bit_views_go_through_the_recorded_precision(tmp_path: Path) -> None:
    def program(m: Any, x: Any) -> Any:
        y = x / 3
        y[0].mul_(2)
        seen = y.view(torch.int32) + 0
        y[1].view(torch.int32).bitwise_and_(0x7FFFFFFF)
        return seen, y + 0

    rank = record(tmp_path / "t", program)
    x = batch().double() / 3
    x[0] *= 2
    (bits, _) = wide_values(rank, "aten.add.Tensor")
    assert torch.equal(bits, x.float().view(torch.int32) + 0)
    (_, final) = wide_values(rank, "aten.add.Tensor")
    assert torch.equal(final[0], x[0]), "the half that nobody wrote keeps its float64 value"
    assert torch.equal(final[1][x[1] >= 0], x[1][x[1] >= 0])
    assert torch.equal(final[1][x[1] < 0], x[1][x[1] < 0].float().abs().double())


def test_an_item_is_the_recomputed_number(tmp_path: Path) -> None:
    rank = record(tmp_path / "t", lambda m, x: x * (x / 3).sum().item())
    (value,) = wide_values(rank, "aten.mul.Tensor")
    x = batch().double()
    torch.testing.assert_close(value, x * (x / 3).sum(), rtol=1e-14, atol=0)


def test_random_results_are_the_recorded_ones_in_float64_too(tmp_path: Path) -> None:
    rank = record(
        tmp_path / "t", lambda m, x: (torch.rand(2, 8) + x / 3, F.dropout(x, 0.5, True)), save="tensors"
    )
    noise = next(rank.records(overload="aten.rand.default"))
    drawn = rank.tensor(noise.slots[-1].content)
    (value,) = wide_values(rank, "aten.add.Tensor")
    assert torch.equal(value, drawn.double() + batch().double() / 3)


def double(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return module.double()(x.double())


def test_a_low_precision_model_gives_the_float64_values(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).bfloat16()
    with torch.no_grad(), dt.record(tmp_path / "t", model, save="leaves"):
        model(batch().bfloat16())
    (rank,) = open_ranks(tmp_path / "t")
    (value,) = wide_values(rank, "aten.addmm.default")[1:]
    torch.testing.assert_close(value, double(model, batch().bfloat16()), rtol=1e-12, atol=1e-12)


def scaled_mm(x: Any) -> tuple[Any, Callable[[], torch.Tensor]]:
    a, b = x[:16, :32].to(torch.float8_e4m3fn), x[:32, :16].t().contiguous().to(torch.float8_e4m3fn).t()
    scale, other = torch.tensor(0.5), torch.tensor(0.3)
    run = lambda: torch._scaled_mm(a, b, scale, other, out_dtype=torch.bfloat16)  # noqa: E731
    return run, lambda: (a.double() * 0.5) @ (b.double() * other.double())


def int8_mm(x: Any) -> tuple[Any, Callable[[], torch.Tensor]]:
    codes, scales = (x[:16, :32] * 40).to(torch.int8), x[0, :16].abs().bfloat16()
    low = x[:4, :32].bfloat16()
    return lambda: torch._weight_int8pack_mm(
        low, codes, scales
    ), lambda: low.double() @ (codes.double() * scales.double()[:, None]).t()


def integer_mm(x: Any) -> tuple[Any, Callable[[], torch.Tensor]]:
    codes = (x[:32, :32] * 40).to(torch.int8)
    return lambda: torch._int_mm(codes, codes), lambda: codes.double() @ codes.double()


def int4_mm(x: Any) -> tuple[Any, Callable[[], torch.Tensor]]:
    codes = ((x[:64, :64] * 100).to(torch.int32) % 16).contiguous()
    packed = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
    scales = torch.stack((x[:2, :64].abs(), x[2:4, :64]), -1).bfloat16().contiguous()
    low = x[:4, :64].bfloat16()
    weight = (codes.double().view(64, 2, 32) - 8) * scales[..., 0].double().t()[..., None]
    weight = weight + scales[..., 1].double().t()[..., None]
    return (
        lambda: torch._weight_int4pack_mm_for_cpu(low, packed, 32, scales),
        lambda: low.double() @ weight.view(64, 64).t(),
    )


def grouped_mm(x: Any) -> tuple[Any, Callable[[], torch.Tensor]]:
    low, weights = x[:16, :16].bfloat16(), x[:48, :16].reshape(3, 16, 16).bfloat16()
    ends = torch.tensor([4, 10, 16], dtype=torch.int32)
    parts = [(0, 4), (4, 10), (10, 16)]
    return lambda: torch._grouped_mm(low, weights, offs=ends), lambda: torch.cat(
        [low[a:b].double() @ weights[i].double() for i, (a, b) in enumerate(parts)]
    )


@pytest.mark.parametrize(
    "make", [scaled_mm, int8_mm, integer_mm, int4_mm, grouped_mm], ids=lambda f: f.__name__
)
def test_formulas_stand_in_for_ops_that_refuse_float64(tmp_path: Path, make: Any) -> None:
    run, truth = make(torch.linspace(-3, 2, 64 * 64).sin().view(64, 64))
    rank = record(tmp_path / "t", lambda m: run(), inputs=())
    (step,) = [r for r in rank.records(kind="op") if r.overload in execute_ops.FORMULAS]
    (value,) = wide_values(rank, step.overload)
    torch.testing.assert_close(value.double(), truth(), rtol=1e-12, atol=1e-12)
    assert not execute.execute_rank(rank, dtype=torch.float64).narrowed


def test_softmax_to_float32_is_softmax_in_float64(tmp_path: Path) -> None:
    rank = record(tmp_path / "t", lambda m, x: torch.softmax(x.bfloat16(), -1, dtype=torch.float32))
    (value,) = wide_values(rank, "aten._softmax.default")
    torch.testing.assert_close(value, torch.softmax(batch().double(), -1), rtol=1e-12, atol=0)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")  # said once in a process
def test_other_ops_that_refuse_float64_run_in_their_precision_and_are_counted(tmp_path: Path) -> None:
    rank = record(
        tmp_path / "t", lambda m, x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize() / 3
    )
    done = execute.execute_rank(rank, dtype=torch.float64)
    assert [(op, n) for (op, _), n in done.narrowed.items()] == [("aten.quantize_per_tensor.default", 1)]
    assert "in recorded precision 1" in done.summary()
    (value,) = wide_values(rank, "aten.div.Tensor")
    torch.testing.assert_close(value, (batch() * 10).round().double() / 30, rtol=1e-6, atol=1e-7)


def test_one_record_runs_on_its_own_inputs(tmp_path: Path) -> None:
    rank = record(tmp_path / "t", lambda m, x: (x + 1).mul_(x / 3))
    step = last_op(rank, "aten.mul_.Tensor")
    native = execute.execute_record(rank, step.seq, dtype=None)
    assert torch.equal(native["out.self"], (batch() + 1) * (batch() / 3))
    wide = execute.execute_record(rank, step.seq)
    assert torch.equal(wide["out.self"], (batch() + 1).double() * (batch() / 3).double())
    (module,) = rank.records(kind="module")
    with pytest.raises(NotExecutableError, match="is a module record: only ops run by themselves"):
        execute.execute_record(rank, module.seq)
    with pytest.raises(
        NotExecutableError, match=r"in its own precision or in float64, not in torch\.float16"
    ):
        execute.execute_record(rank, step.seq, dtype=torch.float16)
