"""Execution: a trace that holds leaves only is a program, and gives back what was recorded."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import ROOT, run_python
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import dispatch_trace as dt
from dispatch_trace import execute, execute_ops
from dispatch_trace.errors import NotExecutableError
from dispatch_trace.execute_ops import NotRunnableError, resolve
from dispatch_trace.store.layouts import content_hash
from dispatch_trace.store.reader import RankReader, open_ranks


class Program(nn.Module):
    """A function of itself and its inputs, with a weight and a buffer to use."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(-1, 1, 64).reshape(8, 8).sin())
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def batch() -> torch.Tensor:
    return torch.linspace(-2, 3, 16).reshape(2, 8).cos()


def record(
    path: Path, function: Callable[..., Any], *, save: str = "leaves", inputs: Any = None
) -> RankReader:
    model = Program(function)
    with torch.no_grad(), dt.record(path, model, save=save):
        model(*((batch(),) if inputs is None else inputs))
    (rank,) = open_ranks(path)
    assert rank.complete, rank.end
    return rank


def last_op(rank: RankReader, overload: str) -> Any:
    return list(rank.records(kind="op", overload=overload))[-1]


def wide_values(rank: RankReader, overload: str, slot: str = "out") -> list[torch.Tensor]:
    """What the op gives in float64, each time it runs."""
    steps = execute.iterate(rank, dtype=torch.float64)
    return [values[slot].clone() for step, values in steps if step.overload == overload]


# In the recorded precision ------------------------------------------------------------------------


def in_place(m: Any, x: Any) -> Any:
    y = x.clone()
    row = y[0]
    row.add_(1)
    y.t().mul_(2)
    y[:, 1].copy_(y[:, 2])
    y.transpose_(0, 1)
    first, second = y.chunk(2)
    first.add_(second)
    m.seen.add_(y.sum())
    return y, row, m.seen * 2


def outs_and_lists(m: Any, x: Any) -> Any:
    out = torch.empty(0)
    torch.add(x, 1, out=out)
    torch.mul(x, 3, out=out)
    pair = [x.clone(), x * 2]
    torch._foreach_add_(pair, [out, out])
    torch._foreach_mul_(pair, 0.5)
    return pair, torch._foreach_norm(pair), torch.aminmax(x), torch.var_mean(x, 1)


def caches(m: Any, x: Any) -> Any:
    cache = torch.zeros(2, 6, 8)
    sums = []
    for t in range(3):
        cache[:, t] = x + t
        cache.index_copy_(1, torch.tensor([t + 3]), (x * t).unsqueeze(1))
        sums.append(cache[:, : t + 1].sum(1))
        cache.narrow(1, t, 1).mul_(0.5)
    cache.index_put_((torch.tensor([0]), torch.tensor([1])), torch.ones(8), accumulate=True)
    buffer = torch.empty(4, 8)
    buffer[:2] = x
    return torch.stack(sums), cache, buffer[:2] * 2, buffer.sum() * 0


def random_results(m: Any, x: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(2, 8) + torch.rand_like(x) + torch.normal(0.0, 1.0, (2, 8), generator=generator)
    drawn = F.dropout(x, 0.5, True) + torch.bernoulli(torch.sigmoid(x)) + torch.empty(2, 8).normal_()
    return noise + drawn, torch.randperm(5), torch.multinomial(torch.softmax(x, -1), 2) + 1


def strange_views(m: Any, x: Any) -> Any:
    z = torch.complex(x, x + 1)
    windows = x.flatten().as_strided((5, 4), (2, 1))
    bits = x.view(torch.int32)
    x.clone().view(torch.int32).bitwise_and_(0x7FFFFFFF)
    huge = x.new_ones(1).expand(2_000_000, 2_000_000)
    return (
        (z.conj() @ z.t()).abs(),
        z.conj().imag * 2,
        torch.fft.fft(x).real,
        windows * 2,
        x[0, :1].expand(3, 5) + 1,
        (0x5F3759DF - (bits >> 1)).view(torch.float32) + 1,
        huge[:1, :4] + 1,
        huge,
    )


def layouts(m: Any, x: Any) -> Any:
    sparse = (x * (x > 0)).to_sparse()
    nested = torch.nested.nested_tensor([x[:1], x], layout=torch.jagged)
    codes = (x / 8).to(torch.float8_e5m2)
    quantised = torch.quantize_per_tensor(x, 0.1, 3, torch.quint8)
    image = x.view(1, 1, 4, 4).repeat(2, 3, 2, 2).to(memory_format=torch.channels_last)
    return (
        torch.sparse.mm(sparse, m.weight),
        sparse.to_sparse_csr() @ m.weight,
        (nested * 2).values(),
        codes.float() * 2,
        codes.view(torch.uint8) + 1,
        quantised.t().dequantize() * 2,
        F.conv2d(image, torch.ones(4, 3, 3, 3) / 9, padding=1),
        x.to("meta"),
    )


def numbers(m: Any, x: Any) -> Any:
    total = x.sum().item()
    count = int(x.abs().max().item() * 2)
    return (
        x * total,
        x[:, :count] * count,
        x[x > 0] * 2,
        x.nonzero(),
        torch.full((2,), total),
        bool((x > 0).any()),
    )


def attention(m: Any, x: Any) -> Any:
    q = x.view(2, 1, 2, 4).expand(2, 2, 2, 4)
    mask = torch.ones(2, 2, dtype=torch.bool).tril()
    layer = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    with torch.no_grad():  # query, key and value as one object take another kernel
        own, _ = layer(x[None], x[None], x[None])
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask), own


