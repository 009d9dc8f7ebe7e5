"""Live comparison of ports: other names need rules, other ops that come to the same never stop a program."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import dispatch_trace as dt
from dispatch_trace.errors import ConfigError, RenameError

WIDTH, HEADS = 32, 4


class Layer(nn.Module):
    """Attention and a gated feed-forward, written as one would by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.act: nn.Module = nn.SiLU()

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5
        return scores.softmax(-1) @ v

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (part(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.attend(q, k, v).transpose(1, 2).flatten(2)
        return x + self.down(self.act(self.gate(x)) * self.up(x))


class Port(nn.Module):
    def __init__(self, name: str = "layers", kind: type[Layer] = Layer) -> None:
        super().__init__()
        self.name = name
        setattr(self, name, nn.ModuleList(kind() for _ in range(3)))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in getattr(self, self.name):
            x = layer(x)
        return self.head(x)


class Fused(Layer):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v)


class ScaledFirst(Layer):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = (q * (WIDTH // HEADS) ** -0.5) @ k.transpose(-1, -2)
        return scores.softmax(-1) @ v


class DividedLast(Layer):
    """A softmax whose division waits until the values are added up."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        return (weights @ v) / weights.sum(-1, keepdim=True)


class WrittenOut(Layer):
    """Norm and activation in parts, sums in another order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        y = centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + self.norm.eps)
        y = y * self.norm.weight + self.norm.bias
        q, k, v = (part(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = self.attend(q, k, v).transpose(1, 2).flatten(2) + x
        gate = self.gate(x)
        return self.down(self.up(x) * (torch.sigmoid(gate) * gate)) + x


def port(name: str = "layers", kind: type[Layer] = Layer) -> Port:
    torch.manual_seed(0)
    return Port(name, kind).eval()


def batch() -> torch.Tensor:
    return torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(1))


def run(path: Path, model: nn.Module, **options: object) -> dt.record:
    with torch.no_grad(), dt.record(path, model, **options) as recording:  # type: ignore[arg-type]
        model(batch().to(next(model.parameters()).dtype))
    return recording


@pytest.fixture(params=["op", "module"])
def ref(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    run(tmp_path / "ref.trace", port(), level=request.param)
    return tmp_path / "ref.trace"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Layer, Fused, ScaledFirst, DividedLast, WrittenOut])
def test_other_ops_that_come_to_the_same_never_stop_a_program(
    tmp_path: Path, ref: Path, kind: type[Layer], dtype: torch.dtype
) -> None:
    recording = run(tmp_path / "target", port(kind=kind).to(dtype), against=ref, on_divergence="raise")
    assert recording.divergences == []


@pytest.mark.parametrize("level", ["op", "module"])
def test_another_activation_stops_the_program_as_its_module_returns(
    tmp_path: Path, ref: Path, level: str
) -> None:
    model = port()
    model.layers[1].act = nn.GELU()
    (found,) = run(tmp_path / "target", model, level=level, against=ref).divergences
    assert found.finding.module == "layers.1.act"
    assert found.finding.op == ("aten.gelu" if level == "op" else None)
    assert found.late in ("", "layers.1.act")


def test_another_activation_without_a_module_stops_the_program_where_it_is_read(tmp_path: Path) -> None:
    class Inline(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + self.norm(x)
            return y + self.down(nn.functional.silu(self.gate(y)) * self.up(y))

    class Other(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + self.norm(x)
            return y + self.down(nn.functional.gelu(self.gate(y)) * self.up(y))

    run(tmp_path / "ref", port(kind=Inline))
    found = run(tmp_path / "target", port(kind=Other), against=tmp_path / "ref").divergences[0]
    assert (found.finding.module, found.finding.op) == ("layers.0", "aten.gelu")
    assert found.finding.evidence["in_place_of"] == ["aten.silu"]
    assert found.late == "layers.0 aten.mul"  # its first reader, whose values are at hand
    assert found.operands["self"].shape == found.operands["other"].shape == (2, 6, WIDTH)


def test_a_mistake_between_modules_is_certain_once_the_next_module_is_handed_it(tmp_path: Path) -> None:
    class NoResidual(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) - x if self is model.layers[0] else super().forward(x)

    run(tmp_path / "ref", port())
    model = port(kind=NoResidual)
    found = run(tmp_path / "target", model, against=tmp_path / "ref").divergences[0]
    assert (found.finding.module, found.finding.call) == ("layers.0", 0)
    assert found.late.startswith("layers.1.norm was handed it")


def test_weights_on_a_grid_are_rounding(tmp_path: Path, ref: Path) -> None:
    model = port()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            step = parameter.data.abs().amax(1, keepdim=True) / 127
            parameter.data = torch.round(parameter.data / step) * step
    assert run(tmp_path / "target", model, against=ref).divergences == []


def test_names_that_differ_take_rules(tmp_path: Path, ref: Path) -> None:
    model = port("blocks")
    rules = {"layers": "blocks"}
    assert run(tmp_path / "same", model, against=ref, rename=rules).divergences == []
    counts = dt.open(tmp_path / "same").header["against"]["counts"]
    assert counts["equal"] > 20

    model.blocks[2].act = nn.GELU()
    (found,) = run(tmp_path / "other", model, against=ref, rename="layers=blocks").divergences
    assert found.finding.module == "blocks.2.act"


def test_names_that_differ_without_rules_are_refused(tmp_path: Path, ref: Path) -> None:
    model = port("blocks").blocks[0]
    said = r"none of the program's 8 modules is called as one of the \d+ .*rename=\{reference path"
    with pytest.raises(RenameError, match=said):
        run(tmp_path / "a", model, against=ref)
    assert not (tmp_path / "a").exists()
    with pytest.raises(RenameError, match=said), dt.record(tmp_path / "b", against=ref):
        model(batch())  # the root is known here


def test_rules_that_match_nothing_are_refused(tmp_path: Path, ref: Path) -> None:
    with pytest.raises(RenameError, match=r"'layer' matches 0 of .* module paths of the reference"):
        run(tmp_path / "a", port("blocks"), against=ref, rename={"layer": "blocks"})
    with pytest.raises(ConfigError, match="rename: rules are for against="):
        dt.record(tmp_path / "b", port(), rename={"layers": "blocks"})


def test_a_copy_is_equal_throughout(tmp_path: Path, ref: Path) -> None:
    run(tmp_path / "target", copy.deepcopy(port()), against=ref, on_divergence="raise")
    counts = dt.open(tmp_path / "target").header["against"]["counts"]
    assert set(counts) <= {"equal", "not compared"}
