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
import torch.nn.functional as F
from aligning import record
from torch import nn

import dispatch_trace as dt
from dispatch_trace.align.orders import Order, order_of

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


class Split(nn.Module):
    """An expert with two projections of their own."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Masked(nn.Module):
    """The same mixture by a mask of all choices, as transformers wrote it; rows come in another order."""

    def __init__(self, mixture: Any) -> None:
        super().__init__()
        width, hidden = mixture.route.in_features, mixture.crowd[0].out.in_features
        self.gate, self.experts = mixture.route, nn.ModuleList(Split(width, hidden) for _ in mixture.crowd)
        for expert, other in zip(self.experts, mixture.crowd, strict=True):
            expert.w1.weight.data, expert.w3.weight.data = other.both.weight.data.chunk(2)
            expert.w2.weight.data = other.out.weight.data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        shares, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        shares = shares / shares.sum(-1, keepdim=True)
        mask, out = F.one_hot(chosen, 4).permute(2, 1, 0), torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            slot, row = torch.where(mask[number])
            out.index_add_(0, row, expert(flat[row]) * shares[row, slot, None])
        return out.view_as(x)


class Other(nn.Module):
    """The port under other names, with experts of the other kind."""

    def __init__(self, port: Any) -> None:
        super().__init__()
        self.embed, self.blocks, self.norm, self.head = port.words, port.tower, port.last, port.unembed
        self.half, self.theta = port.half, port.theta
        for block in self.blocks:
            block.ffn = Masked(block.feed)
            del block.feed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        frequencies = self.theta ** (-torch.arange(self.half, dtype=torch.float32) / self.half)
        angles = torch.outer(torch.arange(tokens.shape[1]).float(), frequencies)
        for block in self.blocks:
            x = x + block.mix(block.pre(x), angles)
            x = x + block.ffn(block.post(x))
        return self.head(self.norm(x))


@pytest.fixture(scope="module")
def refs(model: nn.Module, ref: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One mixture, with its experts in one weight, as modules, and as modules of another implementation."""
    folder, in_order = tmp_path_factory.mktemp("experts"), torch.arange(4)
    modules = record(folder / "modules", port_of(model, in_order), ports.token_ids())
    return {
        "stacked": ref,
        "modules": modules,
        "masked": record(folder / "masked", Other(port_of(model, in_order)), ports.token_ids()),
    }


def same(port: Any) -> None:
    return None


def rows_of_the_router_alone(port: Any) -> None:
    weight = port.tower[1].feed.route.weight
    weight.copy_(weight[ORDER])


def one_expert_wrong(port: Any) -> None:
    port.tower[1].feed.crowd[1].out.weight *= -1.2


def one_row_wrong(port: Any) -> None:
    port.tower[1].feed.crowd[2].both.weight[3] *= -1.2


def other_activation(port: Any) -> None:
    port.tower[1].feed.crowd[1].activation = F.gelu


@pytest.mark.parametrize(
    ("name", "change", "module"),
    [
        ("stacked", same, None),
        ("stacked", rows_of_the_router_alone, "tower.1.feed.route"),
        ("stacked", one_expert_wrong, "tower.1.feed.crowd.1.out"),
        # one product of the reference stands for those of all experts
        ("stacked", other_activation, "tower.1.feed"),
        ("modules", same, None),
        ("modules", one_expert_wrong, "tower.1.feed.crowd.1.out"),
        ("modules", one_row_wrong, "tower.1.feed.crowd.2.both"),
        ("modules", other_activation, "tower.1.feed.crowd.1"),
        ("masked", same, None),
        ("masked", one_expert_wrong, "tower.1.feed.crowd.1.out"),
        ("masked", other_activation, "tower.1.feed.crowd.1"),
    ],
)
def test_a_port_with_experts_as_modules_in_another_order(
    name: str,
    change: Callable[[Any], None],
    module: str | None,
    refs: dict[str, Path],
    model: nn.Module,
    tmp_path: Path,
) -> None:
    port = port_of(model, ORDER)
    with torch.no_grad():
        change(port)
    alignment = dt.align(refs[name], record(tmp_path / "target", port, ports.token_ids()))
    assert alignment.verdict == ("match" if module is None else "diverged"), alignment.reasons
    assert (alignment.first and alignment.first.module) == module, alignment.first