def modes(m: Any, x: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = F.linear(x, m.weight)
    with torch.inference_mode():
        whole = torch.matmul(x.view(2, 1, 8), m.weight).reshape(2, 8).add_(1)
        return low.float() @ m.weight, whole.clone(), F.layer_norm(x, (8,))


def swapped_data(m: Any, x: Any) -> Any:
    before = x @ m.weight
    m.weight.data = torch.eye(8).t()
    after = x @ m.weight
    m.weight.data.mul_(2)
    return before, after, x @ m.weight


def training(m: Any, x: Any) -> Any:
    with torch.enable_grad():
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 4))
        optimizers = [
            torch.optim.AdamW(block[0].parameters(), foreach=True),
            torch.optim.SGD(block[3].parameters(), 0.1, momentum=0.9),
        ]
        for _ in range(2):
            loss = checkpoint(block, x, use_reentrant=False).pow(2).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(block.parameters(), 0.1)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad((leaf @ m.weight).tanh().sum(), leaf, create_graph=True)
        gradient.pow(2).sum().backward()
        return leaf.grad * 1, block(x)


PROGRAMS = [
    in_place,
    outs_and_lists,
    caches,
    random_results,
    strange_views,
    layouts,
    numbers,
    attention,
    modes,
    swapped_data,
    training,
]


