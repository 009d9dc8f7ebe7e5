"""Steps pair by request and position, and rows by request: padding, batches, caches, ties."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dispatch_trace as dt
from dispatch_trace.align.positions import Cell, StepRows, rows_of
from dispatch_trace.align.rows import RowMap
from dispatch_trace.align.steps import StepPair, StepPlan, pair_steps
from dispatch_trace.schema import StepInfo
from dispatch_trace.store.reader import open_ranks

Call = tuple[Sequence[Sequence[int]], dict[str, Any]]


def step(**meta: Any) -> StepInfo:
    return StepInfo(step=0, meta=meta)


def cells(found: StepRows | str | None) -> list[tuple[int, int, str, int]]:
    assert isinstance(found, StepRows)
    return [(c.row, c.place, c.request, c.position) for c in found.cells]


# What metadata says --------------------------------------------------------------------------------------


def test_a_bucket_repeats_its_last_position_and_left_padding_its_first() -> None:
    right = rows_of(step(req_ids=["a"], positions=[[0, 1, 2, 2, 2]]))
    assert cells(right) == [(0, 0, "a", 0), (0, 1, "a", 1), (0, 2, "a", 2)]
    left = rows_of(step(req_ids=["a"], positions=[[1, 1, 0, 1, 2]]))
    assert cells(left) == [(0, 2, "a", 0), (0, 3, "a", 1), (0, 4, "a", 2)]


def test_flat_positions_are_tokens_of_one_request_or_one_token_of_each_row() -> None:
    prefill = rows_of(step(phase="prefill", req_ids=["a"], positions=[0, 1, 2, 2]))
    assert cells(prefill) == [(0, 0, "a", 0), (0, 1, "a", 1), (0, 2, "a", 2)]
    decode = rows_of(step(phase="decode", req_ids=["a", "b"], positions=[7, 3, 0, 0]))
    assert cells(decode) == [(0, 0, "a", 7), (1, 0, "b", 3)]
    assert isinstance(decode, StepRows) and (decode.batch, decode.tokens) == (4, 1)


def test_requests_behind_one_another_are_parted_where_positions_fall_or_by_lengths() -> None:
    packed = rows_of(step(phase="prefill", req_ids=["a", "b"], positions=[0, 1, 2, 0, 1]))
    assert cells(packed)[2:4] == [(0, 2, "a", 2), (0, 3, "b", 0)]
    told = rows_of(step(phase="prefill", req_ids=["a", "b"], positions=[4, 5, 6, 7, 7], valid_lengths=[2, 2]))
    assert [c[2] for c in cells(told)] == ["a", "a", "b", "b"]
    unclear = rows_of(step(phase="prefill", req_ids=["a", "b"], positions=[4, 5, 6]))
    assert unclear == "2 requests in 3 places, and nothing says where each begins"


def test_lengths_and_masks_overrule_positions() -> None:
    counted = rows_of(step(req_ids=["a", "b"], positions=[[0, 1, 2, 3], [0, 1, 2, 3]], valid_lengths=[2, 3]))
    assert [c[:2] for c in cells(counted)] == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    masked = rows_of(step(req_ids=["a"], positions=[[0, 1, 2]], valid=[[False, True, True]]))
    assert [c[1] for c in cells(masked)] == [1, 2]


@pytest.mark.parametrize(
    ("meta", "why"),
    [
        ({"req_ids": ["a", "b", "c"], "positions": [[0], [1]]}, "3 request ids, and positions of 2 rows"),
        ({"req_ids": ["a"], "positions": [[0, 1], [2]]}, "positions are no table of integers"),
        ({"req_ids": ["a"], "positions": [[0, 1]], "valid": [[True]]}, "valid and positions have different"),
        ({"req_ids": ["a"], "positions": [[0, 1]], "valid_lengths": [1, 1]}, "do not fit 1 rows"),
    ],
)
def test_metadata_that_contradicts_itself_says_so(meta: dict[str, Any], why: str) -> None:
    found = rows_of(step(**meta))
    assert isinstance(found, str) and why in found


def test_a_step_that_says_nothing_has_no_rows() -> None:
    assert rows_of(step(phase="decode")) is None


# Rows of tensors -----------------------------------------------------------------------------------------


def pair_of(ref: StepRows, target: StepRows, **more: Any) -> StepPair:
    theirs = {(c.request, c.position): c for c in ref.cells}
    both = [(theirs[c.request, c.position], c) for c in target.cells if (c.request, c.position) in theirs]
    return StepPair(ref=("", 0), target=("", 0), ref_rows=ref, target_rows=target, cells=both, **more)


def table(positions: list[list[int]], ids: list[str], **meta: Any) -> StepRows:
    found = rows_of(step(req_ids=ids, positions=positions, **meta))
    assert isinstance(found, StepRows)
    return found


PREFILL = pair_of(table([[0, 1, 2]], ["a"]), table([[0, 1, 1, 1, 1], [0, 1, 2, 2, 2]], ["b", "a"]))


def one(pair: StepPair, ref: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> tuple[Any, Any, str]:
    rows = RowMap(pair)
    readings = rows.readings(ref.shape, target.shape)
    assert readings
    selected = rows.select(readings, ref, target)[0]
    return selected.ref, selected.target, selected.transform


def test_rows_and_tokens_are_found_by_their_sizes() -> None:
    target = np.random.default_rng(0).normal(size=(2, 5, 7))
    a, b, how = one(PREFILL, target[1:, :3], target)
    assert np.array_equal(a, b) and a.shape == (3, 7)
    assert how == "row 1 of 2 (dim 0), places 0-2 of 5 (dim 1)"


def test_heads_folded_into_the_batch_and_flattened_tokens_are_found() -> None:
    folded = np.random.default_rng(0).normal(size=(2 * 4, 5, 7))  # four heads
    a, b, _ = one(PREFILL, folded.reshape(2, 4, 5, 7)[1, :, :3], folded)
    assert np.array_equal(a, b) and a.size == 4 * 3 * 7
    flat = np.random.default_rng(1).normal(size=(2 * 5, 7))
    a, b, how = one(PREFILL, flat.reshape(2, 5, 7)[1, :3], flat)
    assert np.array_equal(a, b) and a.shape == (3, 7) and how == "3 of 10 rows (dim 0)"


def test_scores_lose_padded_keys_as_well() -> None:
    scores = np.random.default_rng(0).normal(size=(2, 4, 5, 5))
    a, b, how = one(PREFILL, scores[1:, :, :3, :3], scores)
    assert np.array_equal(a, b) and a.size == 4 * 3 * 3
    assert how.endswith("3 of 5 keys (dim 3)")


def test_a_static_cache_is_cut_to_what_the_request_has_seen() -> None:
    pair = pair_of(table([[6]], ["a"]), table([[2], [6], [0]], ["b", "a"]))
    cache = np.random.default_rng(0).normal(size=(3, 2, 32, 8))
    a, b, how = one(pair, cache[1:2, :, :7], cache)
    assert np.array_equal(a, b) and a.size == 2 * 7 * 8
    assert how == "row 1 of 3 (dim 0), 7 of 32 keys (dim 2)"


def test_keys_of_a_left_padded_row_begin_where_its_tokens_do() -> None:
    ref, target = table([[0, 1, 2]], ["a"]), table([[0, 0, 0, 1, 2]], ["a"])
    scores = np.random.default_rng(0).normal(size=(1, 4, 5, 5))
    a, b, _ = one(pair_of(ref, target, offsets={"a": (0, 2)}), scores[:, :, 2:, 2:], scores)
    assert np.array_equal(a, b)
    later = pair_of(table([[3]], ["a"]), table([[3]], ["a"]), offsets={"a": (0, 2)})
    cache = np.random.default_rng(1).normal(size=(1, 2, 16, 8))
    a, b, _ = one(later, cache[:, :, 2:6], cache)
    assert np.array_equal(a, b)


def test_what_no_reading_explains_is_not_guessed() -> None:
    rows = RowMap(PREFILL)
    assert rows.readings((1, 3, 16), (2, 5, 24)) == []  # a padded hidden size
    assert rows.readings((3, 7), (9, 7)) == []
    assert rows.readings((16, 7), (16, 7)) is None  # no rows in it: as it is


def test_a_batch_in_another_order_is_read_by_request() -> None:
    pair = pair_of(table([[4], [9]], ["a", "b"]), table([[9], [4]], ["b", "a"]))
    logits = np.random.default_rng(0).normal(size=(2, 1, 12))
    a, b, _ = one(pair, logits[::-1], logits)
    assert np.array_equal(a, b)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_padding_and_order_comes_out_as_the_unpadded_request(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    bucket = data.draw(st.integers(max(lengths), 9))
    spare = data.draw(st.integers(0, 2))
    wanted = data.draw(st.integers(0, len(lengths) - 1))
    ids = [f"r{i}" for i in range(len(lengths))]
    positions = [[min(p, n - 1) for p in range(bucket)] for n in lengths] + [[0] * bucket] * spare
    target = table(positions, ids)
    ref = table([list(range(lengths[wanted]))], [ids[wanted]])
    values = np.random.default_rng(bucket).normal(size=(len(positions), bucket, 11))
    clean = values[wanted : wanted + 1, : lengths[wanted]].copy()
    rows = RowMap(pair_of(ref, target))
    readings = rows.readings(clean.shape, values.shape)
    if readings is None:
        assert clean.shape == values.shape
        return
    selected = rows.select(readings, clean, values)
    assert selected and all(np.array_equal(s.ref, s.target) for s in selected[:1])
    values[wanted, lengths[wanted] - 1, 3] += 1.0
    wrong = rows.select(readings, clean, values)
    assert not np.array_equal(wrong[0].ref, wrong[0].target)


# Whole alignments ----------------------------------------------------------------------------------------


class Tagger(nn.Module):
    """Scores each token by itself, so that any batch and padding gives the same rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 12)
        self.body = nn.Linear(12, 12)
        self.head = nn.Linear(12, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.embed(tokens))))


