"""Bugs in the program: the weights are those of the reference.

Each docstring names the kind of bug and a public report of it. `Truth.ops` names the first ops that differ:
those that were put in, or that have another argument; None where an op is missing or only the wiring is
wrong, since then the target's ops are right in themselves.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.nn import functional as F
from transformers.models.llama import modeling_llama

from .cases import Subject, Truth, aten, mutant, while_running, with_traits
from .models import (
    HIDDEN,
    SEQ,
    eps_name,
    home_of,
    is_activation,
    is_attention,
    is_layer,
    is_linear,
    is_norm,
    is_token_embedding,
    matrix_of,
)

_ATTENTION_DROPOUT = ("attention.self.dropout", "attn_dropout")
SDPA_OPS = aten(
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_attention_math",
    "scaled_dot_product_attention",
)


@mutant()
def norm_eps(subject: Subject) -> Truth:
    """Another epsilon in one norm. Ref: huggingface/candle#271, meta-pytorch/torchtune#152"""
    path, norm = subject.choose(is_norm)
    eps = subject.draw.choice((1e-3, 3e-3))
    setattr(norm, eps_name(norm), eps)
    fused = isinstance(norm, torch.nn.LayerNorm)
    ops = aten("native_layer_norm", "layer_norm") if fused else aten("add")
    return Truth(module=path, ops=ops, what=f"eps {eps:g}")


@mutant(needs="rms")
def norm_plus_one(subject: Subject) -> Truth:
    """RMSNorm multiplies by 1 + weight where the checkpoint means weight. Ref: ml-explore/mlx-lm#1623"""
    path, norm = subject.choose(is_norm)

    def forward(x: torch.Tensor) -> torch.Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return (1.0 + norm.weight) * (x * torch.rsqrt(variance + norm.variance_epsilon))

    norm.forward = forward
    return Truth(module=path, ops=aten("add", "mul"), what="1 + weight")


@mutant(needs="rms_plus_one")
def norm_without_one(subject: Subject) -> Truth:
    """RMSNorm multiplies by weight where the checkpoint means 1 + weight. Ref: ml-explore/mlx-lm#1623"""
    path, norm = subject.choose(is_norm)
    norm.forward = lambda x: (norm._norm(x.float()) * norm.weight.float()).type_as(x)
    return Truth(module=path, what="weight instead of 1 + weight")


@mutant(needs="rms")
def norm_centred(subject: Subject) -> Truth:
    """RMSNorm subtracts the mean, as LayerNorm does. Ref: ggml-org/llama.cpp#173, mit-han-lab/omniserve#32"""
    path, norm = subject.choose(is_norm)
    right = norm.forward
    norm.forward = lambda x: right(x - x.mean(-1, keepdim=True))
    return Truth(module=path, ops=aten("mean", "sub"), what="mean subtracted")


@mutant()
def norm_skipped(subject: Subject) -> Truth:
    """One norm is not applied, as when a port forgets a config flag."""
    path, norm = subject.choose(is_norm)
    norm.forward = lambda x: x
    return Truth(module=path, what="identity instead of the norm")


@mutant(needs="qk_norm")
def key_norm_missing(subject: Subject) -> Truth:
    """The keys of one layer are not normed. Ref: lablup/mlxcel#316"""
    path, norm = subject.choose(lambda path, _: path.endswith("k_norm"))
    norm.forward = lambda x: x
    return Truth(module=path, what="k_norm is the identity")


@mutant(needs="attention")
def attention_scale(subject: Subject) -> Truth:
    """Scores are not divided by sqrt(head_dim), or by that of the model. Ref: mlc-ai/mlc-llm#3426"""
    path, attention = subject.choose(is_attention)
    attention.scaling = subject.draw.choice([s for s in (1.0, HIDDEN**-0.5) if s != attention.scaling])
    return Truth(module=path, ops=(*aten("mul"), *SDPA_OPS), what=f"scale {attention.scaling:g}")


@mutant(needs="causal", lacks="window", attention="eager")
def causal_mask(subject: Subject) -> Truth:
    """The causal mask lets each token see one token too many. Ref: huggingface/transformers#39408"""
    path = next(path for path, _ in subject.target.named_children() if path != "lm_head")
    while_running(
        subject.target.get_submodule(path),
        "transformers.masking_utils",
        causal_mask_function=lambda batch, head, query, key: key <= query + 1,
    )
    return Truth(module=path, ops=aten("le", "add"), what="key <= query + 1")