@pytest.mark.parametrize("save", ["leaves", "tensors"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("ignore")
def test_every_hash_comes_back(tmp_path: Path, program: Any, save: str) -> None:
    rank = record(tmp_path / "t", program, save=save)
    done = execute.execute_rank(rank)
    assert (done.failed, done.differing, dict(done.skipped)) == ([], [], {})
    assert done.equal == done.compared > 5, "the program has results to compare"
    assert {reason for _, reason in done.taken} <= {"random"}
    assert done.share == 1.0
    num_ops = sum(1 for _ in rank.records(kind="op"))
    assert done.executed.total() + done.taken.total() == num_ops


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("ignore")
def test_any_tensor_is_recomputed_from_leaves(tmp_path: Path, program: Any) -> None:
    torch.manual_seed(5)
    full = record(tmp_path / "full", program, save="tensors")
    torch.manual_seed(5)
    rank = record(tmp_path / "leaves", program)
    num_recomputed = 0
    for step in list(rank.records())[-40:]:
        for slot in step.slots:
            if not slot.is_tensor or slot.content < 0 or step.overload.startswith("aten.resize"):
                continue
            kept = rank.content(slot.content)
            found = execute.tensor(rank, step.seq, slot.name)
            assert content_hash(found) == kept.hash, (step.overload, slot.name)
            num_recomputed += not kept.has_data
    assert num_recomputed > 3, "leaves alone do not hold the results"
    assert full.num_records == rank.num_records


def test_storage_that_grows_is_followed_and_not_broken_by_the_recorder(tmp_path: Path) -> None:
    def program(m: Any, x: Any) -> Any:
        grown = x.clone()
        grown.resize_(4, 8)
        grown[2:] = 1
        return grown * 2

    rank = record(tmp_path / "t", program)
    done = execute.execute_rank(rank)
    assert (done.failed, done.differing, dict(done.skipped)) == ([], [], {})
    (value,) = wide_values(rank, "aten.mul.Tensor")
    assert torch.equal(value, torch.cat((batch(), torch.ones(2, 8))).double() * 2)


def test_random_results_are_taken_and_attention_without_dropout_is_not(tmp_path: Path) -> None:
    def program(m: Any, x: Any) -> Any:
        q = x.view(2, 1, 2, 4)
        quiet = F.scaled_dot_product_attention(q, q, q)
        return quiet, F.scaled_dot_product_attention(q, q, q, dropout_p=0.5), torch.rand(3)

    rank = record(tmp_path / "t", program)
    done = execute.execute_rank(rank)
    assert done.executed["aten._scaled_dot_product_flash_attention_for_cpu.default"] == 1
    assert {reason for _, reason in done.taken} == {"random"}
    assert done.taken["aten.rand.default", "random"] == 1
    assert done.share == 1.0


def test_a_tensor_needs_only_what_it_depends_on(tmp_path: Path) -> None:
    broken = torch.from_numpy(np.zeros(3, dtype=np.float32))
    hidden = broken.numpy()

    def program(m: Any, x: Any) -> Any:
        broken.mul(1)
        hidden[:] = 7  # no op shows this write
        wrong = broken + 1
        y = x + 1
        y[0].mul_(2)
        return wrong, y * 3

    rank = record(tmp_path / "t", program)
    right = last_op(rank, "aten.mul.Tensor")
    expected = (batch() + 1) * torch.tensor([[2.0], [1.0]]) * 3
    assert torch.equal(execute.tensor(rank, right.seq, "out"), expected)
    wrong = next(iter(rank.records(overload="aten.add.Tensor")))
    with pytest.raises(NotExecutableError, match="it came back different from its recorded hash"):
        execute.tensor(rank, wrong.seq, "out")


def test_an_input_is_the_value_before_the_op_wrote_it(tmp_path: Path) -> None:
    rank = record(tmp_path / "t", lambda m, x: (x + 1).mul_(5))
    step = last_op(rank, "aten.mul_.Tensor")
    assert torch.equal(execute.tensor(rank, step.seq, "in.self"), batch() + 1)
    assert torch.equal(execute.tensor(rank, step.seq, "out.self"), (batch() + 1) * 5)
    with pytest.raises(KeyError, match=r"has no slot 'in\.nothing'; it has"):
        execute.tensor(rank, step.seq, "in.nothing")


def test_views_and_module_slots_are_recomputed_too(tmp_path: Path) -> None:
    def program(m: Any, x: Any) -> Any:
        return (x * 2).t()[1:]

    rank = record(tmp_path / "t", program)
    expected = (batch() * 2).t()[1:]
    assert torch.equal(execute.tensor(rank, last_op(rank, "aten.t.default").seq, "out"), (batch() * 2).t())
    (module,) = rank.records(kind="module")
    assert torch.equal(execute.tensor(rank, module.seq, "out"), expected)
    assert torch.equal(execute.tensor(rank, module.seq, "in[0]"), batch())


def test_a_difference_is_named_where_it_starts(tmp_path: Path) -> None:
    memory = np.zeros(8, dtype=np.float32)
    shared = torch.from_numpy(memory)

    def program(m: Any, x: Any) -> Any:
        shared.mul(1)
        memory[:] = 7  # no op shows this write
        y = x + shared
        return y * 2, x * 3

    done = execute.execute_rank(record(tmp_path / "t", program))
    ops = [d for d in done.differing if d.overload != "module"]
    assert [(d.overload, d.slot) for d in ops] == [("aten.add.Tensor", "out"), ("aten.mul.Tensor", "out")]
    assert ops[0].why == "differs"
    assert ops[1].why == f"inherited from record {ops[0].seq}"
    assert done.equal == done.compared - 3, "two ops and the module they end in"
    assert f"bit-exact {done.equal}/{done.compared}" in done.summary()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"cpu_capability": "AVX7"}, "recorded on a CPU with AVX7"),
        ({"torch_version": "9.9"}, "recorded with torch 9.9"),
        ({"environment": {"MKL_CBWR": "AVX2"}}, "recorded with MKL_CBWR=AVX2"),
    ],
)
def test_what_cannot_be_restored_is_not_comparable(tmp_path: Path, change: Any, why: str) -> None:
    memory = np.zeros(8, dtype=np.float32)
    shared = torch.from_numpy(memory)

    def program(m: Any, x: Any) -> Any:
        shared.mul(1)
        memory[:] = 7
        return x + shared

    rank = record(tmp_path / "t", program)
    rank.header.update(change)
    assert execute.execute_rank(rank).differing[0].why == f"not comparable: {why}"