def tagger() -> Tagger:
    torch.manual_seed(0)
    return Tagger().eval()


def record(path: Path, model: nn.Module, calls: Sequence[Call], **options: Any) -> Path:
    with torch.no_grad(), dt.record(path, model, **{"save": "tensors", **options}) as rec:
        for tokens, meta in calls:
            with rec.step(**meta):
                model(torch.tensor(tokens))
    return path


def align(
    folder: Path,
    ref: Sequence[Call],
    target: Sequence[Call],
    *,
    change: Callable[[Any], Any] | None = None,
    save: str = "tensors",
    **options: Any,
) -> dt.Alignment:
    model = tagger()
    first = record(folder / "ref", model, ref, save=save)
    if change is not None:
        with torch.no_grad():
            change(model)
    return dt.align(first, record(folder / "target", model, target, save=save), **options)


def plan_of(folder: Path, ref: Sequence[Call], target: Sequence[Call]) -> StepPlan | None:
    model = tagger()
    readers = [open_ranks(record(folder / n, model, c))[0] for n, c in (("ref", ref), ("target", target))]
    return pair_steps(readers[0], readers[1], {"": ""})


def call(tokens: list[list[int]], ids: list[str], positions: Any, **meta: Any) -> Call:
    return tokens, {"req_ids": ids, "positions": positions, **meta}


