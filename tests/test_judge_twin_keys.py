"""Keys of values: nothing equal is invented, a program in another precision is known without running it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import execute_programs as programs
import pytest
import torch
from aligning import batch, changed, net, record
from torch import nn

import dispatch_trace as dt
from dispatch_trace import execute
from dispatch_trace.judge.twin_keys import Interned, value_keys
from dispatch_trace.schema import StoredSlot
from dispatch_trace.store.reader import RankReader

FUNCTIONS = [
    programs.in_place,
    programs.outs_and_lists,
    programs.caches,
    programs.random_results,
    programs.strange_views,
    programs.layouts,
    programs.numbers,
    programs.attention,
    programs.modes,
    programs.swapped_data,
]


def keys_of(rank: RankReader, interned: Interned) -> dict[tuple[int, int], int]:
    def leaf(slot: StoredSlot) -> int | None:
        content = rank.content(slot.content) if slot.content >= 0 else None
        if content is None or not content.has_data:
            return None
        return interned.of(("leaf", content.hash))

    return value_keys(rank.records(), rank, interned, leaf)


@pytest.mark.filterwarnings("ignore")  # quantised and sparse tensors warn
def test_equal_keys_are_equal_values_within_and_across_programs(tmp_path: Path) -> None:
    interned, known = Interned(), dict[int, torch.Tensor]()
    met = shared = 0
    for number, function in enumerate(FUNCTIONS):
        rank = programs.record(tmp_path / str(number), function)
        keys = keys_of(rank, interned)
        for step, values in execute.iterate(rank, dtype=torch.float64, inputs=True):
            for slot in step.slots:
                value = values.get(slot.name)
                key = keys.get((step.seq, slot.index))
                huge = value is not None and value.numel() > 1 << 20
                if value is None or key is None or huge or step.op.startswith("aten.empty"):
                    continue
                met += 1
                if key not in known:
                    known[key] = value.clone()
                    continue
                shared += 1
                where = (function.__name__, step.overload, slot.name)
                assert known[key].shape == value.shape, where
                if value.layout is torch.strided and not value.is_quantized:
                    a, b = (x.cdouble().nan_to_num() for x in (known[key], value))
                    assert torch.equal(a, b), where
    assert met > 300 and shared > 100, (met, shared)


def what_ran(tmp_path: Path, ref: nn.Module, target: nn.Module) -> tuple[str, set[str]]:
    """The verdict, and what the alignment said it was doing."""
    for name, model in (("ref", ref), ("target", target)):
        record(tmp_path / name, model, batch().to(next(model.parameters()).dtype), save="leaves")
    said: set[str] = set()
    found = dt.align(tmp_path / "ref", tmp_path / "target", progress=lambda done, total, what: said.add(what))
    return found.verdict, said


def test_one_program_in_two_precisions_needs_no_run_in_float64(tmp_path: Path) -> None:
    verdict, said = what_ran(tmp_path, net(), net().to(torch.bfloat16))
    assert verdict == "match"
    assert "running each op of the target again" in said
    assert not any("float64" in what for what in said)


def other_eps(model: Any) -> None:
    model.blocks[2].norm.eps = 1e-4


def other_element(model: Any) -> None:
    model.blocks[1].up.weight[3, 5] *= 1.5


@pytest.mark.parametrize("change", [other_eps, other_element])
def test_another_program_is_run_in_float64(tmp_path: Path, change: Callable[[Any], None]) -> None:
    verdict, said = what_ran(tmp_path, net(), changed(change).to(torch.bfloat16))
    assert verdict == "diverged"
    assert {"running the reference in float64", "running the target in float64"} <= said


def test_a_fault_of_a_kernel_runs_the_reference_alone(tmp_path: Path) -> None:
    """The program is known to be one; how far its outputs are off takes its float64 values, once."""

    def scaled(model: Any) -> None:
        down = model.blocks[1].down
        down.register_forward_hook(lambda module, args, out: out.mul_(1.01))

    verdict, said = what_ran(tmp_path, net(), changed(scaled))
    assert verdict == "diverged"
    assert "running the reference in float64" in said


def test_pieces_written_one_by_one_are_told_apart(tmp_path: Path) -> None:
    def written(order: tuple[int, int]) -> Callable[[Any, Any], Any]:
        def function(m: Any, x: Any) -> Any:
            cache = torch.zeros(4, 8)
            for place, row in zip(order, x, strict=True):
                cache[place] = row
            return cache.sum(0), cache[1:3] @ m.weight

        return function

    interned, found = Interned(), []
    for number, order in enumerate([(0, 1), (0, 1), (1, 0), (0, 2)]):
        rank = programs.record(tmp_path / str(number), written(order))
        keys = keys_of(rank, interned)
        last = programs.last_op(rank, "aten.mm.default")
        found.append(keys[last.seq, next(s.index for s in last.slots if s.role == "out")])
    assert found[0] == found[1]
    assert all(a != b for a, b in itertools.combinations(found[1:], 2))
