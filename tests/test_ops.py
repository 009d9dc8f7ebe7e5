"""Op capture: every op once, with its arguments, its values and where they came from."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import dispatch_trace as dt
from dispatch_trace.store.reader import RankReader, open_ranks


class Fn(nn.Module):
    """A module around a plain function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def record(path: Any, function: Any, *inputs: Any, **options: Any) -> RankReader:
    options.setdefault("save", "tensors")
    model = function if isinstance(function, nn.Module) else Fn(function)
    with torch.no_grad(), dt.record(path, model, **options):
        model(*inputs)
    (rank,) = open_ranks(path)
    assert rank.complete, rank.end
    return rank


def ops(rank: RankReader, *, light: bool = False, phase: str | None = None) -> list[Any]:
    return [
        r
        for r in rank.records()
        if r.kind == "op" and (light or not r.light) and (phase is None or r.grad_phase == phase)
    ]


def slot(record_: Any, name: str) -> Any:
    (found,) = [s for s in record_.slots if s.name == name]
    return found


def value(rank: RankReader, record_: Any, name: str) -> torch.Tensor:
    return rank.tensor(slot(record_, name).content)


def test_arguments_are_kept_whole(tmp_path: Any) -> None:
    rank = record(
        tmp_path / "t", lambda x: torch.sum(x, dim=[0], keepdim=True, dtype=torch.float64), torch.ones(2, 3)
    )
    (op,) = ops(rank)
    assert dict(op.args) == {"self": {"ref": 0}, "dim": [0], "keepdim": True, "dtype": {"dtype": "float64"}}
    assert (op.op, op.overload, op.n) == ("aten.sum", "aten.sum.dim_IntList", 0)
    assert op.source is not None and op.source[0].endswith("test_ops.py")


