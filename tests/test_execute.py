"""Execution: a trace that holds leaves only is a program, and gives back what was recorded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import ROOT
from execute_programs import PROGRAMS, Program, batch, last_op, record, wide_values
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import dispatch_trace as dt
from dispatch_trace import execute, execute_ops
from dispatch_trace.errors import NotExecutableError
from dispatch_trace.execute_ops import NotRunnableError, resolve
from dispatch_trace.store.layouts import content_hash
from dispatch_trace.store.reader import open_ranks


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
    record(tmp_path / "first", program)  # what is set up at the first call
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
