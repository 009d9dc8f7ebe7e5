"""Noise is noise: what rounding does stays within the band, what a defect does goes beyond it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from aligning import align_models, batch, changed, net, pair_models
from torch import nn

from dispatch_trace.judge.estimates import C, gains_of, own_noise
from dispatch_trace.judge.noise import NoisePass


class Op(nn.Module):
    """One op on inputs of a dtype; the same op computed in float64 is the truth."""

    def __init__(self, op: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.op, self.dtype = op, dtype

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.op(*(x.to(self.dtype) for x in inputs))


OPS = {
    "mm": (lambda a, b: a @ b, (16, 512), (512, 16)),
    "softmax": (lambda a: (a * 4).softmax(-1), (16, 200)),
    "layer_norm": (lambda a: torch.nn.functional.layer_norm(a + 3, (200,)), (16, 200)),
    "gelu": (torch.nn.functional.gelu, (16, 200)),
    "sum": (lambda a: a.abs().sum(-1), (16, 4000)),
    "cumsum": (lambda a: a.abs().cumsum(-1), (4, 500)),
    "sub": (lambda a, b: (a + 10) - (b + 10), (16, 200), (16, 200)),
    "exp": (lambda a: (a * 3).exp(), (16, 200)),
    "rsqrt": (lambda a: (a * a + 0.1).rsqrt(), (16, 200)),
    "bmm": (lambda a, b: torch.bmm(a, b), (4, 8, 64), (4, 64, 8)),
    "cos": (lambda a: (a * 20).cos(), (16, 200)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_the_rounding_of_an_op_stays_within_its_band(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    op, *shapes = OPS[name]
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(*shape, generator=generator).to(dtype).double() for shape in shapes]
    pairing = pair_models(tmp_path, Op(op, torch.float64), Op(op, dtype), *inputs)
    noise = NoisePass(pairing)
    noise.run()
    judged = [s for s in noise.states.values() if s.rho is not None]
    assert judged and all(s.explained for s in judged), [(s.rho, s.limit) for s in judged if not s.explained]
    assert any(s.rho > 0 for s in judged), "the two precisions differ"


def test_an_error_grows_as_the_op_lets_it_grow(tmp_path: Path) -> None:
    class Cancel(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + 100.0) - 100.5

    pairing = pair_models(tmp_path, Cancel(), Cancel(), torch.rand(50, 8))
    program = pairing.target
    measure = NoisePass(pairing).sizes.of_slot
    sub = next(r for r in program.records.values() if r.op == "aten.sub")
    out = program.outputs(sub)[0]
    ((_, gain),) = gains_of(program, sub, out, measure)
    assert gain == pytest.approx(100.5 / 0.29, rel=0.1), "||in|| / ||out||"


def test_longer_sums_may_be_farther_off(tmp_path: Path) -> None:
    pairing = pair_models(tmp_path, nn.Linear(4096, 4), nn.Linear(4096, 4), torch.randn(3, 4096))
    program = pairing.target
    addmm = next(r for r in program.records.values() if r.op == "aten.addmm")
    tau = own_noise(program, addmm, program.outputs(addmm)[0], NoisePass(pairing).sizes.of_slot)
    assert tau == pytest.approx(2.0**-24 * (1 + math.sqrt(4096)), rel=0.5)


@pytest.mark.parametrize("save", ["tensors", "stats"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_another_precision_is_a_match(tmp_path: Path, save: str, dtype: torch.dtype) -> None:
    alignment = align_models(tmp_path, net(), changed(lambda m: m.to(dtype)), batch(), save=save)
    assert (alignment.verdict, alignment.findings) == ("match", [])


@pytest.mark.parametrize("save", ["tensors", "stats"])
def test_a_defect_above_the_noise_of_bfloat16_is_found_in_it(tmp_path: Path, save: str) -> None:
    def plant(model: nn.Module) -> nn.Module:
        model.blocks[1].scale = 1.5  # type: ignore[index, union-attr, assignment]
        return model.to(torch.bfloat16)

    alignment = align_models(tmp_path, net(), changed(plant), batch(), save=save)
    first = alignment.first
    assert alignment.verdict == "diverged" and first is not None
    assert (first.label, first.module, first.op) == ("argument", "blocks.1", "aten.mul")
    assert first.evidence["arguments"] == {"other": [1.0, 1.5]}


def test_noise_that_rises_smoothly_with_depth_is_a_match(tmp_path: Path) -> None:
    def deep() -> nn.Module:
        torch.manual_seed(0)
        layers = [m for _ in range(24) for m in (nn.Linear(32, 32), nn.Tanh(), nn.LayerNorm(32))]
        return nn.Sequential(*layers).eval()

    alignment = align_models(tmp_path, deep(), changed(lambda m: m.bfloat16(), deep()), batch())
    errors = [p.error for p in alignment.pairs if p.target is not None and p.target.op == "aten.tanh"]
    assert alignment.verdict == "match"
    assert errors[-1] > 3 * errors[0] and errors[-1] > 2 * 2**-8, "far beyond the noise of one op"


def test_c_leaves_room_for_what_was_measured() -> None:
    assert C == 2.5
