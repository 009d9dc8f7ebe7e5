"""Two implementations of one model, judged from statistics alone: fused projections know no parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ports
import pytest
import torch
import torch.nn.functional as F
from test_ports import keys_and_values_swapped, other, packed_by_projection, scaled
from test_ports_experts import (
    ORDER,
    Other,
    mixtral,
    one_expert_wrong,
    other_activation,
    port_of,
    rows_of_the_router_alone,
)
from torch import nn

import dispatch_trace as dt

MODELS: dict[str, Callable[[], tuple[nn.Module, nn.Module]]] = {
    "llama": lambda: ports.llama(3),
    "by head": lambda: ports.llama(3, groups=4, interleaved=True),
    "one layer": lambda: ports.llama(1),
}


def align(
    folder: Path,
    name: str,
    change: Callable[[Any], None] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    port_first: bool = False,
) -> dt.Alignment:
    """The alignment of a model and its port; the change is made in the target.

    Args:
      dtype: of the target.
      port_first: the port is the reference.
    """
    model, port = MODELS[name]()
    target = model if port_first else port
    ids = ports.token_ids()
    with torch.no_grad():
        if change is not None:
            change(target)
        target.to(dtype)
        with dt.record(folder / "model", model, save="stats"):
            model(input_ids=ids)
        with dt.record(folder / "port", port, save="stats"):
            port(ids)
    names = ("port", "model") if port_first else ("model", "port")
    return dt.align(folder / names[0], folder / names[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("port_first", [False, True])
@pytest.mark.parametrize("name", ["llama", "by head"])
def test_clean_ports_match(name: str, port_first: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    alignment = align(tmp_path, name, dtype=dtype, port_first=port_first)
    assert alignment.verdict == "match", (alignment.reasons, alignment.first)


def halves_exchanged(model: Any) -> None:
    weight = model.tower[1].feed.both.weight
    weight.copy_(torch.cat(weight.clone().chunk(2)[::-1]))


def rows_exchanged(model: Any) -> None:
    weight = model.tower[1].mix.fused.weight
    weight[[100, 101]] = weight[[101, 100]].clone()


@pytest.mark.parametrize(
    ("name", "change", "module", "label"),
    [
        ("llama", other("tower.2.mix", sign=-1.0), "tower.2.mix", "structure"),
        ("llama", other("tower.1.mix", scale=1.0), "tower.1.mix", "structure"),
        ("llama", other("tower.1.mix", order=(0, 2, 1)), "tower.1.mix", "structure"),
        ("llama", other("tower.1.feed", swapped=True), "tower.1.feed", "wiring"),
        ("llama", other("tower.1.feed", activation=F.gelu), "tower.1.feed", "structure"),
        ("llama", keys_and_values_swapped, "tower.1.mix.fused", "parameter"),
        ("llama", halves_exchanged, "tower.1.feed.both", "parameter"),
        ("llama", rows_exchanged, "tower.1.mix.fused", "parameter"),
        ("llama", scaled("tower.1.mix.fused"), "tower.1.mix.fused", "parameter"),
        ("by head", packed_by_projection, "tower.1.mix.fused", "parameter"),
    ],
)
def test_a_bug_beside_a_fused_projection_is_told_from_one_in_it(
    name: str, change: Callable[[Any], None], module: str, label: str, tmp_path: Path
) -> None:
    alignment = align(tmp_path, name, change)
    first = alignment.first
    assert alignment.verdict == "diverged" and first is not None, alignment.reasons
    assert (first.module, first.label) == (module, label), first


def keys_and_values_of_the_first_swapped(model: Any) -> None:
    weight = model.tower[0].mix.fused.weight
    q, k, v = weight.clone().split([64, 32, 32])
    weight.copy_(torch.cat([q, v, k]))


@pytest.mark.parametrize("change", [other("tower.0.mix", scale=1.0), keys_and_values_of_the_first_swapped])
def test_without_a_layer_that_is_right_the_call_around_both_is_named(
    change: Callable[[Any], None], tmp_path: Path
) -> None:
    first = align(tmp_path, "one layer", change).first
    assert first is not None and first.module == "tower.0.mix", first
    assert first.evidence["candidates"] == ["tower.0.mix.fused.weight", "what reads it in tower.0.mix"]


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("self_attn", lambda layer: setattr(layer.self_attn, "scaling", 1.0)),
        ("mlp.act_fn", lambda layer: setattr(layer.mlp, "act_fn", nn.GELU())),
        ("mlp.up_proj", lambda layer: layer.mlp.up_proj.weight[3].mul_(1.5)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_may_be_the_one_that_is_fused(
    path: str, change: Callable[[Any], Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    def in_layer(model: Any) -> None:
        change(model.model.layers[1])

    alignment = align(tmp_path, "llama", in_layer, dtype=dtype, port_first=True)
    first = alignment.first
    assert alignment.verdict == "diverged" and first is not None, alignment.reasons
    assert first.module == f"model.layers.1.{path}", first


MIXTURES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "stacked": lambda model: model,
    "modules": lambda model: port_of(model, torch.arange(4)),
    "masked": lambda model: Other(port_of(model, torch.arange(4))),
}


def align_mixtures(
    folder: Path, name: str, dtype: torch.dtype, change: Callable[[Any], None] | None = None
) -> dt.Alignment:
    """A mixture against a port that holds its experts in another order, where the change is made."""
    model = mixtral()
    port = port_of(model, ORDER)
    ids = ports.token_ids()
    with torch.no_grad():
        if change is not None:
            change(port)
        port.to(dtype)
        for path, each in (("ref", MIXTURES[name](model)), ("target", port)):
            with dt.record(folder / path, each, save="stats"):
                each(ids)
    return dt.align(folder / "ref", folder / "target")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(MIXTURES))
def test_mixtures_in_another_order_match(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    alignment = align_mixtures(tmp_path, name, dtype)
    assert alignment.verdict == "match", (alignment.reasons, alignment.first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "change", "module"),
    [
        ("modules", one_expert_wrong, "tower.1.feed.crowd.1.out"),
        ("modules", other_activation, "tower.1.feed.crowd.1"),
        # which of them it is takes the data of both
        ("stacked", one_expert_wrong, "tower.1.feed"),
        ("stacked", other_activation, "tower.1.feed"),
        ("stacked", rows_of_the_router_alone, "tower.1.feed"),
        ("masked", one_expert_wrong, "tower.1.feed"),
    ],
)
def test_a_router_is_not_blamed_for_a_fault_in_experts_in_another_order(
    name: str, change: Callable[[Any], None], module: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    first = align_mixtures(tmp_path, name, dtype, change).first
    assert first is not None and first.module == module, first
