"""How far two values are apart: by hash, by data, by sketch; unknown rather than guessed."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from aligning import record
from torch import nn

from dispatch_trace.align.content import Comparer, Difference, Rows, arrays_difference
from dispatch_trace.align.summaries import EXTREME
from dispatch_trace.errors import ConfigError
from dispatch_trace.store.reader import RankReader, open_ranks


class Give(nn.Module):
    def __init__(self, *values: torch.Tensor) -> None:
        super().__init__()
        self.values = values

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(value.clone() for value in self.values)


def recorded(folder: Path, save: str, *models: nn.Module) -> tuple[list[RankReader], list[int]]:
    """Traces of the models, and the content that each returns."""
    ranks = [
        open_ranks(record(folder / f"{number}-{save}", model, torch.ones(1), save=save, overwrite=True))[0]
        for number, model in enumerate(models)
    ]
    outputs = [[s for r in rank.records(kind="module") for s in r.slots if s.role == "out"] for rank in ranks]
    return ranks, [slots[0].content for slots in outputs]


def comparer(
    folder: Path, ref: torch.Tensor, target: torch.Tensor, save: str, rows: Rows | None = None
) -> Difference:
    """The difference of two recorded outputs."""
    ranks, ids = recorded(folder, save, Give(ref), Give(target))
    return Comparer(ranks[0], ranks[1], rows).compare(*ids)


@pytest.mark.parametrize("save", ["tensors", "stats"])
def test_equal_values_are_equal_by_hash(tmp_path: Path, save: str) -> None:
    x = torch.randn(40, 30)
    found = comparer(tmp_path, x, x.clone(), save)
    assert (found.equal, found.method, found.rho) == (True, "hash", 0.0)


@pytest.mark.parametrize(("save", "exact"), [("tensors", 1e-6), ("stats", 0.15)])
def test_a_relative_error_is_measured(tmp_path: Path, save: str, exact: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(200, 50)
    noise = torch.randn(200, 50) * 1e-2
    found = comparer(tmp_path, x, x + noise, save)
    assert found.known and found.rho == pytest.approx(float(noise.norm() / x.norm()), rel=exact)
    assert found.method == {"tensors": "data", "stats": "sketch"}[save]


@pytest.mark.parametrize("save", ["tensors", "stats"])
def test_the_sign_of_zero_is_no_difference(tmp_path: Path, save: str) -> None:
    found = comparer(tmp_path, torch.zeros(5, 8), -torch.zeros(5, 8), save)
    assert found.equal and found.rho == 0.0


def test_nan_and_inf_at_the_same_places_are_equal() -> None:
    x = np.array([1.0, np.nan, np.inf, -np.inf, 2.0])
    assert arrays_difference(x, x.copy()).equal


@pytest.mark.parametrize("other", [0.0, np.inf, -np.inf])
def test_a_nan_reference_passes_nothing_else(other: float) -> None:
    found = arrays_difference(np.array([1.0, np.nan]), np.array([1.0, other]))
    assert found.nonfinite == 1 and math.isinf(found.rho)


def test_a_count_of_nonfinite_values_shows_without_data(tmp_path: Path) -> None:
    x = torch.randn(20, 20)
    y = x.clone()
    y[3, 4] = math.nan
    found = comparer(tmp_path, x, y, "stats")
    assert found.nonfinite == 1 and math.isinf(found.rho)


@pytest.mark.parametrize("low", [-math.inf, float(torch.finfo(torch.bfloat16).min)])
def test_a_mask_is_a_place_and_not_a_quantity(low: float) -> None:
    ref = np.array([0.5, float(torch.finfo(torch.float32).min), 1.0])
    target = np.array([0.5, low, 2.0])
    found = arrays_difference(ref, target)
    assert found.nonfinite == 0
    assert found.rho == pytest.approx(1.0 / math.sqrt(0.25 + 1.0)), "the mask's size does not drown the rest"


def test_a_mask_makes_a_sketch_unknown(tmp_path: Path) -> None:
    x = torch.randn(30, 30)
    x[0, 0] = -2 * EXTREME
    y = x.clone()
    y[5] += 1.0
    found = comparer(tmp_path, x, y, "stats")
    assert not found.known and "mask" in found.why


def test_shapes_that_differ_are_unknown_and_say_so(tmp_path: Path) -> None:
    found = comparer(tmp_path, torch.ones(3, 4), torch.ones(5, 4), "tensors")
    assert not found.known and found.why == "shapes differ: [3, 4] against [5, 4]"


def test_padding_is_cut_off_where_rows_are_given(tmp_path: Path) -> None:
    x = torch.randn(5, 4)
    padded = torch.cat((x, torch.zeros(1, 4)))
    found = comparer(tmp_path, x, padded, "tensors", Rows(0, 5))
    assert found.equal and found.transform == "first 5 rows of dim 0"
    padded[2] += 1
    assert comparer(tmp_path, x, padded, "tensors", Rows(0, 5)).rho > 0.1
    assert not comparer(tmp_path, x, padded, "stats", Rows(0, 5)).known, "a sketch cannot be cut"


def test_rows_that_cannot_be_read_are_an_error() -> None:
    assert Rows.of({"dim": 1, "keep": 3}) == Rows(1, 3)
    for bad in ({"dim": 1}, [1, 2], {"dim": 0, "keep": -1}):
        with pytest.raises(ConfigError, match="rows="):
            Rows.of(bad)


def test_a_reshaped_value_is_compared_in_order(tmp_path: Path) -> None:
    x = torch.randn(6, 4)
    found = comparer(tmp_path, x, (x * 1.5).view(2, 3, 4), "tensors")
    assert found.rho == pytest.approx(0.5, rel=1e-5) and found.transform == "reshaped"


def test_one_wrong_row_is_found_in_a_large_tensor(tmp_path: Path) -> None:
    x = torch.randn(4096, 16)
    y = x.clone()
    y[1234] = -y[1234]
    found = comparer(tmp_path, x, y, "tensors")
    assert found.rho < 0.05
    assert found.worst is not None and found.worst[0] == (1234,) and found.worst[1] > 0.5


def test_a_permuted_tensor_is_recognised(tmp_path: Path) -> None:
    x = torch.randn(8, 8)
    ranks, ids = recorded(tmp_path, "tensors", Give(x), Give(x.t().contiguous()))
    found = Comparer(*ranks).permuted(*ids, limit=1e-6)
    assert found is not None and found.transform == "permuted (1, 0)"


def test_an_expanded_view_is_never_written_out(tmp_path: Path) -> None:
    class Expand(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.value = value

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.value).expand(2_000_000, 2_000_000)

    ranks = [open_ranks(record(tmp_path / str(v), Expand(v), torch.ones(1)))[0] for v in (1.0, 2.0)]
    ids = [
        next(s.content for r in rank.records(kind="module") for s in r.slots if s.role == "out")
        for rank in ranks
    ]
    assert not Comparer(*ranks).compare(*ids).equal