def test_experts_in_the_order_of_the_reference_leave_a_router_with_other_rows_to_blame(
    refs: dict[str, Path], model: nn.Module, tmp_path: Path
) -> None:
    port = port_of(model, torch.arange(4))
    with torch.no_grad():
        rows_of_the_router_alone(port)
    first = dt.align(refs["modules"], record(tmp_path / "target", port, ports.token_ids())).first
    assert first is not None and (first.module, first.label) == ("tower.1.feed.route", "parameter"), first


def test_statistics_of_experts_in_another_order(model: nn.Module, tmp_path: Path) -> None:
    traces = []
    for name, order in (("ref", torch.arange(4)), ("target", ORDER)):
        port = port_of(model, order)
        traces.append(record(tmp_path / name, port, ports.token_ids(), save="stats"))
    assert dt.align(*traces).verdict == "match"
    with torch.no_grad():
        one_expert_wrong(port)
    first = dt.align(traces[0], record(tmp_path / "wrong", port, ports.token_ids(), save="stats")).first
    assert first is not None and first.module == "tower.1.feed.crowd.1.out", first


class Stacked(nn.Module):
    """All experts in two weights [experts, in, out], as GPT-OSS (gate and up interleaved) and Llama 4 do."""

    def __init__(self, mixture: Any, *, interleaved: bool) -> None:
        super().__init__()
        self.gate, self.interleaved = mixture.route, interleaved
        both = torch.stack([expert.both.weight.T for expert in mixture.crowd])
        if interleaved:
            both = torch.stack(both.chunk(2, -1), -1).flatten(-2)
        self.gate_up_proj = nn.Parameter(both.contiguous())
        self.down_proj = nn.Parameter(torch.stack([e.out.weight.T for e in mixture.crowd]).contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        shares, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        shares = shares / shares.sum(-1, keepdim=True)
        dense = torch.zeros(len(flat), 4, dtype=x.dtype).scatter(1, chosen, shares)
        both = torch.bmm(flat.expand(4, *flat.shape), self.gate_up_proj)
        gate, up = (both[..., ::2], both[..., 1::2]) if self.interleaved else both.chunk(2, -1)
        made = torch.bmm(F.silu(gate) * up, self.down_proj)
        return (made * dense.T[..., None]).sum(0).view_as(x)


def stacked(model: Any, *, interleaved: bool) -> nn.Module:
    port: Any = Other(port_of(model, torch.arange(4)))
    for block, theirs in zip(port.blocks, port_of(model, torch.arange(4)).tower, strict=True):  # type: ignore[arg-type]
        block.ffn = Stacked(theirs.feed, interleaved=interleaved)
    return port


def expert_of_a_stack_wrong(net: Any) -> None:
    net.blocks[1].ffn.gate_up_proj[1] *= -1.2


def expert_wrong(net: Any) -> None:
    net.blocks[1].ffn.experts[1].w2.weight *= -1.2


def row_wrong(net: Any) -> None:
    net.blocks[1].ffn.experts[1].w1.weight[3] *= -1.5


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("stack_first", "change", "module"),
    [
        (True, same, None),
        (True, expert_wrong, "blocks.1.ffn.experts.1.w2"),
        (True, row_wrong, "blocks.1.ffn.experts.1.w1"),
        (False, same, None),
        (False, expert_of_a_stack_wrong, "blocks.1.ffn"),
    ],
)
def test_transposed_stacks_of_experts_against_modules_in_another_order(
    stack_first: bool,
    change: Callable[[Any], None],
    module: str | None,
    interleaved: bool,
    model: nn.Module,
    tmp_path: Path,
) -> None:
    nets = [stacked(model, interleaved=interleaved), Other(port_of(model, ORDER))]
    ref, target = nets if stack_first else nets[::-1]
    with torch.no_grad():
        change(target)
    ids = ports.token_ids()
    alignment = dt.align(record(tmp_path / "ref", ref, ids), record(tmp_path / "target", target, ids))
    assert alignment.verdict == ("match" if module is None else "diverged"), alignment.reasons
    assert (alignment.first and alignment.first.module) == module, alignment.first