@mutant(needs="window", attention="eager")
def window_off_by_one(subject: Subject) -> Truth:
    """The sliding window sees one token too many. Ref: huggingface/transformers#39408"""
    while_running(
        subject.target.get_submodule("model"),
        "transformers.masking_utils",
        sliding_window_overlay=lambda window: lambda batch, head, query, key: key > query - window - 1,
    )
    return Truth(module="model", ops=aten("sub", "gt", "add"), what="key > query - window - 1")


@mutant(needs="softcap", attention="eager")
def softcap_missing(subject: Subject) -> Truth:
    """Attention scores are not capped. Ref: EricLBuehler/mistral.rs#1928"""
    path, attention = subject.choose(is_attention)
    attention.attn_logit_softcapping = None
    return Truth(module=path, what="no softcap")


@mutant(needs="bucketed")
def relative_bias_one_sided(subject: Subject) -> Truth:
    """The encoder's relative positions are bucketed like the decoder's. Ref: ml-explore/mlx-examples#113"""
    path = "encoder.block.0.layer.0.SelfAttention"
    subject.target.get_submodule(path).is_decoder = True
    return Truth(module=path, what="bidirectional=False")


@mutant(needs="moe")
def experts_not_renormed(subject: Subject) -> Truth:
    """The weights of the chosen experts do not sum to one. Ref: pytorch/torchtitan#1448"""
    path, router = subject.choose(lambda path, _: path.endswith("mlp.gate"))

    def forward(hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = F.linear(hidden_states.reshape(-1, router.hidden_dim), router.weight)
        value, index = torch.topk(F.softmax(logits.float(), dim=-1), router.top_k, dim=-1)
        return logits, value, index

    router.forward = forward
    # Its experts are handed wrong weights.
    return Truth(module=path, what="top-k weights not divided by their sum")


@mutant(needs="moe")
def router_softmax_last(subject: Subject) -> Truth:
    """Softmax of the chosen experts' probabilities, not logits. Ref: lablup/mlxcel#391 (family)"""
    path, router = subject.choose(lambda path, _: path.endswith("mlp.gate"))

    def forward(hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = F.linear(hidden_states.reshape(-1, router.hidden_dim), router.weight)
        value, index = torch.topk(F.softmax(logits.float(), dim=-1), router.top_k, dim=-1)
        return logits, F.softmax(value, dim=-1), index

    router.forward = forward
    return Truth(module=path, ops=aten("_softmax", "softmax"), what="softmax of probabilities")


@mutant(needs="moe")
def expert_gate_up_order(subject: Subject) -> Truth:
    """An expert's activation is applied to up instead of gate. Ref: flashinfer-ai/flashinfer#4130"""
    path, experts = subject.choose(lambda path, _: path.endswith("mlp.experts"))

    def wrong(function: Any) -> Any:
        def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            out = function(x, weight)
            return out if weight.shape[0] == experts.hidden_dim else torch.cat(out.chunk(2, -1)[::-1], -1)

        return linear

    while_running(experts, "torch.nn.functional", linear=wrong(F.linear))
    return Truth(module=path, ops=aten("cat"), what="up and gate exchanged")


@mutant(needs="encoder_decoder")
def cross_attention_inputs(subject: Subject) -> Truth:
    """The decoder attends to its own states where it should to the encoder's. Ref: rexrex9/nlp_torchtext#2"""
    wanted = (".EncDecAttention", ".encoder_attn")
    path, attention = subject.choose(lambda path, _: path.endswith(wanted))
    right = attention.forward

    def forward(hidden_states: torch.Tensor, **rest: Any) -> Any:
        return right(
            hidden_states,
            **{**rest, "key_value_states": hidden_states, "mask": None}
            if "mask" in rest
            else {**rest, "key_value_states": hidden_states},
        )

    attention.forward = forward
    return Truth(module=path, what="keys and values of the decoder")


@mutant(needs="conv", lacks="state_space")
def kernel_flipped(subject: Subject) -> Truth:
    """A convolution's kernel is flipped, as a true convolution's is. Ref: pytorch/pytorch#16215 (family)"""
    path, conv = subject.choose(lambda _, module: isinstance(module, torch.nn.Conv1d | torch.nn.Conv2d))
    dims = tuple(range(2, conv.weight.ndim))
    right = conv._conv_forward
    conv.forward = lambda x: right(x, conv.weight.flip(dims), conv.bias)
    return Truth(module=path, ops=aten("flip", "convolution"), what="kernel flipped")


@mutant(needs="state_space")
def scan_skip_missing(subject: Subject) -> Truth:
    """The scan's skip (D) is left out, as when a port drops a term."""
    path, mixer = subject.choose(lambda path, _: path.endswith(".mixer"))
    home = home_of(mixer)
    right = importlib.import_module(home).mamba_selective_scan
    while_running(mixer, home, mamba_selective_scan=lambda *args, **rest: right(*args, **{**rest, "D": None}))
    return Truth(module=path, what="no skip")


@mutant(archs=["bert"])
def mask_ignored(subject: Subject) -> Truth:
    """One layer attends to padding: it is not given the mask on. Ref: turboderp/exllama#101"""
    path, attention = subject.choose(is_attention)
    right = attention.forward
    attention.forward = lambda hidden_states, attention_mask=None, **rest: right(hidden_states, **rest)
    return Truth(
        module=path, ops=None if subject.attention == "eager" else SDPA_OPS, what="attention_mask dropped"
    )


@mutant(needs="attention", attention="eager")
def softmax_dim(subject: Subject) -> Truth:
    """Attention normalised over the queries instead of the keys. Ref: PetrochukM/PyTorch-NLP#2"""
    path, attention = subject.choose(is_attention)
    right = F.softmax
    while_running(
        attention,
        "torch.nn.functional",
        softmax=lambda x, dim, **rest: right(x, dim=-2, **rest),
    )
    return Truth(module=path, ops=aten("_softmax", "softmax"), what="dim -2")


@mutant(needs="gqa", attention="eager")
def gqa_order(subject: Subject) -> Truth:
    """Key/value heads tiled instead of each repeated for its group. Ref: onnx/onnx#7274"""
    path, attention = subject.choose(is_attention)
    while_running(attention, home_of(attention), repeat_kv=lambda kv, groups: kv.repeat(1, groups, 1, 1))
    ops = aten("repeat", "expand", "clone", "view", "_unsafe_view", "unsqueeze", "copy", "alias", "unfold")
    return Truth(module=path, ops=ops, what="repeat instead of repeat_interleave")


@mutant(needs="attention")
def heads_unmerged(subject: Subject) -> Truth:
    """Heads merged without transposing back first. Ref: jsbaan/transformer-from-scratch#6"""
    path, attention = subject.choose(is_attention)

    def unmerged(function: Any) -> Any:
        def interface(*args: Any, **kwargs: Any) -> Any:
            output, weights = function(*args, **kwargs)  # [batch, seq, heads, head_dim]
            return output.transpose(1, 2).reshape(output.shape), weights

        return interface

    _around_interface(attention, unmerged)
    return Truth(module=path, what="[batch, heads, seq, dim] reshaped to [batch, seq, heads * dim]")


@mutant(needs="attention", lacks="encoder_decoder")
def key_value_swapped(subject: Subject) -> Truth:
    """Key and value passed in each other's place. Ref: tenstorrent/tt-mlir#8958"""
    path, attention = subject.choose(is_attention)

    def swapped(function: Any) -> Any:
        return lambda module, query, key, value, *rest, **kwargs: function(
            module, query, value, key, *rest, **kwargs
        )

    _around_interface(attention, swapped)
    return Truth(module=path, what="attention(query, value, key)")


@mutant(needs="rope")
def rope_theta(subject: Subject) -> Truth:
    """Rope base of the library's default, not of the checkpoint. Ref: lyogavin/airllm#369"""
    path, rotary = subject.choose(lambda path, _: path.endswith(".rotary_emb"))
    theta = subject.draw.choice((500000.0, 1000000.0))
    dim = 2 * rotary.inv_freq.numel()
    rotary.inv_freq.copy_(theta ** (-torch.arange(0, dim, 2).float() / dim))
    ops = aten("mul", "bmm", "_to_copy", "unsqueeze", "expand")
    return Truth(module=path, ops=ops, what=f"theta {theta:g}")


@mutant(needs="rope")
def rope_pairs(subject: Subject) -> Truth:
    """Rope rotates even/odd pairs where the checkpoint means halves. Ref: huggingface/candle#3948"""
    path, attention = subject.choose(is_attention)

    def rotate_pairs(x: torch.Tensor) -> torch.Tensor:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)

    while_running(attention, home_of(attention), rotate_half=rotate_pairs)
    ops = aten("slice", "neg", "stack", "cat", "view", "mul")
    return Truth(module=path, ops=ops, what="pairs interleaved")


@mutant(needs="rope")
def rope_direction(subject: Subject) -> Truth:
    """Rope turns the other way: the sign is on the wrong half. Ref: karpathy/nanochat#489"""
    path, attention = subject.choose(is_attention)

    def rotate_back(x: torch.Tensor) -> torch.Tensor:
        first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat((second, -first), dim=-1)

    while_running(attention, home_of(attention), rotate_half=rotate_back)
    return Truth(module=path, ops=aten("neg", "cat", "slice", "mul"), what="turned backwards")


@mutant(needs="rope gqa")
def rope_key_missing(subject: Subject) -> Truth:
    """The rotated key is not written back. Ref: kvcache-ai/sglang#66"""
    path, attention = subject.choose(is_attention)

    def queries_only(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return (q * cos) + (modeling_llama.rotate_half(q) * sin), k

    while_running(attention, home_of(attention), apply_rotary_pos_emb=queries_only)
    return Truth(module=path, what="key not rotated")


@mutant(needs="rope")
def rope_bfloat16(subject: Subject) -> Truth:
    """Rope angles computed in bfloat16. Ref: NVIDIA-NeMo/Automodel#2549, huggingface/candle#3520"""
    path, rotary = subject.choose(lambda path, _: path.endswith(".rotary_emb"))

    def forward(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        freqs = position_ids[..., None].bfloat16() * rotary.inv_freq.bfloat16()
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)

    rotary.forward = forward
    return Truth(module=path, ops=aten("_to_copy", "mul", "cos"), what="angles in bfloat16")


@mutant(lacks="state_space")
def activation(subject: Subject) -> Truth:
    """Another member of the activation family. Ref: Blaizzy/mlx-embeddings#81, huggingface/candle#3745"""
    path, module = subject.choose(is_activation)
    name, function, ops = subject.draw.choice(
        (
            ("gelu tanh", lambda x: F.gelu(x, approximate="tanh"), aten("gelu")),
            ("quick gelu", lambda x: x * torch.sigmoid(1.702 * x), aten("mul", "sigmoid")),
            ("relu", F.relu, aten("relu")),
        )
    )
    module.forward = function
    return Truth(module=path, ops=ops, what=name)


@mutant(needs="glu")
def gate_up_order(subject: Subject) -> Truth:
    """The activation is applied to up instead of gate. Ref: flashinfer-ai/flashinfer#4130"""
    path, mlp = subject.choose(lambda path, _: path.endswith(".mlp"))
    mlp.forward = lambda x: mlp.down_proj(mlp.act_fn(mlp.up_proj(x)) * mlp.gate_proj(x))
    return Truth(module=path, what="act(up) * gate")


@mutant(archs=["bert", *with_traits("prenorm")])
def residual_missing(subject: Subject) -> Truth:
    """A skip connection was left out. Ref: delira-dev/delira#91"""
    if subject.arch == "bert":
        path, output = subject.choose(lambda path, _: path.endswith((".output", ".attention.output")))
        output.forward = lambda hidden_states, input_tensor: output.LayerNorm(output.dense(hidden_states))
        return Truth(module=path, what="LayerNorm(dense(x)) without the input")
    path, layer = subject.choose(is_layer)
    where = subject.draw.choice(("attention", "mlp"))
    _llama_layer(layer, missing=where)
    return Truth(module=path, what=f"no skip around the {where}")


@mutant(needs="prenorm")
def residual_normed(subject: Subject) -> Truth:
    """The skip takes the normed input. Ref: Howuhh/faster-trajectory-transformer#3"""
    path, layer = subject.choose(is_layer)
    where = subject.draw.choice(("attention", "mlp"))
    _llama_layer(layer, normed=where)
    return Truth(module=path, ops=aten("add"), what=f"normed skip around the {where}")


def has_telling_bias(path: str, module: Any) -> bool:
    """Softmax does not see the bias of the keys."""
    is_key = path.endswith((".key", ".k_proj"))
    return is_linear(path, module) and not is_key and module.bias is not None


@mutant(needs="bias")
def bias_dropped(subject: Subject) -> Truth:
    """A projection is computed without its bias. Ref: sbryngelson/ANEForge#253"""
    path, linear = subject.choose(has_telling_bias)
    linear.forward = lambda x: F.linear(x, matrix_of(linear))
    return Truth(module=path, ops=aten("mm", "addmm", "linear", "matmul"), what="no bias")


@mutant(archs=["bert"])
def position_offset(subject: Subject) -> Truth:
    """Positions begin where RoBERTa's would. Ref: sbryngelson/ANEForge#257"""
    path = "embeddings"
    embeddings = subject.target.get_submodule(path)
    right = embeddings.forward

    def forward(**kwargs: Any) -> torch.Tensor:
        return right(**{**kwargs, "position_ids": embeddings.position_ids[:, 2 : SEQ + 2]})

    embeddings.forward = forward
    # The lookup itself is right; zoo 15 names it all the same, so both are accepted.
    return Truth(module=path, what="positions + 2", accept_modules=("embeddings.position_embeddings",))


@mutant(archs=["bert"])
def pooler_token(subject: Subject) -> Truth:
    """The pooler takes the last token instead of the first. Ref: sentence-transformers#3208 (family)"""
    path = "pooler"
    pooler = subject.target.get_submodule(path)
    pooler.forward = lambda hidden_states: pooler.activation(pooler.dense(hidden_states[:, -1]))
    return Truth(module=path, what="last token pooled")


@mutant(needs="dropout")
def dropout_active(subject: Subject) -> Truth:
    """Dropout stays on in inference. Ref: ipolharvard/ethos-ares#20"""
    # Inside fused attention a dropout is but an argument.
    path, dropout = subject.choose(
        lambda path, module: isinstance(module, torch.nn.Dropout) and not path.endswith(_ATTENTION_DROPOUT)
    )
    dropout.p = 0.1
    dropout.train()
    ops = aten("native_dropout", "dropout", "bernoulli", "empty_like", "div", "mul")
    return Truth(module=path, ops=ops, what=f"dropout {dropout.p:g} on")


@mutant(needs="tokens", lacks="encoder_decoder")
def embedding_scale(subject: Subject) -> Truth:
    """Embeddings scaled by sqrt(hidden) in a model that does not. Ref: Blaizzy/mlx-vlm#893 (family)"""
    path, embedding = subject.choose(is_token_embedding)
    right = embedding.forward
    embedding.forward = lambda ids: right(ids) * HIDDEN**0.5
    return Truth(module=path, ops=aten("mul"), what="times sqrt(hidden)")


@mutant(fp32_only=True)
def input_bfloat16(subject: Subject) -> Truth:
    """A projection's input goes through bfloat16. Ref: ml-explore/mlx#3860 (family)"""
    path, linear = subject.choose(is_linear)
    right = linear.forward
    linear.forward = lambda x: right(x.bfloat16().to(x.dtype))
    return Truth(module=path, ops=aten("_to_copy", "mm", "addmm", "linear"), what="input via bfloat16")


def _around_interface(attention: torch.nn.Module, wrap: Any) -> None:
    """Wraps whatever attention function `attention`'s forward looks up, eager or fused."""
    home = home_of(attention)
    functions = modeling_llama.ALL_ATTENTION_FUNCTIONS

    class Wrapped:
        @staticmethod
        def get_interface(name: str, default: Any) -> Any:
            return wrap(functions.get_interface(name, default))

    while_running(attention, home, ALL_ATTENTION_FUNCTIONS=Wrapped)


def _llama_layer(layer: Any, *, missing: str = "", normed: str = "") -> None:
    """LlamaDecoderLayer.forward, written out, with one skip connection changed."""

    def join(
        where: str, before: torch.Tensor, after_norm: torch.Tensor, branch: torch.Tensor
    ) -> torch.Tensor:
        if missing == where:
            return branch
        return (after_norm if normed == where else before) + branch

    def forward(hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        normed_states = layer.input_layernorm(hidden_states)
        attended, _ = layer.self_attn(hidden_states=normed_states, **kwargs)
        hidden_states = join("attention", hidden_states, normed_states, attended)
        normed_states = layer.post_attention_layernorm(hidden_states)
        return join("mlp", hidden_states, normed_states, layer.mlp(normed_states))

    layer.forward = forward
