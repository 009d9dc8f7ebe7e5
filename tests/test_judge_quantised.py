"""Quantised weights: rounding to the grid is noise, a wrong grid is a defect with the weight's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from aligning import align_models, batch, changed
from torch import nn

from dispatch_trace.judge.quantised import HEALTHY, fit_codes, grid_of

SAVES = pytest.mark.parametrize("save", ["tensors", "stats"])


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).eval()


class Int8(nn.Module):
    """Codes and scales; `form` says how they meet the input, `wrong` lays the scales along the other axis."""

    def __init__(self, linear: nn.Linear, form: str, wrong: bool = False) -> None:
        super().__init__()
        weight = linear.weight.detach()
        scale = weight.abs().amax(1) / 127
        self.register_buffer("weight", (weight / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias, self.form, self.wrong = linear.bias, form, wrong

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.form == "weight":
            scale = self.scale[None, :] if self.wrong else self.scale[:, None]
            return F.linear(x, self.weight.to(x.dtype) * scale, self.bias)
        scale = self.scale.flip(0) if self.wrong else self.scale
        return torch.mm(x, self.weight.t().to(x.dtype)) * scale + self.bias


def quantise(form: str, wrong: int | None = None) -> Any:
    def change(model: Any) -> None:
        for place in (0, 2, 4):
            model[place] = Int8(model[place], form, wrong=place == wrong)

    return change


def round_in_place(model: Any) -> None:
    for place in (0, 2, 4):
        weight = model[place].weight
        scale = weight.abs().amax(1, keepdim=True) / 127
        weight.copy_((weight / scale).round() * scale)


def test_a_grid_is_one_where_its_points_were_rounded_once_more(tmp_path: Path) -> None:
    """In bfloat16 an int8 grid is as coarse as the numbers are; small ones still lie on it."""
    model = mlp()
    target = changed(round_in_place, model).bfloat16()
    found = align_models(tmp_path, model.bfloat16(), target, batch().bfloat16())
    assert found.verdict == "match", (found.reasons, found.first)


def test_noise_as_large_as_a_grid_s_is_none() -> None:
    original = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    step = original.float().abs().amax(1, keepdim=True) / 127
    noise = HEALTHY * step * torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    rounded = ((original.float() / step).round() * step).bfloat16()
    pairs = {
        name: x.float().numpy()
        for name, x in {"noise": (original + noise).bfloat16(), "grid": rounded}.items()
    }
    assert grid_of(original.float().numpy(), pairs["grid"], 2.0**-8) is not None
    assert grid_of(original.float().numpy(), pairs["noise"], 2.0**-8) is None


@SAVES
@pytest.mark.parametrize("form", ["weight", "output"])
def test_int8_weights_match_within_their_steps(tmp_path: Path, form: str, save: str) -> None:
    alignment = align_models(tmp_path, mlp(), changed(quantise(form), mlp()), batch(), save=save)
    assert alignment.verdict == "match", (alignment.first, alignment.reasons)
    assert alignment.coverage["compute_bytes"]["share"] == 1.0


@SAVES
def test_weights_rounded_in_place_match(tmp_path: Path, save: str) -> None:
    alignment = align_models(tmp_path, mlp(), changed(round_in_place, mlp()), batch(), save=save)
    assert alignment.verdict == "match", alignment.first


@SAVES
@pytest.mark.parametrize("form", ["weight", "output"])
def test_a_scale_along_the_wrong_axis_is_named(tmp_path: Path, form: str, save: str) -> None:
    alignment = align_models(tmp_path, mlp(), changed(quantise(form, wrong=2), mlp()), batch(), save=save)
    first = alignment.first
    assert alignment.verdict == "diverged" and first is not None
    assert (first.label, first.module, first.evidence["path"]) == ("parameter", "2", "2.weight"), first


@SAVES
def test_a_weight_that_is_scaled_is_not_on_a_grid(tmp_path: Path, save: str) -> None:
    def scale(model: Any) -> None:
        model[2].weight.mul_(1.006)

    first = align_models(tmp_path, mlp(), changed(scale, mlp()), batch(), save=save).first
    assert first is not None and (first.label, first.module) == ("parameter", "2")


def grid(rows: int, width: int, levels: int, group: int = 0) -> tuple[np.ndarray, np.ndarray]:
    weight = np.random.default_rng(0).normal(size=(rows, width))
    parts = weight.reshape(-1, group or width)
    step = np.abs(parts).max(1, keepdims=True) / levels
    return weight, (np.rint(parts / step) * step).reshape(weight.shape)


@pytest.mark.parametrize(("levels", "group"), [(127, 0), (7, 0), (127, 32), (7, 32)])
def test_a_grid_is_read_off_the_values(levels: int, group: int) -> None:
    weight, rounded = grid(16, 256, levels, group)
    found = grid_of(weight, rounded, 2.0**-24)
    assert found is not None and "RMSE/step 0.2" in found


def test_truncation_is_no_healthy_rounding() -> None:
    weight = np.random.default_rng(0).normal(size=(16, 256))
    step = np.abs(weight).max(1, keepdims=True) / 127
    assert grid_of(weight, np.trunc(weight / step) * step, 2.0**-24) is None


def test_noise_is_no_grid() -> None:
    weight = np.random.default_rng(0).normal(size=(16, 256))
    noise = np.random.default_rng(1).normal(size=weight.shape) * 0.005
    assert grid_of(weight, weight + noise, 2.0**-24) is None


def test_codes_are_fitted_with_their_own_scale_and_offset() -> None:
    weight = np.random.default_rng(0).uniform(0.1, 0.9, size=(8, 128))
    step = (weight.max(1, keepdims=True) - weight.min(1, keepdims=True)) / 255
    codes = np.rint((weight - weight.min(1, keepdims=True)) / step)
    error = fit_codes(weight, codes)
    expected = HEALTHY * float(np.sqrt(np.mean(step**2))) / float(np.sqrt(np.mean(weight**2)))
    assert error == pytest.approx(expected, rel=0.1)
    assert fit_codes(weight, np.random.default_rng(2).permutation(codes)) is None, "codes of other rows"
