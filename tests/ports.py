"""Pairs of implementations of one model: transformers' own, and one written from scratch on the same weights.

The ports share no class, no name and no nesting with the originals: fused projections, transposed weights,
rotary embeddings by complex numbers, norms and attention written out.
"""

from __future__ import annotations

import logging
import math
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

os.environ["HF_HUB_OFFLINE"] = "1"
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)


# Llama ------------------------------------------------------------------------------------------------


class RootMeanSquare(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.gain, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        size = wide.square().mean(-1, keepdim=True).add(self.eps).sqrt()
        return (wide / size).type_as(x) * self.gain


class Mixer(nn.Module):
    """Grouped-query attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.fused = nn.Linear(width, (heads + 2 * groups) * self.size, bias=False)
        self.back = nn.Linear(width, width, bias=False)
        self.scale = self.size**-0.5
        self.shift = 1  # first masked diagonal
        self.residual = 1.0
        self.sign = 1.0
        self.order = (0, 1, 2)
        self.by_head = False  # rows of the projection: q, k and v of one head, then of the next

    def turn(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        pairs = x.float().unflatten(-1, (2, -1)).transpose(-1, -2).contiguous()
        turned = torch.view_as_complex(pairs) * torch.polar(torch.ones_like(angles), self.sign * angles)
        return torch.view_as_real(turned).transpose(-1, -2).flatten(-2).type_as(x)

    def repeat(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(self.heads // self.groups, dim=1)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        if self.by_head:
            parts = self.fused(x).unflatten(-1, (self.heads, 3, self.size)).unbind(-2)
        else:
            sizes = [n * self.size for n in (self.heads, self.groups, self.groups)]
            parts = self.fused(x).split(sizes, dim=-1)
        q, k, v = (parts[i].view(rows, length, -1, self.size).transpose(1, 2) for i in self.order)
        q, k = self.turn(q, angles), self.turn(k, angles)
        k, v = self.repeat(k), self.repeat(v)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * self.scale
        future = torch.ones(length, length, dtype=torch.bool).triu(self.shift)
        weights = scores.masked_fill(future, float("-inf")).float().softmax(-1).type_as(v)
        return self.back((weights @ v).transpose(1, 2).reshape(rows, length, -1))


class Gated(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.both, self.out = nn.Linear(width, 2 * hidden, bias=False), nn.Linear(hidden, width, bias=False)
        self.swapped = False
        self.activation = F.silu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        if self.swapped:
            gate, up = up, gate
        return self.out(self.activation(gate) * up)


class Stage(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.pre, self.post = RootMeanSquare(width, eps), RootMeanSquare(width, eps)
        self.mix = Mixer(width, config.num_attention_heads, config.num_key_value_heads)
        self.feed = Gated(width, config.intermediate_size)
        self.residual = 1.0

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = (
            x * self.residual + self.mix(self.pre(x), angles)
            if self.residual != 1.0
            else x + self.mix(self.pre(x), angles)
        )
        return x + self.feed(self.post(x))


class Llama(nn.Module):
    def __init__(self, config: Any, vocabulary: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, config.hidden_size)
        self.tower = nn.ModuleList(Stage(config) for _ in range(config.num_hidden_layers))
        self.last = RootMeanSquare(config.hidden_size, config.rms_norm_eps)
        self.unembed = nn.Linear(config.hidden_size, vocabulary, bias=False)
        self.half = config.hidden_size // config.num_attention_heads // 2
        self.theta, self.start = 10000.0, 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        frequencies = self.theta ** (-torch.arange(self.half, dtype=torch.float32) / self.half)
        angles = torch.outer(torch.arange(tokens.shape[1]).float() + self.start, frequencies)
        for stage in self.tower:
            x = stage(x, angles)
        return self.unembed(self.last(x))


def by_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int) -> torch.Tensor:
    """[q0 k0 v0 q1 k1 v1 ...]: how GPT-NeoX and Bloom pack three projections."""
    return torch.stack([part.unflatten(0, (heads, -1)) for part in (q, k, v)], 1).flatten(0, 2)


def llama(
    layers: int = 2,
    *,
    width: int = 64,
    groups: int = 2,
    vocabulary: int = 96,
    padded: int | None = None,
    interleaved: bool = False,
) -> tuple[nn.Module, Llama]:
    """(transformers' Llama, the port), with the same random weights.

    Args:
      groups: of 4 heads.
      padded: words of the port, those beyond the vocabulary without weight.
      interleaved: the port packs its projections by head; takes 4 groups.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=5 * width // 2,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=groups,
        initializer_range=0.8 / width**0.5,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).eval()
    port = Llama(config, padded or vocabulary).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
        for mine, theirs in ((port.words, model.model.embed_tokens), (port.unembed, model.lm_head)):
            mine.weight.zero_()
            mine.weight[:vocabulary].copy_(theirs.weight)
        port.last.gain.copy_(model.model.norm.weight)
        for layer, stage in zip(model.model.layers, port.tower, strict=True):
            a, m = layer.self_attn, layer.mlp
            stage.pre.gain.copy_(layer.input_layernorm.weight)
            stage.post.gain.copy_(layer.post_attention_layernorm.weight)
            three = a.q_proj.weight, a.k_proj.weight, a.v_proj.weight
            stage.mix.by_head = interleaved
            stage.mix.fused.weight.copy_(by_head(*three, 4) if interleaved else torch.cat(three))
            stage.mix.back.weight.copy_(a.o_proj.weight)
            stage.feed.both.weight.copy_(torch.cat([m.gate_proj.weight, m.up_proj.weight]))
            stage.feed.out.weight.copy_(m.down_proj.weight)
    return model, port


def token_ids(rows: int = 2, length: int = 12, vocabulary: int = 96) -> torch.Tensor:
    return torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(1))


