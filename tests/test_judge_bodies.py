"""Calls whose own ops nobody recorded, judged by the reference's body on what they were given."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dispatch_trace as dt
from dispatch_trace.judge.findings import Finding


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def miscompiling(backend: Callable[[Any, Any], Any], factor: float) -> Callable[[Any, Any], Any]:
    """A backend that scales the last activation of each graph."""

    def compile(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        acts = [n for n in graph.graph.nodes if n.op == "call_function" and "silu" in str(n.target)]
        for node in acts[-1:]:
            with graph.graph.inserting_after(node):
                scaled = graph.graph.call_function(torch.mul, (node, factor))
            node.replace_all_uses_with(scaled, delete_user_cb=lambda user, own=scaled: user is not own)
        graph.recompile()
        return backend(graph, inputs)

    return compile


def eagerly(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    return graph.forward


def aligned(
    tmp_path: Path, ref: nn.Module, target: Any, x: torch.Tensor, *, save: str = "tensors", **options: Any
) -> dt.Alignment:
    with torch.no_grad():
        with dt.record(tmp_path / "ref", ref, save="tensors"):
            ref(x)
        with dt.record(tmp_path / "target", target, save=save, **options):
            target(x)
    return dt.align(tmp_path / "ref", tmp_path / "target")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up, self.act, self.down = nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 64)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.down(self.act(self.up(self.norm(x))))


def mlps() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Mlp(), Mlp())


def test_what_a_compiler_makes_worse_is_found_by_the_reference_s_body(tmp_path: Path) -> None:
    bad = torch.compile(mlps(), backend=miscompiling(eagerly, 1.02))
    found = aligned(tmp_path, mlps(), bad, batch())
    first = found.first
    assert found.verdict == "diverged" and first is not None
    assert (first.label, first.module) == ("introduced", "1.act")
    assert first.judge == first.evidence["judge"] == "body"
    body = first.evidence["body"]
    assert body["local_error"] == pytest.approx(0.02, rel=0.01)
    assert body["ref_error"] < 1e-6 and body["band"] < 1e-5


def test_sound_compiled_code_is_no_fault(tmp_path: Path) -> None:
    found = aligned(tmp_path, mlps(), torch.compile(mlps(), backend="aot_eager"), batch())
    assert found.verdict == "match", found.table()


class Steep(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cumprod(x, -1)


class Net(nn.Module):
    """What is one unit in the last place in the first module becomes two thousand in the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(64, 2048)
        with torch.no_grad():
            self.first.weight.mul_(1e-4)
            self.first.bias.fill_(1.0)
        self.steep = Steep()

    def forward(self, x: torch.Tensor) -> Any:
        return self.steep(self.first(x))


def batch() -> torch.Tensor:
    return torch.randn(6, 64, generator=torch.Generator().manual_seed(1))


def rounded_up(model: Net) -> Net:
    """The first module's results are all off by three units, which is within noise."""
    first = model.first
    first.forward = lambda x: nn.functional.linear(x, first.weight, first.bias) * (1 + 3.6e-7)  # type: ignore[assignment]
    return model


def of_steep(found: dt.Alignment) -> Finding:
    (finding,) = [f for f in found.findings if f.module == "steep"]
    return finding


def test_a_call_that_lets_noise_grow_is_not_blamed_for_it(tmp_path: Path) -> None:
    found = aligned(tmp_path, Net(), rounded_up(Net()), batch(), level="module")
    finding = of_steep(found)
    assert (finding.label, finding.fatal, finding.judge) == ("inherited", False, "body")
    body = finding.evidence["body"]
    assert body["local_error"] <= body["band"] < finding.evidence["error"] * 10
    assert found.verdict == "inconclusive" and any("steep" in reason for reason in found.reasons)
    alone = dt.align(tmp_path / "ref", tmp_path / "target", twins=False)
    assert alone.verdict == "diverged", "estimates would not blame it: no test of bodies"


def test_a_call_that_is_wrong_by_itself_is_blamed_though_its_input_is_noisy(tmp_path: Path) -> None:
    model = rounded_up(Net())
    model.steep.forward = lambda x: 1.01 * Steep()(x)  # type: ignore[assignment]
    found = aligned(tmp_path, Net(), model, batch(), level="module")
    assert found.first is not None and found.first is of_steep(found)
    assert (found.first.label, found.first.judge) == ("introduced", "body")


def test_without_the_data_of_its_inputs_a_call_is_left_to_the_estimates(tmp_path: Path) -> None:
    model = Net()
    model.steep.forward = lambda x: 1.1 * Steep()(x)  # type: ignore[assignment]
    found = aligned(tmp_path, Net(), model, batch(), level="module", save="stats")
    assert found.first is not None and (found.first.module, found.first.judge) == ("steep", "estimates")
    assert "did not keep" in found.first.evidence["body"]["not_replayed"]


class Doubled(nn.Module):
    """Hands on what a part of it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x.tanh())


def test_a_call_that_changes_what_it_only_hands_on_is_blamed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ref = nn.Sequential(Doubled(), Doubled())
    target = copy.deepcopy(ref)
    inner = target[1].inner
    target[1].forward = lambda x: 1.02 * inner(x.tanh())
    first = aligned(tmp_path, ref, target, batch(), level="module").first
    assert first is not None and (first.module, first.label, first.judge) == ("1", "introduced", "body")
    assert first.evidence["body"]["local_error"] == pytest.approx(0.02, rel=0.01)


class Causal(nn.Module):
    """Attention over what came before, with a mask and positions that are given."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.factor = nn.Linear(16, 48), nn.Linear(16, 16), 1.0

    def forward(self, x: torch.Tensor, mask: torch.Tensor, turns: torch.Tensor) -> Any:
        q, k, v = self.qkv(x + turns).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / 4 + mask
        return x + self.out(scores.softmax(-1) @ v) * self.factor


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.layers = nn.ModuleList([Causal(), Causal()])

    def forward(self, tokens: torch.Tensor) -> Any:
        length = tokens.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1)
        turns = (torch.arange(length)[:, None] * torch.arange(16)).cos()
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, mask, turns)
        return self.head(x)


@pytest.mark.parametrize("rows", [1, 2], ids=["a bucket", "a padded batch"])
def test_a_call_on_padded_inputs_is_judged_by_its_real_rows(rows: int, tmp_path: Path) -> None:
    tokens = torch.randint(0, 32, (2, 5), generator=torch.Generator().manual_seed(1))
    padded = nn.functional.pad(tokens, (0, 3))
    places = [*range(5), 4, 4, 4]
    model = Reader()

    def record(name: str, ids: torch.Tensor, positions: list[int], width: int, level: str) -> Path:
        path = tmp_path / name
        with torch.no_grad(), dt.record(path, model, save="tensors", level=level, overwrite=True) as rec:
            for row in range(0, len(ids), width):
                names = [f"r{number}" for number in range(row, row + width)]
                with rec.step(phase="prefill", req_ids=names, positions=[positions] * width):
                    model(ids[row : row + width])
        return path

    ref = record("ref", tokens, list(range(5)), 1, "op")
    assert dt.align(ref, record("target", padded, places, rows, "module")).verdict == "match"
    model.layers[1].factor = 1.02
    first = dt.align(ref, record("target", padded, places, rows, "module")).first
    assert first is not None and (first.module, first.label, first.judge) == (
        "layers.1",
        "introduced",
        "body",
    )
    assert first.evidence["body"]["local_error"] > 100 * first.evidence["body"]["band"]
