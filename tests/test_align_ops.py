"""Op alignment: a global sequence alignment in which one op more or less shifts nothing."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import torch
from aligning import pair_models
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dispatch_trace.align.ops import FORBIDDEN, GAP, align_sequences

LETTERS = st.text(alphabet="abcd", max_size=14)


def matrix(first: str, second: str) -> np.ndarray:
    scores = np.full((len(first), len(second)), FORBIDDEN, dtype=np.float32)
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            if a == b:
                scores[i, j] = 1.0
    return scores


def best_total(first: str, second: str) -> float:
    """The textbook recursion, one cell at a time."""
    table = np.zeros((len(first) + 1, len(second) + 1))
    table[:, 0] = -GAP * np.arange(len(first) + 1)
    table[0, :] = -GAP * np.arange(len(second) + 1)
    for i in range(1, len(first) + 1):
        for j in range(1, len(second) + 1):
            match = table[i - 1, j - 1] + 1.0 if first[i - 1] == second[j - 1] else -np.inf
            table[i, j] = max(match, table[i - 1, j] - GAP, table[i, j - 1] - GAP)
    return float(table[-1, -1])


@given(LETTERS, LETTERS)
def test_pairs_ascend_on_both_sides_and_belong_together(first: str, second: str) -> None:
    pairs = align_sequences(matrix(first, second))
    assert pairs == sorted(pairs) and len({j for _, j in pairs}) == len(pairs)
    assert all(i < k and j < m for (i, j), (k, m) in itertools.pairwise(pairs))
    assert all(first[i] == second[j] for i, j in pairs)


@given(LETTERS, LETTERS)
def test_no_other_pairing_scores_more(first: str, second: str) -> None:
    pairs = align_sequences(matrix(first, second))
    total = len(pairs) - GAP * (len(first) + len(second) - 2 * len(pairs))
    assert abs(total - best_total(first, second)) < 1e-6


@given(LETTERS, st.integers(0, 14), st.sampled_from("xy"))
def test_an_extra_op_shifts_nothing(ops: str, place: int, extra: str) -> None:
    place = min(place, len(ops))
    longer = ops[:place] + extra + ops[place:]
    expected = [(i, i if i < place else i + 1) for i in range(len(ops))]
    assert align_sequences(matrix(ops, longer)) == expected


def test_thousands_of_ops_with_many_insertions_stay_aligned() -> None:
    rng = np.random.default_rng(0)
    ops = rng.integers(0, 12, 1500)
    keep = rng.random(1500) > 0.1
    scores = np.where(ops[keep][:, None] == ops[None, :], 1.0, FORBIDDEN).astype(np.float32)
    pairs = align_sequences(scores)
    assert len(pairs) == keep.sum(), "every op that is left has a partner"


class Chain(nn.Module):
    """A chain of elementwise ops, one of them extra, or two exchanged."""

    def __init__(self, *, extra: bool = False, scale: float = 2.0) -> None:
        super().__init__()
        self.extra, self.scale = extra, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x)
        if self.extra:
            x = torch.tanh(x)
        for _ in range(5):
            x = torch.sin(x) * self.scale
        return x.sum(-1)


def names(pairing: object, seqs: list[tuple[int, int]]) -> list[tuple[str, str]]:
    return [(pairing.ref.records[a].op, pairing.target.records[b].op) for a, b in seqs]  # type: ignore[attr-defined]


def test_values_and_arguments_do_not_decide_who_belongs_together(tmp_path: Path) -> None:
    pairing = pair_models(tmp_path, Chain(), Chain(scale=-7.5), torch.ones(2, 3))
    assert len(pairing.ops) == sum(r.kind == "op" for r in pairing.target.records.values())
    assert all(pairing.ref.records[p.ref].n == pairing.target.records[t].n for t, p in pairing.ops.items())


def test_an_op_that_one_side_lacks_is_the_only_one_without_a_partner(tmp_path: Path) -> None:
    pairing = pair_models(tmp_path, Chain(), Chain(extra=True), torch.ones(2, 3))
    alone = [r.op for r in pairing.target.records.values() if r.kind == "op" and r.seq not in pairing.ops]
    assert alone == ["aten.tanh"]
    assert len(pairing.ops_by_ref) == sum(r.kind == "op" for r in pairing.ref.records.values())


def test_results_of_other_sizes_are_not_paired(tmp_path: Path) -> None:
    class Fused(nn.Module):
        def __init__(self, fused: bool) -> None:
            super().__init__()
            self.fused = fused

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.fused:
                a, b = torch.sin(torch.cat((x, x + 1), -1)).chunk(2, -1)
            else:
                a, b = torch.sin(x), torch.sin(x + 1)
            return a * b

    pairing = pair_models(tmp_path, Fused(False), Fused(True), torch.ones(2, 4))
    sines = [r.seq for r in pairing.target.records.values() if r.op == "aten.sin"]
    assert sines and not any(seq in pairing.ops for seq in sines)


def test_a_body_written_out_in_place_pairs_across_the_module_border(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self, inline: bool) -> None:
            super().__init__()
            self.act, self.inline = nn.Tanh(), inline

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (torch.tanh(x) if self.inline else self.act(x)) + 1

    pairing = pair_models(tmp_path, Net(False), Net(True), torch.ones(3))
    (tanh,) = (t for t in pairing.ops if pairing.target.records[t].op == "aten.tanh")
    assert pairing.ref.records[pairing.ops[tanh].ref].module == "act"
    assert pairing.target.records[tanh].module == ""