# BERT -------------------------------------------------------------------------------------------------


class Centered(nn.Module):
    """Layer norm, written out."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.g, self.b, self.eps = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.g + self.b


class Encoder(nn.Module):
    """A post-norm transformer layer, all in one module."""

    def __init__(self, width: int, hidden: int, heads: int, eps: float) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.n1, self.n2 = Centered(width, eps), Centered(width, eps)
        self.wide, self.narrow = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.heads, self.approximate, self.scale = heads, "none", 1.0
        self.keep = True

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).permute(0, 2, 1, 3)
            for part in (self.q(x), self.k(x), self.v(x))
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) * self.scale + bias
        mixed = (torch.softmax(scores, -1) @ v).permute(0, 2, 1, 3).flatten(2)
        x = self.n1(x + self.o(mixed))
        inner = self.narrow(F.gelu(self.wide(x), approximate=self.approximate))
        return self.n2(x + inner if self.keep else inner)


class Sentences(nn.Module):
    """BERT without pooler; token type 0 everywhere is folded into nothing: it is added like a bias."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.word = nn.Embedding(config.vocab_size, width)
        self.place = nn.Parameter(torch.zeros(config.max_position_embeddings, width))
        self.kind = nn.Parameter(torch.zeros(width))
        self.norm = Centered(width, eps)
        self.stack = nn.Sequential()
        self.stack = nn.ModuleList(
            Encoder(width, config.intermediate_size, config.num_attention_heads, eps)
            for _ in range(config.num_hidden_layers)
        )
        self.first = 0

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        x = self.word(ids) + self.place[self.first : self.first + length] + self.kind
        x = self.norm(x)
        bias = torch.zeros_like(mask, dtype=x.dtype).masked_fill(mask == 0, torch.finfo(x.dtype).min)
        bias = bias[:, None, None, :]
        for layer in self.stack:
            x = layer(x, bias)
        return x


def bert() -> tuple[nn.Module, Sentences, dict[str, torch.Tensor]]:
    """(transformers' BERT with MiniLM's weights, the port, inputs of the first)."""
    from dispatch_trace.demo import load_minilm

    model, inputs = load_minilm()
    model.pooler = None
    port = Sentences(model.config).eval()
    e = model.embeddings
    with torch.no_grad():
        port.word.weight.copy_(e.word_embeddings.weight)
        port.place.copy_(e.position_embeddings.weight)
        port.kind.copy_(e.token_type_embeddings.weight[0])
        _norm(port.norm, e.LayerNorm)
        for layer, mine in zip(model.encoder.layer, port.stack, strict=True):
            a = layer.attention
            for to, source in (
                (mine.q, a.self.query),
                (mine.k, a.self.key),
                (mine.v, a.self.value),
                (mine.o, a.output.dense),
                (mine.wide, layer.intermediate.dense),
                (mine.narrow, layer.output.dense),
            ):
                to.load_state_dict(source.state_dict())
            _norm(mine.n1, a.output.LayerNorm)
            _norm(mine.n2, layer.output.LayerNorm)
    return model, port, {name: value[:3, :20] for name, value in inputs.items()}


def _norm(mine: Centered, theirs: Any) -> None:
    mine.g.copy_(theirs.weight)
    mine.b.copy_(theirs.bias)


# GPT-2 ------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_a, self.norm_b = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = SelfAttention(width, heads)
        self.ff = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm_a(x))
        return x + self.ff(self.norm_b(x))


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.inp, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads
        self.scale: float | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.inp(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, width))


class Gpt(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.tok = nn.Embedding(config.vocab_size, config.n_embd)
        self.pos = nn.Embedding(config.n_positions, config.n_embd)
        self.layers = nn.Sequential(*(Layer(config.n_embd, config.n_head) for _ in range(config.n_layer)))
        self.final = nn.LayerNorm(config.n_embd)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1]))
        return F.linear(self.final(self.layers(x)), self.tok.weight)


def gpt2(layers: int = 2) -> tuple[nn.Module, Gpt]:
    """(transformers' GPT-2 with its transposed weights, the port with ordinary ones)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=96,
        n_positions=32,
        n_embd=64,
        n_layer=layers,
        n_head=4,
        initializer_range=0.1,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    port = Gpt(config).eval()
    with torch.no_grad():
        t = model.transformer
        port.tok.weight.copy_(t.wte.weight)
        port.pos.weight.copy_(t.wpe.weight)
        port.final.load_state_dict(t.ln_f.state_dict())
        for block, mine in zip(t.h, port.layers, strict=True):
            mine.norm_a.load_state_dict(block.ln_1.state_dict())
            mine.norm_b.load_state_dict(block.ln_2.state_dict())
            for to, source in (
                (mine.attn.inp, block.attn.c_attn),
                (mine.attn.out, block.attn.c_proj),
                (mine.ff[0], block.mlp.c_fc),
                (mine.ff[2], block.mlp.c_proj),
            ):
                to.weight.copy_(source.weight.T)
                to.bias.copy_(source.bias)
    return model, port