def test_strides_and_alignment_are_restored(tmp_path: Path) -> None:
    memory = np.zeros(64, dtype=np.float32)
    start = (60 - memory.ctypes.data % 64) % 64 // 4  # 60 bytes past a multiple of 64
    leaf = torch.from_numpy(memory[start : start + 16]).view(4, 4).t()
    leaf.copy_(torch.arange(16.0).view(4, 4))
    rank = record(tmp_path / "t", lambda m, x: torch.mv(x, x[0]), inputs=(leaf,))
    steps = execute.iterate(rank, inputs=True)
    read = {
        record.overload: values["in.self"] for record, values in steps if record.overload == "aten.mv.default"
    }
    found = read["aten.mv.default"]
    assert found.untyped_storage().data_ptr() % 64 == 60
    assert found.stride() == (1, 4)
    assert torch.equal(found, leaf)


def test_settings_are_those_of_the_recording_and_leave_no_trace(tmp_path: Path) -> None:
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    torch.set_default_dtype(torch.float64)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        rank = record(tmp_path / "t", lambda m, x: torch.arange(3) / 2 + torch.ones(3) + x.sum())
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float32)
    with Watch(), torch.autocast("cpu"), torch.inference_mode():
        done = execute.execute_rank(rank)
        steps = execute.iterate(rank)
        next(steps)
        state = (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), seen)
        assert state == (threads, torch.float32, False, []), "nothing leaks, not even between two steps"
    assert (done.share, done.differing) == (1.0, [])
    assert torch.is_grad_enabled()


def test_memory_is_freed_after_the_last_reader(tmp_path: Path) -> None:
    def program(m: Any, x: Any) -> Any:
        for _ in range(50):
            x = x + 1
        return x

    rank = record(tmp_path / "t", program)
    alive: list[Any] = []
    peak = 0
    steps = execute.iterate(rank)
    for _, values in steps:
        alive += [value.untyped_storage()._weak_ref() for value in values.values()]
        del values
        peak = max(peak, sum(not torch.UntypedStorage._expired(weak) for weak in alive))
    assert len(alive) > 50
    assert peak <= 3, "an op's operand and result"


def test_a_run_can_end_early_and_reports_progress(tmp_path: Path) -> None:
    rank = record(tmp_path / "t", lambda m, x: (x + 1) * 2 - 3)
    stop = last_op(rank, "aten.mul.Tensor").seq
    calls: list[tuple[int, int]] = []
    done = execute.execute_rank(rank, until=stop, progress=lambda n, total: calls.append((n, total)))
    assert set(done.executed) == {"aten.add.Tensor", "aten.mul.Tensor"}
    assert calls[-1][0] == calls[-1][1] < rank.num_records


# In float64 ---------------------------------------------------------------------------------------


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


# What is not executed -----------------------------------------------------------------------------


def test_traces_without_leaves_say_what_to_record(tmp_path: Path) -> None:
    rank = record(tmp_path / "t", lambda m, x: x + 1, save="stats")
    with pytest.raises(
        NotExecutableError, match=r"recorded with save='stats': it holds no data.*save=\"leaves\""
    ):
        execute.execute_rank(rank)
    model = Program(lambda m, x: x + 1)
    with dt.record(tmp_path / "modules", model, level="module", save="tensors"):
        model(batch())
    with pytest.raises(NotExecutableError, match="holds modules only"):
        execute.execute_rank(open_ranks(tmp_path / "modules")[0])
    with dt.record(tmp_path / "blind", model, inputs=False, save="tensors"):
        model(batch())
    with pytest.raises(NotExecutableError, match="recorded with inputs=False"):
        execute.execute_rank(open_ranks(tmp_path / "blind")[0])


@pytest.mark.parametrize(
    "name",
    [
        "load_library.so.default",
        "aten.no_such_op.default",
        "aten.mm",
        "aten.mm.no_overload",
        "os.system.ls",
        "",
    ],
)
def test_names_that_are_no_ops_are_refused(name: str) -> None:
    with pytest.raises(NotRunnableError, match=re.escape(execute_ops.REASON_UNKNOWN)):
        resolve(name)


def test_what_cannot_run_costs_itself_and_what_depends_on_it(tmp_path: Path) -> None:
    model = Program(lambda m, x: ((x + 1) * 2, torch.zeros(3) - 1))
    with torch.no_grad(), dt.record(tmp_path / "t", model, save="leaves", max_bytes=0):
        model(batch())
    (rank,) = open_ranks(tmp_path / "t")
    done = execute.execute_rank(rank)
    assert done.skipped["aten.add.Tensor", "the data of a leaf is not in the trace"] == 1
    assert done.skipped["aten.mul.Tensor", "an input that no record here produced"] == 1
    assert set(done.executed) == {"aten.zeros.default", "aten.sub.Tensor"}
    assert (done.failed, done.differing) == ([], [])
    with pytest.raises(NotExecutableError, match="the data of a leaf is not in the trace"):
        execute.tensor(rank, last_op(rank, "aten.mul.Tensor").seq, "out")