ALONE = [
    call([[1, 2, 3]], ["a"], [[0, 1, 2]], phase="prefill"),
    call([[7, 8]], ["b"], [[0, 1]], phase="prefill"),
    call([[4]], ["a"], [[3]], phase="decode"),
    call([[9]], ["b"], [[2]], phase="decode"),
]
PADDED = [
    call([[7, 8, 0, 0]], ["b"], [[0, 1, 1, 1]], phase="prefill"),
    call([[1, 2, 3, 0]], ["a"], [[0, 1, 2, 2]], phase="prefill"),
    call([[9], [4], [0]], ["b", "a"], [2, 3, 0], phase="decode"),
]


def paired_steps(found: dt.Alignment) -> set[tuple[int, int]]:
    return {(p.ref.step, p.target.step) for p in found.pairs if p.ref and p.target and p.ref.kind == "op"}


def test_a_padded_batched_run_matches_the_unpadded_one(tmp_path: Path) -> None:
    found = align(tmp_path, ALONE, PADDED)
    assert found.verdict == "match", found.reasons
    assert found.notices[0].startswith("steps were paired by request and position: 4 pairs, up to 2 steps")
    assert paired_steps(found) == {(0, 1), (1, 0), (2, 2), (3, 2)}
    assert found.coverage["records"]["ref-only"] == found.coverage["records"]["target-only"] == 0
    target = sum(1 for _ in dt.open(tmp_path / "target").records)
    ref = sum(1 for _ in dt.open(tmp_path / "ref").records)
    assert sum(found.coverage["records"].values()) == ref + target  # each record once


