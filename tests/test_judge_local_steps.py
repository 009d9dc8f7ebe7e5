"""Local replay where steps pair by request: batches and caches against requests computed alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ports
import pytest
import torch
from test_judge_local import SPOILS, Faulty, kernel

import dispatch_trace as dt

LENGTH = 8
Step = tuple[torch.Tensor, dict[str, Any]]


def step(ids: torch.Tensor, rows: range, first: int, end: int) -> Step:
    meta = {
        "phase": "prefill" if first == 0 else "decode",
        "req_ids": [f"r{row}" for row in rows],
        "positions": [list(range(first, end)) for _ in rows],
    }
    return ids[rows.start : rows.stop, first:end], meta


def record(path: Path, model: Any, steps: list[Step], fault: Faulty | None, *, save: str) -> Path:
    from transformers import DynamicCache

    cache = DynamicCache()
    with torch.no_grad(), kernel(fault), dt.record(path, model, save=save, overwrite=True) as rec:
        for ids, meta in steps:
            keep = {"use_cache": True, "cache": cache} if len(ids) == 1 else {"use_cache": False}
            with rec.step(**meta):
                model(input_ids=ids, **keep)
            if len(ids) > 1 or ids.shape[1] == LENGTH:
                cache = DynamicCache()  # the next one is another request
    return path


@pytest.fixture(scope="module")
def model() -> Any:
    return ports.llama(2)[0]


@pytest.mark.parametrize("save", ["tensors", "leaves"])
@pytest.mark.parametrize("how", ["batch", "cache"])
def test_a_faulty_kernel_is_named_where_steps_pair_by_request(
    how: str, save: str, model: Any, tmp_path: Path
) -> None:
    ids = ports.token_ids(2, LENGTH)
    alone = [step(ids, range(row, row + 1), 0, LENGTH) for row in range(2)]
    if how == "batch":
        target = [step(ids, range(2), 0, LENGTH)]
    else:
        alone = alone[:1]
        target = [step(ids, range(1), first, end) for first, end in ((0, 6), (6, 7), (7, 8))]
    ref = record(tmp_path / "ref", model, alone, None, save=save)
    clean = dt.align(ref, record(tmp_path / "target", model, target, None, save=save))
    assert clean.verdict == "match", (clean.reasons, clean.first)
    for overload, number, spoil, module in (
        ("aten.silu.default", 1, "one ulp", "model.layers.1.mlp.act_fn"),
        ("aten.mm.default", 9, "one element", "model.layers.1.self_attn.v_proj"),
    ):
        fault = Faulty(overload, number, SPOILS[spoil])
        first = dt.align(ref, record(tmp_path / "target", model, target, fault, save=save)).first
        assert first is not None and first.judge == "local replay", first
        assert (first.module, first.op, first.step) == (module, overload.removesuffix(".default"), 0)


def test_a_faulty_kernel_of_a_later_step_that_reads_a_cache(model: Any, tmp_path: Path) -> None:
    ids = ports.token_ids(1, LENGTH)
    ref = record(tmp_path / "ref", model, [step(ids, range(1), 0, LENGTH)], None, save="tensors")
    pieces = [step(ids, range(1), first, end) for first, end in ((0, 6), (6, 7), (7, 8))]
    fault = Faulty("aten.silu.default", 3, SPOILS["one ulp"])
    first = dt.align(ref, record(tmp_path / "target", model, pieces, fault, save="tensors")).first
    assert first is not None and (first.module, first.step) == ("model.layers.1.mlp.act_fn", 1), first
