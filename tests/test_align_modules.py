"""Module calls pair by path, rename rules and call number."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from aligning import record
from torch import nn

import dispatch_trace as dt
from dispatch_trace.align.modules import Renames
from dispatch_trace.errors import ConfigError, RenameError


@pytest.mark.parametrize(
    ("rules", "path", "expected"),
    [
        ({"model.layers": "transformer.h"}, "model.layers.3.mlp", "transformer.h.3.mlp"),
        ({"model.layers": "transformer.h"}, "model.layersx", "model.layersx"),
        ({"model": "", "model.norm": "ln_f"}, "model.norm", "ln_f"),
        ({"model": ""}, "model.norm", "norm"),
        ({"": "wrapped"}, "fc", "wrapped.fc"),
        ({"": "wrapped"}, "", "wrapped"),
        ({r"layers\.(\d+)\.attn": r"h.\1.attention"}, "layers.12.attn", "h.12.attention"),
        (["a=b"], "a.c", "b.c"),
        (None, "a", "a"),
    ],
)
def test_a_rule_holds_for_its_path_and_all_beneath(rules: object, path: str, expected: str) -> None:
    assert Renames(rules).apply(path) == expected


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"layer": "h"}, "'layer' matches 0 of 2 module paths of the reference.\nClosest: 'layers'"),
        ({"layers": "hh"}, "'hh' matches 0 of 2 module paths of the target"),
        ({r"laye.\d": "h"}, "matches 0 of 2 module paths of the reference"),
        ({"layers": "h", "head": "h"}, "maps both 'head' and 'layers' to 'h'"),
    ],
)
def test_a_rule_that_matches_nothing_is_an_error(rules: dict[str, str], message: str) -> None:
    with pytest.raises(RenameError) as caught:
        Renames(rules).check(["layers", "head"], ["h", "out"])
    assert message in str(caught.value)


def test_rules_that_contradict_each_other_are_an_error() -> None:
    with pytest.raises(RenameError, match="'a' two names: 'b' and 'c'"):
        Renames(["a=b", "a=c"])
    with pytest.raises(RenameError, match="no regular expression"):
        Renames({"a(": "b"})
    with pytest.raises(ConfigError, match=r"expected .reference path: target path."):
        Renames(["no equals sign"])


class Old(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class New(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.h:
            x = layer(x).tanh()
        return x


def renamed(tmp_path: Path, factor: float) -> dt.Alignment:
    torch.manual_seed(0)
    old, new = Old(), New(1.0)
    new.h.load_state_dict(old.layers.state_dict())
    with torch.no_grad():
        new.h[1].weight.mul_(factor)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    ref, target = record(tmp_path / "ref", old, x), record(tmp_path / "target", new, x)
    return dt.align(ref, target, rename={"layers": "h"})


def test_renamed_modules_match_and_their_weights_are_compared(tmp_path: Path) -> None:
    alignment = renamed(tmp_path, 1.0)
    assert alignment.verdict == "match"
    params = [p for p in alignment.pairs if p.target is not None and p.target.kind == "param"]
    assert len(params) == 4 and all(p.ref is not None and p.error == 0 for p in params)


def test_a_finding_speaks_of_the_targets_path(tmp_path: Path) -> None:
    first = renamed(tmp_path, 1.5).first
    assert first is not None
    assert (first.label, first.module, first.evidence["path"]) == ("parameter", "h.1", "h.1.weight")


def test_calls_pair_by_number(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self, second: float) -> None:
            super().__init__()
            self.act, self.second = nn.Tanh(), second

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(self.act(x) * self.second)

    ref = record(tmp_path / "ref", Twice(1.0), torch.ones(3))
    target = record(tmp_path / "target", Twice(2.0), torch.ones(3))
    alignment = dt.align(ref, target)
    calls = [
        (p.ref.call, p.target.call, p.error)
        for p in alignment.pairs
        if p.ref and p.target and p.target.module == "act" and p.target.kind == "module"
    ]
    assert [(a, b) for a, b, _ in calls] == [(0, 0), (1, 1)]
    assert calls[0][2] == 0 and calls[1][2] > 0.1
    assert alignment.first is not None and alignment.first.module == "", "the caller scaled, not the module"