def test_padding_may_hold_anything_and_real_rows_may_not(tmp_path: Path) -> None:
    for row, verdict in ((2, "match"), (1, "diverged")):
        model = tagger()
        ref = record(tmp_path / f"ref{row}", model, ALONE)
        model.body.register_forward_hook(
            lambda m, i, out, row=row: out + (torch.arange(len(out)) == row)[:, None, None] * (len(out) == 3)
        )
        found = dt.align(ref, record(tmp_path / f"target{row}", model, PADDED))
        assert found.verdict == verdict, found.reasons
        if verdict == "diverged":
            assert found.first is not None and found.first.step == 2
            assert "row 1 of 3" in found.first.evidence["transform"]


def test_a_wrong_weight_is_named_below_padding(tmp_path: Path) -> None:
    found = align(tmp_path, ALONE, PADDED, change=lambda m: m.body.weight.mul_(1.01))
    assert found.verdict == "diverged" and found.first is not None
    assert (found.first.module, found.first.label) == ("body", "parameter")


def test_without_data_padded_steps_are_not_comparable(tmp_path: Path) -> None:
    found = align(tmp_path, ALONE, PADDED, save="stats")
    assert found.verdict == "inconclusive"
    assert any("takes the data of both" in reason for reason in found.reasons)


def test_without_data_steps_of_one_layout_are_compared_as_before(tmp_path: Path) -> None:
    assert align(tmp_path, ALONE, ALONE, save="stats").verdict == "match"


def test_steps_of_one_layout_in_another_order_pair_by_request(tmp_path: Path) -> None:
    found = align(tmp_path, ALONE, [ALONE[1], ALONE[0], *ALONE[2:]])
    assert found.verdict == "match", found.reasons
    assert {
        (p.ref.step, p.target.step) for p in found.pairs if p.ref and p.target and p.ref.kind == "op"
    } == {
        (0, 1),
        (1, 0),
        (2, 2),
        (3, 3),
    }


def test_without_metadata_steps_pair_by_number(tmp_path: Path) -> None:
    calls: list[Call] = [([[1, 2]], {}), ([[3]], {})]
    assert plan_of(tmp_path, calls, calls) is None