def test_n_counts_an_op_in_its_own_body(tmp_path: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Fn(lambda x: x + 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x + 2) + 3

    keys = [(r.module, r.n) for r in ops(record(tmp_path / "t", Net(), torch.ones(2)))]
    assert keys == [("", 0), ("inner", 0), ("", 1)]


def test_producers_follow_values_through_views(tmp_path: Any) -> None:
    rank = record(tmp_path / "t", lambda x: (x + 1).t().contiguous() * 2, torch.ones(2, 3))
    add, view, clone, mul = ops(rank, light=True)
    assert [r.op for r in (add, view, clone, mul)] == ["aten.add", "aten.t", "aten.clone", "aten.mul"]
    assert view.light and not clone.light
    assert slot(view, "in.self").producers == ((add.seq, 1),)
    assert slot(clone, "in.self").producers == ((view.seq, 1),)
    assert slot(view, "out").content < 0, "a view holds no data of its own"
    assert slot(view, "out").storage == slot(add, "out").storage
    assert slot(add, "in.self").leaf and not slot(mul, "in.self").leaf


def test_an_in_place_write_keeps_the_value_before_and_after(tmp_path: Any) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        y = x - 2
        y.relu_()
        return y

    rank = record(tmp_path / "t", body, torch.tensor([1.0, 3.0]))
    sub, relu = ops(rank)
    assert torch.equal(value(rank, sub, "out"), torch.tensor([-1.0, 1.0]))
    assert torch.equal(value(rank, relu, "in.self"), torch.tensor([-1.0, 1.0]))
    assert torch.equal(value(rank, relu, "out.self"), torch.tensor([0.0, 1.0]))
    assert relu.op == "aten.relu" and relu.overload == "aten.relu_.default"


def test_a_write_through_a_view_reaches_readers_of_the_base(tmp_path: Any) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        y = x + 0
        y[0].add_(5)
        return y * 1

    rank = record(tmp_path / "t", body, torch.zeros(2, 2))
    add, _, write, mul = ops(rank, light=True)
    assert slot(mul, "in.self").producers == ((add.seq, 1), (write.seq, 1))
    assert not slot(mul, "in.self").leaf
    assert torch.equal(value(rank, mul, "out"), torch.tensor([[5.0, 5.0], [0.0, 0.0]]))


def test_out_arguments_and_foreach_lists_are_written_slots(tmp_path: Any) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(2)
        torch.add(x, 1, out=out)
        torch._foreach_mul_([out], 3.0)
        return out

    rank = record(tmp_path / "t", body, torch.ones(2))
    add, mul = ops(rank)
    assert torch.equal(value(rank, add, "out.out"), torch.full((2,), 2.0))
    assert torch.equal(value(rank, mul, "out.self[0]"), torch.full((2,), 6.0))
    assert not any(s.uninitialised for r in ops(rank) for s in r.slots)


def test_reading_memory_nobody_wrote_is_marked(tmp_path: Any) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        half = torch.empty(4)
        half[:2] = x
        whole = torch.empty(4)
        whole[:2] = x
        whole[2:] = x
        return half + whole

    add = ops(record(tmp_path / "t", body, torch.ones(2)))[-1]
    assert slot(add, "in.self").uninitialised and slot(add, "in.self").leaf
    assert not slot(add, "in.other").uninitialised


def test_a_write_that_no_op_shows_makes_a_leaf_again(tmp_path: Any) -> None:
    state = torch.ones(2)
    model = Fn(lambda: state * 2)
    with torch.no_grad(), dt.record(tmp_path / "t", model, save="tensors"):
        model()
        state.add_(1)  # outside every call: not recorded, but noticed
        model()
    (rank,) = open_ranks(tmp_path / "t")
    first, second = (r for r in rank.records() if r.op == "aten.mul")
    assert slot(first, "in.self").leaf and slot(second, "in.self").leaf
    assert torch.equal(value(rank, second, "in.self"), torch.full((2,), 2.0))


def test_backward_ops_carry_the_module_of_the_forward(tmp_path: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    with dt.record(tmp_path / "t", model, save="tensors"):
        model(torch.randn(2, 3)).sum().backward()
    (rank,) = open_ranks(tmp_path / "t")
    backward = ops(rank, phase="bwd")
    owners = {(r.module, r.op) for r in backward}
    assert ("1", "aten.tanh_backward") in owners
    assert ("0", "aten.mm") in owners and ("2", "aten.mm") in owners
    assert {r.call for r in backward if r.module} == {0}
    assert not [r for r in ops(rank, phase="fwd") if r.op == "aten.sum"], "outside the call of the model"


def test_checkpointed_blocks_are_one_forward_and_one_recomputation(tmp_path: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    model = Net()
    with dt.record(tmp_path / "t", model):
        model(torch.randn(2, 4)).sum().backward()
    (rank,) = open_ranks(tmp_path / "t")
    for i in range(3):
        phases = [r.grad_phase for r in rank.records() if r.kind == "module" and r.module == f"blocks.{i}"]
        assert phases.count("fwd") == 1 and phases.count("recompute") == 1
        tanh = [r for r in rank.records() if r.module == f"blocks.{i}.1" and r.op == "aten.tanh"]
        assert [(r.grad_phase, r.call) for r in tanh] == [("fwd", 0), ("recompute", 0)]
    assert {r.op for r in ops(rank, phase="bwd")} >= {"aten.tanh_backward", "aten.mm"}
    assert "aten.tanh" not in {r.op for r in ops(rank, phase="bwd")}


def test_a_checkpointed_function_is_recomputation_too(tmp_path: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(lambda v: torch.sin(v * self.w), x, use_reentrant=False)

    model = Net()
    with dt.record(tmp_path / "t", model):
        model(torch.randn(4)).sum().backward()
    (rank,) = open_ranks(tmp_path / "t")
    assert "aten.mul" in {r.op for r in ops(rank, phase="recompute")}
    assert "aten.cos" in {r.op for r in ops(rank, phase="bwd")}


def test_inference_mode_shows_the_same_ops_as_no_grad(tmp_path: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    x = torch.randn(2, 3, 4)
    with torch.no_grad(), dt.record(tmp_path / "a", model):
        want = model(x)
    with torch.inference_mode(), dt.record(tmp_path / "b", model):
        got = model(x)
    assert torch.equal(want, got) and got.is_inference()
    (a,), (b,) = open_ranks(tmp_path / "a"), open_ranks(tmp_path / "b")
    assert [r.op for r in ops(a)] == [r.op for r in ops(b)]


def test_autocast_is_seen_as_the_casts_it_makes(tmp_path: Any) -> None:
    model = nn.Linear(4, 4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), dt.record(tmp_path / "t", model):
        model(torch.randn(2, 4))
    (rank,) = open_ranks(tmp_path / "t")
    assert [r.op for r in ops(rank)].count("aten._to_copy") >= 2
    assert ops(rank)[-1].op == "aten.addmm"


def test_results_and_random_state_are_untouched(tmp_path: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).train()
    x = torch.randn(4, 8)
    torch.manual_seed(5)
    want, after = model(x), torch.rand(1)
    for save in ("meta", "stats", "leaves", "tensors"):
        torch.manual_seed(5)
        with dt.record(tmp_path / save, model, save=save):
            got = model(x)
            then = torch.rand(1)
        assert torch.equal(got, want) and torch.equal(then, after), save


def test_numpy_views_taken_before_still_see_writes(tmp_path: Any) -> None:
    seen: list[Any] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        view = y.numpy()
        y.mul_(10)
        seen.append(view.copy())
        return y

    record(tmp_path / "t", body, torch.zeros(3))
    assert seen[0].tolist() == [10.0, 10.0, 10.0]


def test_nothing_of_the_program_is_kept_alive(tmp_path: Any) -> None:
    import gc
    import weakref

    for grad in (False, True):
        model = nn.Linear(4, 4)
        with torch.set_grad_enabled(grad), dt.record(tmp_path / str(grad), model) as rec:
            out = model(torch.randn(2, 4))
        dead = [weakref.ref(out), weakref.ref(model)]
        del out, model
        gc.collect()
        assert [d() for d in dead] == [None, None], grad
        assert rec.num_records > 0


def test_a_long_training_run_keeps_no_mark_of_old_steps(tmp_path: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with dt.record(tmp_path / "t", model, save="meta") as rec:
        sizes = []
        for _ in range(200):
            model(torch.ones(1, 2)).sum().backward()
            assert rec._tracer is not None
            sizes.append(len(rec._tracer.state.marks))
    assert sizes[-1] <= sizes[80]
    (rank,) = open_ranks(tmp_path / "t")
    assert {r.module for r in ops(rank, phase="bwd") if r.step == 199} >= {"0", "1"}


def test_other_modes_see_the_program_and_not_the_recorder(tmp_path: Any) -> None:
    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    outer, inner = Count(), Count()

    def body(x: torch.Tensor) -> torch.Tensor:
        with inner:
            y = x + 1
        return y * 2

    x = torch.ones(2)
    with outer:
        rank = record(tmp_path / "t", body, x)
    assert outer.seen == ["aten.add.Tensor", "aten.mul.Tensor"]
    assert inner.seen == ["aten.add.Tensor"]
    assert [r.op for r in ops(rank)] == ["aten.add", "aten.mul"]


def test_custom_ops_are_one_record_with_what_they_wrote(tmp_path: Any) -> None:
    @torch.library.custom_op("dispatch_trace_tests::bump", mutates_args={"state"})
    def bump(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.add_(1)
        return x * state

    state = torch.zeros(1)
    rank = record(tmp_path / "t", lambda x: bump(x, state), torch.ones(2))
    (op,) = ops(rank)
    assert op.op == "dispatch_trace_tests.bump"
    assert torch.equal(value(rank, op, "out.state"), torch.ones(1))
    assert torch.equal(value(rank, op, "in.state"), torch.zeros(1))
    assert torch.equal(value(rank, op, "out"), torch.ones(2))


def test_a_number_from_item_names_its_producer(tmp_path: Any) -> None:
    rank = record(tmp_path / "t", lambda x: x * x.max().item(), torch.tensor([1.5, 3.25]))
    item = next(r for r in ops(rank) if r.op == "aten._local_scalar_dense")
    assert dict(ops(rank)[-1].args)["other"] == {"item": [3.25, item.seq]}


def test_without_a_model_everything_is_recorded(tmp_path: Any) -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad(), dt.record(tmp_path / "t"):
        x = torch.ones(1, 2) * 3
        y = model(x)
        y + 1
    (rank,) = open_ranks(tmp_path / "t")
    assert rank.header["models"][""]["class"].endswith("Linear"), "the header learns of the root"
    keys = [(r.step, r.call, r.op) for r in ops(rank)]
    assert keys == [(-1, -1, "aten.ones"), (-1, -1, "aten.mul"), (0, 0, "aten.addmm"), (0, -1, "aten.add")]


def test_with_a_model_the_room_outside_is_recorded_only_inside_a_step(tmp_path: Any) -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad(), dt.record(tmp_path / "t", model) as rec:
        torch.ones(1) + 1
        with rec.step(phase="decode", req_ids=["a"], positions=torch.tensor([3])):
            y = model(torch.zeros(1, 2))
            y * 2
        torch.ones(1) + 1
    (rank,) = open_ranks(tmp_path / "t")
    assert [r.op for r in ops(rank)] == ["aten.zeros", "aten.addmm", "aten.mul"]
    assert rank.steps[0].meta == {"phase": "decode", "req_ids": ["a"], "positions": [3]}


def test_ops_select_and_steps_narrow_what_is_recorded(tmp_path: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.Tanh())
    with torch.no_grad():
        with dt.record(tmp_path / "ops", model, ops=r"aten\.tanh"):
            model(torch.ones(1, 2))
        with dt.record(tmp_path / "select", model, select="1"):
            model(torch.ones(1, 2))
        with dt.record(tmp_path / "steps", model, steps=1):
            for _ in range(3):
                model(torch.ones(1, 2))
    assert [r.op for r in ops(open_ranks(tmp_path / "ops")[0], light=True)] == ["aten.tanh"]
    (rank,) = open_ranks(tmp_path / "select")
    assert {r.module for r in rank.records()} == {"1", "1.0"}
    (rank,) = open_ranks(tmp_path / "steps")
    assert {r.step for r in rank.records() if r.kind != "param"} == {1}
    assert [s.step for s in rank.steps] == [1]


def test_meta_records_sites_shapes_and_arguments_only(tmp_path: Any) -> None:
    rank = record(tmp_path / "t", nn.Linear(2, 3), torch.ones(4, 2), save="meta")
    (addmm,) = ops(rank)
    assert slot(addmm, "out").shape == (4, 3) and slot(addmm, "out").dtype == "float32"
    assert rank.num_contents == 0
    assert [r.kind for r in rank.records()] == ["op", "op", "module"]


def test_a_cache_written_piece_by_piece_is_stored_as_pieces(tmp_path: Any) -> None:
    cache = torch.zeros(64, 1024)

    def body(x: torch.Tensor) -> torch.Tensor:
        for i in range(8):
            cache[i] = x
        return cache.sum()

    rank = record(tmp_path / "t", body, torch.ones(1024))
    assert rank.end is not None and rank.end["num_bytes"] < 3 * cache.nbytes


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.complex64])
def test_unusual_dtypes_come_back_bit_for_bit(tmp_path: Any, dtype: torch.dtype) -> None:
    rank = record(tmp_path / "t", lambda x: x.to(dtype), torch.randn(5))
    (op,) = ops(rank)
    assert value(rank, op, "out").dtype == dtype
    want = value(rank, op, "in.self").to(dtype)
    assert torch.equal(value(rank, op, "out").view(torch.uint8), want.view(torch.uint8))


def test_deterministic_garbage_of_empty_is_the_programs_business(tmp_path: Any) -> None:
    x = torch.randn(3)
    x.requires_grad_()
    model = Fn(lambda v: (v * 2).detach())
    with dt.record(tmp_path / "t", model, save="tensors"):
        out = model(x)
    assert not out.requires_grad and x.requires_grad


def test_meta_reaches_the_disk_during_a_long_call_without_submodules(tmp_path: Any) -> None:
    counts = []

    def body(x: torch.Tensor) -> torch.Tensor:
        until = time.monotonic() + 20
        while not recording._tracer.writer.num_records and time.monotonic() < until:  # type: ignore[union-attr]
            x = x + 1
            counts.append(1)
        return x

    with torch.no_grad(), dt.record(tmp_path / "t", model := Fn(body), save="meta") as recording:
        model(torch.ones(1))
        assert recording._tracer.writer.num_records > 0, "notes wait for no end of the call"  # type: ignore[union-attr]
        assert recording.num_records == len(counts) + 1
    (rank,) = open_ranks(tmp_path / "t")
    assert len(ops(rank)) == len(counts)
    assert [record.seq for record in rank.records()] == list(range(len(counts) + 1))


def test_numbers_that_are_equal_and_differ_in_kind_stay_apart(tmp_path: Any) -> None:
    scales = [2, 2.0, True, 1, 1.0, 0.0, -0.0, float("nan"), None]

    def body(x: torch.Tensor) -> torch.Tensor:
        for scale in scales:
            x = x * scale if scale is not None else x.clamp(None, 3)
        return x

    (rank,) = (record(tmp_path / "t", Fn(body), torch.ones(2), save="meta"),)
    found = [r.args[1][1] for r in ops(rank)]
    assert [repr(value) for value in found] == [repr(scale) for scale in scales]
