"""Parameters of one name in two dtypes: one value rounded, or another value."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import dispatch_trace as dt


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).eval()


@pytest.fixture
def run(tmp_path: Any) -> Any:
    def align_with(
        change: Any, dtype: torch.dtype = torch.bfloat16, twins: bool | None = None
    ) -> dt.Alignment:
        reference = model()
        target = copy.deepcopy(reference)
        with torch.no_grad():
            change(target)
            target = target.to(dtype)
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
            with dt.record(tmp_path / "ref", reference, save="tensors"):
                reference(x)
            with dt.record(tmp_path / "target", target, save="tensors"):
                target(x.to(dtype))
        return dt.align(tmp_path / "ref", tmp_path / "target", twins=twins)

    return align_with


def suspects(alignment: dt.Alignment) -> list[str]:
    return [f.evidence["path"] for f in alignment.findings if f.evidence.get("kind") == "parameter"]


def test_a_cast_is_no_other_parameter(run: Any) -> None:
    alignment = run(lambda m: None)
    assert alignment.verdict == "match" and suspects(alignment) == [] and alignment.notices == []


def test_rounding_twice_is_no_other_parameter(run: Any) -> None:
    alignment = run(lambda m: m[0].weight.copy_(m[0].weight.half().float()))
    assert alignment.verdict == "match" and suspects(alignment) == []


def test_a_single_zero_is_listed_once(run: Any) -> None:
    alignment = run(lambda m: m[0].weight[3, 5:6].zero_())
    assert [f.evidence.get("path") for f in alignment.findings] == ["0.weight"]


def test_one_percent_of_a_row_is_a_suspect_of_the_estimates_in_bfloat16(run: Any) -> None:
    alignment = run(lambda m: m[0].weight[3].mul_(1.01), twins=False)
    assert suspects(alignment) == ["0.weight"]
    (suspect,) = (f for f in alignment.findings if f.evidence.get("path") == "0.weight")
    changed, total = suspect.evidence["elements"]
    assert not suspect.fatal and total == 64 * 64 and 16 < changed <= 64
    assert any("0.weight differs by more than a change of dtype explains" in n for n in alignment.notices)


def test_one_percent_of_a_weight_is_found_by_twins_in_bfloat16(run: Any) -> None:
    alignment = run(lambda m: m[0].weight.mul_(1.01))
    assert alignment.verdict == "diverged" and alignment.first is not None
    assert (alignment.first.label, alignment.first.evidence["path"]) == ("parameter", "0.weight")
    assert alignment.first.judge == "twins"


class Twice(nn.Module):
    """One layer that is called again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(self.layer(x).relu())
        return y


def test_a_shared_weight_is_named_at_its_first_call(tmp_path: Any) -> None:
    torch.manual_seed(0)
    reference = Twice()
    target = copy.deepcopy(reference)
    with torch.no_grad():
        target.layer.weight.copy_(reference.layer.weight.t())
        for name, each in (("ref", reference), ("target", target)):
            with dt.record(tmp_path / name, each, save="tensors"):
                each(torch.ones(4, 16))
    first = dt.align(tmp_path / "ref", tmp_path / "target").first
    assert first is not None and first.label == "parameter"
    assert (first.module, first.call) == ("layer", 0)


class Alike(nn.Module):
    """Three layers of one form; a test may give one of them the weights of another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.ModuleList(nn.Linear(16, 16) for _ in range(3)), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def _as_another_layer(target: Any) -> None:
    target.layers[1] = target.layers[0]


def _with_the_weights_of_another(target: Any) -> None:
    target.layers[1].weight, target.layers[1].bias = target.layers[0].weight, target.layers[0].bias


@pytest.mark.parametrize("save", ["tensors", "stats"])
@pytest.mark.parametrize(
    ("tie", "module", "call"),
    [(_as_another_layer, "layers.0", 1), (_with_the_weights_of_another, "layers.1", 0)],
)
def test_a_weight_tied_to_another_one_is_a_parameter(
    tie: Any, module: str, call: int, save: str, tmp_path: Any
) -> None:
    reference, target = Alike(), Alike()
    tie(target)
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
    for name, each in (("ref", reference), ("target", target)):
        with torch.no_grad(), dt.record(tmp_path / name, each, save=save):
            each(x)
    first = dt.align(tmp_path / "ref", tmp_path / "target").first
    assert first is not None
    assert (first.label, first.module, first.call) == ("parameter", module, call)
    assert first.evidence["path"].startswith("layers.1.")
    assert all(name.startswith("layers.0.") for name in first.evidence["tied_to"])