def test_phases_alone_pair_by_phase_and_order(tmp_path: Path) -> None:
    ref: list[Call] = [
        ([[1, 2]], {"phase": "prefill"}),
        ([[3]], {"phase": "decode"}),
        ([[4, 5]], {"phase": "prefill"}),
    ]
    plan = plan_of(tmp_path, ref, [ref[0], ref[2], ref[1]])
    assert plan is not None
    assert {(u.ref[1], u.target[1]) for u in plan.rounds[0]} == {(0, 0), (2, 1), (1, 2)}
    assert plan.notices == ["steps were paired by phase and order: 3 pairs"]


def test_a_step_that_only_one_run_has_keeps_a_match_away(tmp_path: Path) -> None:
    extra = call([[5], [6], [0]], ["b", "a"], [3, 4, 0], phase="decode")
    found = align(tmp_path, ALONE, [*PADDED, extra])
    assert found.verdict == "inconclusive"
    assert "steps that only the target has: 3" in found.reasons
    assert found.coverage["records"]["target-only"] > 0


def test_steps_of_a_model_that_only_one_run_has_are_counted(tmp_path: Path) -> None:
    models = {"target": tagger(), "draft": tagger()}
    with torch.no_grad():
        with dt.record(tmp_path / "ref", {"target": models["target"], "": tagger()}, save="tensors") as rec:
            for tokens, meta in ALONE:
                with rec.step(**meta):
                    models["target"](torch.tensor(tokens))
        with dt.record(tmp_path / "target", models, save="tensors") as rec:
            for tokens, meta in PADDED:
                with rec.step(**meta):
                    models["target"](torch.tensor(tokens))
                    models["draft"](torch.tensor(tokens))
    found = dt.align(tmp_path / "ref", tmp_path / "target")
    alone = {p.target.model for p in found.pairs if p.target and p.outcome == "target-only"}
    assert alone == {"draft"} and found.coverage["records"]["target-only"] > 0
    everything = sum(trace.num_records for trace in map(dt.open, (tmp_path / "ref", tmp_path / "target")))
    assert sum(found.coverage["records"].values()) == everything


def test_runs_that_share_no_request_are_not_comparable(tmp_path: Path) -> None:
    found = align(tmp_path, ALONE, [call([[1, 2, 0]], ["z"], [[0, 1, 1]])])
    assert found.verdict == "inconclusive"
    assert "no final output was compared" in found.reasons
    matched = [p.target for p in found.pairs if p.outcome == "matched" and p.target is not None]
    assert matched and all(record.kind == "param" for record in matched)


def test_chosen_steps_are_those_of_the_target(tmp_path: Path) -> None:
    found = align(tmp_path, ALONE, PADDED, steps=[2])
    assert found.verdict == "match", found.reasons
    assert {p.target.step for p in found.pairs if p.target and p.target.kind == "op"} == {2}
    assert found.coverage["records"]["deselected"] > 0


def test_a_request_is_compared_as_far_as_both_runs_got_the_same_tokens(tmp_path: Path) -> None:
    ref = [*ALONE[:3], call([[5]], ["a"], [[4]], phase="decode")]
    target = [
        *ALONE[:2],
        call([[6]], ["a"], [[3]], phase="decode"),
        call([[11]], ["a"], [[4]], phase="decode"),
    ]
    found = align(tmp_path, ref, target)  # tokens are seen in what the root is called with
    assert found.verdict == "match", found.reasons
    assert any("request 'a' is compared up to position 2" in n for n in found.notices)
    assert found.coverage["records"]["deselected"] > 0
    told = [(c[0], {**c[1], "tokens": c[0]}) for c in target]
    (tmp_path / "told").mkdir()
    assert any("tokens 4 and 6" in n for n in align(tmp_path / "told", ref, told).notices)


def test_another_prompt_is_another_input_and_no_tie(tmp_path: Path) -> None:
    other = [call([[1, 2, 6, 0]], ["a"], [[0, 1, 2, 2]])]
    found = align(tmp_path, [call([[1, 2, 3]], ["a"], [[0, 1, 2]])], other)
    assert found.verdict == "diverged" and found.first is not None
    assert found.first.label == "argument" and found.first.module == ""


