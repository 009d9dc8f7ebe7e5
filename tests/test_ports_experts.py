"""Experts that are stored in another order: harmless together with the router's rows, a finding alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ports
import pytest
import torch
from aligning import record
from torch import nn

import dispatch_trace as dt
from dispatch_trace.judge.reordered import Order, order_of

ORDER = torch.tensor([2, 0, 3, 1])


class Mixture(nn.Module):
    """The best two of four experts, each a module of its own."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.route = nn.Linear(width, 4, bias=False)
        self.crowd = nn.ModuleList(ports.Gated(width, hidden) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        shares, chosen = self.route(flat).softmax(-1).topk(2, -1)
        shares = shares / shares.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.crowd):
            row, slot = (chosen == number).nonzero(as_tuple=True)
            out.index_add_(0, row, expert(flat[row]) * shares[row, slot, None])
        return out.view_as(x)


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.1,
        use_cache=False,
    )
    model = MixtralForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def port_of(model: Any, order: torch.Tensor) -> nn.Module:
    """The same with each expert a module, in another order."""
    config = model.config
    port = ports.Llama(config, config.vocab_size).eval()
    port.theta = config.rope_parameters["rope_theta"]
    with torch.no_grad():
        port.words.weight.copy_(model.model.embed_tokens.weight)
        port.last.gain.copy_(model.model.norm.weight)
        port.unembed.weight.copy_(model.lm_head.weight)
        for layer, stage in zip(model.model.layers, port.tower, strict=True):
            attention = layer.self_attn
            three = (attention.q_proj, attention.k_proj, attention.v_proj)
            stage.pre.gain.copy_(layer.input_layernorm.weight)
            stage.post.gain.copy_(layer.post_attention_layernorm.weight)
            stage.mix.fused.weight.copy_(torch.cat([part.weight for part in three]))
            stage.mix.back.weight.copy_(attention.o_proj.weight)
            stage.feed = Mixture(config.hidden_size, config.intermediate_size)
            stage.feed.route.weight.copy_(layer.mlp.gate.weight[order])
            for expert, number in zip(stage.feed.crowd, order.tolist(), strict=True):
                expert.both.weight.copy_(layer.mlp.experts.gate_up_proj[number])
                expert.out.weight.copy_(layer.mlp.experts.down_proj[number])
    return port


def reordered(*, experts: bool = True, router: bool = True) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        block = model.model.layers[1].mlp
        if experts:
            for parameter in block.experts.parameters():
                parameter.copy_(parameter[ORDER])
        if router:
            block.gate.weight.copy_(block.gate.weight[ORDER])

    return change


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return mixtral()


@pytest.fixture(scope="module")
def ref(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("experts") / "ref", model, ports.token_ids())


def aligned(ref: Path, model: nn.Module, change: Callable[[Any], None], folder: Path) -> dt.Alignment:
    model = copy.deepcopy(model)
    with torch.no_grad():
        change(model)
    return dt.align(ref, record(folder / "target", model, ports.token_ids()))


def test_experts_in_another_order_match_together_with_the_router(
    ref: Path, model: nn.Module, tmp_path: Path
) -> None:
    alignment = aligned(ref, model, reordered(), tmp_path)
    assert alignment.verdict == "match", (alignment.reasons, alignment.first)


@pytest.mark.parametrize(
    ("change", "module"),
    [
        (reordered(router=False), "model.layers.1.mlp.experts"),
        (reordered(experts=False), "model.layers.1.mlp.gate"),
    ],
)
def test_experts_or_router_in_another_order_alone_are_named(
    change: Callable[[Any], None], module: str, ref: Path, model: nn.Module, tmp_path: Path
) -> None:
    first = aligned(ref, model, change, tmp_path).first
    assert first is not None and (first.module, first.label) == (module, "parameter"), first


@pytest.mark.parametrize(("parameter", "row"), [("down_proj", slice(None)), ("gate_up_proj", 3)])
def test_a_fault_in_one_of_reordered_experts_is_named_not_their_router(
    parameter: str, row: Any, ref: Path, model: nn.Module, tmp_path: Path
) -> None:
    def change(model: Any) -> None:
        reordered()(model)
        getattr(model.model.layers[1].mlp.experts, parameter)[1, row] *= -1.2

    alignment = aligned(ref, model, change, tmp_path)
    fatal = [f for f in alignment.findings if f.fatal]
    assert [(f.module, f.label, f.evidence["parameter"]) for f in fatal] == [
        ("model.layers.1.mlp.experts", "parameter", parameter)
    ]
    assert any(f.module == "model.layers.1.mlp.gate" and "refuted" in f.evidence for f in alignment.findings)


def test_rows_in_another_order_are_recognised_beside_changed_ones() -> None:
    rows = np.arange(12.0).reshape(4, 3)
    turned = rows[ORDER.numpy()]
    whole = order_of(rows, turned)
    assert whole is not None and whole.rows == (2, 0, 3, 1) and whole.is_whole
    turned[1] += 1
    torn = order_of(rows, turned)
    assert torn is not None and torn.rows == (2, -1, 3, 1) and torn.agrees(whole)
    assert not torn.agrees(Order((3, 0, 2, 1)))
    assert order_of(rows, rows) is None and order_of(rows, rows + 1) is None


def same(port: Any) -> None:
    return None


def rows_of_the_router_alone(port: Any) -> None:
    weight = port.tower[1].feed.route.weight
    weight.copy_(weight[ORDER])


@pytest.mark.parametrize(
    ("change", "module"),
    [
        (same, None),
        (rows_of_the_router_alone, "tower.1.feed.route"),
    ],
)
def test_a_port_with_experts_as_modules_in_another_order(
    change: Callable[[Any], None], module: str | None, ref: Path, model: nn.Module, tmp_path: Path
) -> None:
    alignment = aligned(ref, port_of(model, ORDER), change, tmp_path)
    assert alignment.verdict == ("match" if module is None else "diverged"), alignment.reasons
    assert (alignment.first and alignment.first.module) == module, alignment.first