def test_the_limits_page_lists_all_that_is_taken_or_has_a_formula() -> None:
    text = " ".join((ROOT / "docs" / "limits.md").read_text().split())
    reasons = [
        execute_ops.REASON_RANDOM,
        execute_ops.REASON_HIGHER_ORDER,
        execute_ops.REASON_COLLECTIVE,
        execute_ops.REASON_UNKNOWN,
        execute_ops.REASON_ARGUMENT,
        *execute_ops.TAKEN_OPS.values(),
    ]
    for reason in reasons:
        assert f"`{reason}`" in text, reason
    for name in (*execute_ops.TAKEN_OPS, *execute_ops.COLLECTIVE_NAMESPACES):
        assert f"`{name}`" in text, name
    for overload in execute_ops.FORMULAS:
        assert f"`{overload.removesuffix('.default')}`" in text, overload


# Whole models, in a process that has none of them --------------------------------------------------


def load_replay() -> Any:
    spec = importlib.util.spec_from_file_location("replay", ROOT / "tools" / "replay.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["replay"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_again(*paths: Path) -> list[Any]:
    """Rows of `tools/replay.py` from a fresh process, on copies of the traces."""
    arguments: list[str] = []
    for path in paths:
        copy = path.with_name(f"copy-{path.name}")
        shutil.copytree(path, copy)
        shutil.rmtree(path)
        arguments += ["--trace", str(copy)]
    done = run_python("tools/replay.py", "--rows", *arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_all_came_back(row: Any) -> None:
    name = row["trace"]
    skipped = [
        key for key in row["skipped"] if "an uninitialized parameter" not in key
    ]  # zoo 90: no value yet
    assert row["misses"] == [] and skipped == [], name
    assert row["equal"] == row["compared"] > 0, name
    assert row["wide_failed"] == [] and row["wide_skipped"] == row["skipped"], name
    assert all(key.endswith(" random") for key in row["taken"]), name


@torch.library.custom_op("executed_tests::gated", mutates_args={"count"})
def gated(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    count.add_(1)
    return x * torch.sigmoid(x)


def test_ops_of_absent_libraries_are_taken_with_the_reason(tmp_path: Path) -> None:
    rank = record(tmp_path / "t", lambda m, x: gated(x + 1, m.seen) * 2 + m.seen)
    here = execute.execute_rank(rank)
    assert (here.taken.total(), here.share) == (0, 1.0), "where the library is loaded, the op runs"
    (row,) = run_again(tmp_path / "t")
    assert row["taken"] == {"executed_tests.gated.default the op's library is not loaded here": 1}
    assert (row["misses"], row["skipped"], row["equal"]) == ([], {}, row["compared"])
    assert row["compared"] == 4, "add, mul, the second add, and the module"


@pytest.mark.filterwarnings("ignore")
def test_transformers_models_come_back_from_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    replay = load_replay()
    paths = []
    for name in replay.SMALL:
        paths.append(tmp_path / f"{name}.trace")
        replay.record_training(name, paths[-1], "leaves", num_steps=1)
    paths.append(tmp_path / "minilm.trace")
    replay.record_minilm(paths[-1], "leaves")
    rows = run_again(*paths)
    assert len(rows) == 7
    for row in rows:
        assert_all_came_back(row)
    assert sum(row["compared"] for row in rows) > 4000


@pytest.mark.filterwarnings("ignore")
def test_the_zoo_comes_back_from_leaves(tmp_path: Path) -> None:
    replay = load_replay()
    paths = []
    for file in sorted((ROOT / "tests" / "zoo").glob("[0-9]*.py")):
        for side in ("reference", "target"):
            path = tmp_path / f"{file.stem[:2]}-{side}.trace"
            if side == "reference" or not replay.is_compiled(file):
                replay.record_zoo(file, side, path, "leaves")
                paths.append(path)
    assert len(paths) > 100
    rows = run_again(*paths)
    unknown = "rescases.gated.default the op's library is not loaded here"
    for row in rows:
        if unknown not in row["taken"]:
            assert_all_came_back(row)
    assert sum(row["equal"] for row in rows) == sum(row["compared"] for row in rows) > 3000