def test_rejected_proposals_are_replaced_by_what_came_after(tmp_path: Path) -> None:
    target = [
        *ALONE[:2],
        call([[4, 30, 31]], ["a"], [[3, 4, 5]], phase="decode"),  # 30 and 31 are rejected
        call([[5, 29, 28]], ["a"], [[4, 5, 6]], phase="decode"),
    ]
    ref = [*ALONE[:3], call([[5]], ["a"], [[4]], phase="decode")]
    plan = plan_of(tmp_path, ref, target)
    assert plan is not None
    pairs = {(u.ref[1], u.target[1]): [(a.position, b.place) for a, b in u.cells] for u in plan.rounds[0]}
    assert pairs == {
        (0, 0): [(0, 0), (1, 1), (2, 2)],
        (1, 1): [(0, 0), (1, 1)],
        (2, 2): [(3, 0)],
        (3, 3): [(4, 0)],
    }


def test_a_run_without_a_cache_pairs_by_its_newest_tokens(tmp_path: Path) -> None:
    again = [
        call([[1, 2, 3]], ["a"], [[0, 1, 2]]),
        call([[1, 2, 3, 4]], ["a"], [[0, 1, 2, 3]]),
    ]
    cached = [again[0], call([[4]], ["a"], [[3]])]
    found = align(tmp_path, again, cached)
    assert found.verdict == "match", found.reasons
    assert {
        (p.ref.step, p.target.step) for p in found.pairs if p.ref and p.target and p.ref.kind == "op"
    } == {
        (0, 0),
        (1, 1),
    }


def test_a_prompt_in_chunks_pairs_with_the_whole_one(tmp_path: Path) -> None:
    chunks = [call([[1, 2]], ["a"], [[0, 1]]), call([[3, 3]], ["a"], [[2, 2]])]
    found = align(tmp_path, [call([[1, 2, 3]], ["a"], [[0, 1, 2]])], chunks)
    assert found.verdict == "match", found.reasons
    wrong = align_again(tmp_path, chunks, lambda m: m.head.bias.add_(1.0))
    assert wrong.verdict == "diverged" and wrong.first is not None and wrong.first.module == "head"


def align_again(folder: Path, target: Sequence[Call], change: Callable[[Any], Any]) -> dt.Alignment:
    model = tagger()
    with torch.no_grad():
        change(model)
    return dt.align(folder / "ref", record(folder / "changed", model, target))


def test_request_ids_without_anything_in_common_pair_by_prompt_or_in_order(tmp_path: Path) -> None:
    names = {"a": "cmpl-1", "b": "cmpl-2"}
    renamed = [(t, {**m, "req_ids": [names[i] for i in m["req_ids"]]}) for t, m in PADDED]
    found = align(tmp_path, ALONE, renamed)
    assert found.verdict == "match", found.reasons
    assert any(n.endswith("requests pair by prompt") for n in found.notices)
    same = [call([[1, 2]], [i], [[0, 1]]) for i in "ab"]
    padded = [call([[1, 2, 0]], [i], [[0, 1, 1]]) for i in "xy"]
    (tmp_path / "same").mkdir()
    in_order = align(tmp_path / "same", same, padded)
    assert in_order.verdict == "match", in_order.reasons
    assert any(n.endswith("requests pair in order of appearance") for n in in_order.notices)


def test_a_golden_run_is_lined_up_by_request_as_well(tmp_path: Path) -> None:
    golden = record(tmp_path / "golden", tagger().double(), ALONE)
    found = align(tmp_path, ALONE, PADDED, golden=golden)
    assert found.verdict == "match", found.reasons


def test_cells_of_padding_rows_do_not_exist() -> None:
    rows = table([[3], [5], [0], [0]], ["a", "b"])
    assert rows.is_padded and rows.cells == (Cell(0, 0, "a", 3), Cell(1, 0, "b", 5))
