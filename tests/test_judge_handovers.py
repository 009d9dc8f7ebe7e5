"""A right value in the wrong place: which call took it, passed it on or returned it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from aligning import align_models, batch, changed
from torch import nn

SAVES = pytest.mark.parametrize("save", ["tensors", "stats"])


class Gated(nn.Module):
    """The gate's activation is a module: it is handed one of two parts of a product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.both, self.act, self.down = nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(2 * width, width)
        self.gate_last = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(x).chunk(2, -1)
        if self.gate_last:
            gate, up = up, gate
        return self.down(self.act(gate) * up)


class Layer(nn.Module):
    """A residual block whose last op is the sum; the model's last module is a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), Gated(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Stack(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.keep, self.norm, self.head = nn.Identity(), nn.LayerNorm(width), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.keep(self.norm(x)))


def stack(head: bool = True) -> Any:
    torch.manual_seed(0)
    model = Stack()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.bias)
    if not head:
        model.head = nn.Identity()
    return model.eval()


def gates_exchanged(model: Any) -> None:
    model.layers[1].mlp.gate_last = True


def norm_left_out(model: Any) -> None:
    model.norm.forward = torch.clone


def branch_alone(model: Any) -> None:
    layer = model.layers[1]
    layer.forward = lambda x: layer.mlp(layer.norm(x)).clone()


def other_value_kept(model: Any) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            x = layer(x)
        model.norm(x)
        return model.head(model.keep(x))  # `keep` returns what it is handed

    model.forward = forward


@SAVES
@pytest.mark.parametrize(
    ("bug", "module", "op"),
    [
        (gates_exchanged, "layers.1.mlp", "aten.silu"),
        (norm_left_out, "norm", "aten.native_layer_norm"),
        (branch_alone, "layers.1", "aten.add"),
        (other_value_kept, "", None),
    ],
)
def test_the_call_that_hands_over_another_value_is_named(
    bug: Any, module: str, op: str | None, save: str, tmp_path: Path
) -> None:
    alignment = align_models(tmp_path, stack(), changed(bug, stack()), batch(), save=save)
    assert alignment.verdict == "diverged" and alignment.first is not None
    assert alignment.first.module == module
    assert alignment.first.label in ("wiring", "structure")
    if op is not None:
        assert alignment.first.op == op
    assert not any(f.label == "nondeterministic" for f in alignment.findings)


@SAVES
def test_a_last_module_that_returns_what_it_reads_lacks_its_op(save: str, tmp_path: Path) -> None:
    first = align_models(
        tmp_path, stack(head=False), changed(norm_left_out, stack(head=False)), batch(), save=save
    ).first
    assert first is not None
    assert (first.module, first.op, first.label) == ("norm", "aten.native_layer_norm", "structure")


def test_gates_exchanged_read_another_part_of_the_same_view(tmp_path: Path) -> None:
    first = align_models(tmp_path, stack(), changed(gates_exchanged, stack()), batch()).first
    assert first is not None and first.label == "wiring"
    assert first.evidence["part"] == "another result of the same view"


class Halves(nn.Module):
    """Takes one table apart; its caller hands it over whole."""

    def __init__(self) -> None:
        super().__init__()
        self.order = [0, 1]

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        parts = table.chunk(2, -1)
        sine, cosine = (parts[i] for i in self.order)
        return torch.cat([x * cosine, x * sine], -1)


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.halves, self.head = Halves(), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(x.shape[0])[:, None] * 0.3 ** torch.arange(16)
        return self.head(self.halves(x, torch.cat([angles.sin(), angles.cos()], -1) + 0.1))


class Angles(Halves):
    """Takes the table apart and returns the parts."""

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> Any:
        parts = table.chunk(2, -1)
        return tuple(parts[i] for i in self.order)


class Rotated(Tables):
    def __init__(self) -> None:
        super().__init__()
        self.angles = Angles()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sine, cosine = self.angles(x, self.head.weight[: x.shape[0]])
        return self.head(torch.cat([x * cosine, x * sine.exp()], -1))


@SAVES
def test_a_call_that_returns_parts_in_another_order_is_named(save: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Rotated()
    target = changed(lambda m: m.angles.order.reverse(), model)
    first = align_models(tmp_path, model, target, batch(6, 16), save=save).first
    assert first is not None
    assert (first.module, first.label) == ("angles", "wiring")


@SAVES
def test_a_part_taken_of_what_was_handed_over_whole_is_no_fault_of_the_caller(
    save: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Tables()
    target = changed(lambda m: m.halves.order.reverse(), model)
    first = align_models(tmp_path, model, target, batch(6, 16), save=save).first
    assert first is not None
    assert (first.module, first.label) == ("halves", "wiring")


class Recurrence(nn.Module):
    """Rows of a buffer in place, each from those before it, as a delta rule solves for its updates."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.beta, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = F.softplus(self.beta(x)).clone()
        for i in range(1, rows.shape[0]):
            before = rows[:i].clone()
            rows[i] = rows[i] + 0.3 * (rows[i, :, None] * before.t()).sum(-1) / i
        return x + self.out(rows)


@pytest.mark.parametrize("twins", [None, False])
def test_noise_predicted_behind_a_defect_excuses_nothing(twins: bool | None, tmp_path: Path) -> None:
    """Each row that is read of a wrong buffer once made the noise without the defect larger, without end."""
    torch.manual_seed(0)
    model = nn.Sequential(Recurrence(24), nn.LayerNorm(24))

    def transposed(target: Any) -> None:
        target[0].beta.weight.data = target[0].beta.weight.data.t().contiguous()

    alignment = align_models(tmp_path, model, changed(transposed, model), batch(24, 24), twins=twins)
    assert alignment.verdict == "diverged" and alignment.first is not None
    assert (alignment.first.module, alignment.first.label) == ("0.beta", "parameter")
