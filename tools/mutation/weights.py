"""Bugs in the weights: the program is that of the reference, one tensor of the checkpoint is not.

The op to name is the first that reads the weight: a view of it, or the product itself.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .cases import Subject, Truth, aten, mutant, with_traits
from .models import (
    HEADS,
    LINEAR_STD,
    is_attention,
    is_layer,
    is_linear,
    is_norm,
    is_token_embedding,
    matrix_of,
    set_matrix,
)
from .program import has_telling_bias

LINEAR_OPS = aten("t", "mm", "addmm", "linear", "permute", "transpose")
NORM_OPS = aten("mul", "native_layer_norm", "layer_norm")
EMBEDDING_OPS = aten("embedding", "index_select", "index")


@mutant(changes="weights")
def weight_random(subject: Subject) -> Truth:
    """One weight was not in the checkpoint and stays random. Ref: vllm-project/vllm#53019"""
    path, linear = subject.choose(is_linear)
    rows, columns = matrix_of(linear).shape
    set_matrix(linear, LINEAR_STD * subject.draw.randn(rows, columns) / math.sqrt(columns))
    return _linear(path, "weight drawn anew")


@mutant(needs="attention", changes="weights")
def weight_transposed(subject: Subject) -> Truth:
    """A square weight was copied untransposed. Ref: AutoGPTQ/AutoGPTQ#139"""
    path, linear = subject.choose(_is_square)
    set_matrix(linear, matrix_of(linear).t())
    return _linear(path, "weight transposed")


@mutant(changes="weights")
def weight_scaled(subject: Subject) -> Truth:
    """A smoothing scale was left in a weight. Ref: huggingface/transformers#29421"""
    path, linear = subject.choose(is_linear)
    factor = subject.draw.choice((1.05, 1.02, 0.9))
    linear.weight.data = linear.weight.data * factor
    return _linear(path, f"weight times {factor:g}")


@mutant(changes="weights")
def weight_row_zeroed(subject: Subject) -> Truth:
    """One output channel's weights are zero. Ref: microsoft/BitNet#608 (a truncated checkpoint)"""
    path, linear = subject.choose(is_linear)
    row = subject.draw.choice(range(matrix_of(linear).shape[0]))
    linear.weight.data = linear.weight.data.clone()
    matrix_of(linear)[row] = 0
    return _linear(path, f"row {row} zeroed")


@mutant(needs="attention", changes="weights")
def weight_scale_axis(subject: Subject) -> Truth:
    """Codes with a scale per output are decoded with it per input. Ref: microsoft/onnxruntime#28228"""
    path, linear = subject.choose(_is_square)
    weight = matrix_of(linear)
    top = subject.draw.choice((7, 127))
    scale = weight.abs().amax(dim=1) / top  # [out]
    codes = (weight / scale[:, None]).round().clamp(-top - 1, top)
    set_matrix(linear, codes * scale[None, :])
    return _linear(path, f"{'int4' if top == 7 else 'int8'} scale broadcast along the wrong axis")


@mutant(changes="weights")
def weight_of_other_layer(subject: Subject) -> Truth:
    """A key was mapped to another layer's tensor. Ref: arcee-ai/mergekit#143 (family)"""
    layers = [path for path in subject.paths(is_layer) if path.rpartition(".")[2] == "0"]
    first = subject.draw.choice(layers)
    path, linear = subject.choose(
        lambda path, module: is_linear(path, module) and path.startswith(f"{first}.")
    )
    other = subject.target.get_submodule(path.replace(first, f"{first[:-1]}1", 1))
    linear.weight.data = other.weight.data.clone()
    return _linear(path, "weight of layer 1")


@mutant(changes="weights")
def weight_lora_twice(subject: Subject) -> Truth:
    """An adapter was merged twice. Ref: unslothai/unsloth#289"""
    path, linear = subject.choose(is_linear)
    rank = 2
    rows, columns = matrix_of(linear).shape
    update = subject.draw.randn(rows, rank) @ subject.draw.randn(rank, columns)
    set_matrix(linear, matrix_of(linear) + 0.05 * update / math.sqrt(columns))
    return _linear(path, "adapter added once more")


@mutant(changes="weights")
def weight_shard_order(subject: Subject) -> Truth:
    """Tensor-parallel shards were joined in the wrong order. Ref: NVIDIA-NeMo/Automodel#1324"""
    path, linear = subject.choose(is_linear)
    first, second = matrix_of(linear).chunk(2, dim=1)
    set_matrix(linear, torch.cat((second, first), dim=1))
    return _linear(path, "input halves exchanged")


@mutant(needs="rope split_qkv", changes="weights")
def weight_rope_permuted(subject: Subject) -> Truth:
    """The permutation of the rotary halves was forgotten. Ref: nurl-lang/nurl#584, ggml-org/llama.cpp#2376"""
    path, linear = subject.choose(lambda path, _: path.endswith("q_proj"))
    rows, columns = linear.weight.shape
    halves = linear.weight.data.view(HEADS, 2, rows // HEADS // 2, columns)
    linear.weight.data = halves.transpose(1, 2).reshape(rows, columns)
    return _linear(path, "rotary halves interleaved")


@mutant(needs="bias", changes="weights")
def bias_zeroed(subject: Subject) -> Truth:
    """A bias was not loaded. Ref: sbryngelson/ANEForge#253"""
    path, linear = subject.choose(has_telling_bias)
    linear.bias.data = torch.zeros_like(linear.bias.data)
    return Truth(module=path, ops=aten("addmm", "linear", "add"), what="bias zero")


@mutant(changes="weights")
def norm_weight_ones(subject: Subject) -> Truth:
    """A norm's weight was not loaded. Ref: tracel-ai/burn#5023"""
    path, norm = subject.choose(is_norm)
    norm.weight.data = torch.ones_like(norm.weight.data)
    return Truth(module=path, ops=NORM_OPS, what="weight one")


@mutant(changes="weights", archs=["bert", *with_traits("split_qkv", lacks="bucketed")])
def projections_swapped(subject: Subject) -> Truth:
    """Two projections' weights were exchanged. Ref: flashinfer-ai/flashinfer#4130 (packing order)"""
    path, layer = subject.choose(is_attention)
    names = ("query", "key", "value") if subject.arch == "bert" else ("q_proj", "k_proj", "v_proj")
    sizes = {name: layer.get_submodule(name).weight.shape for name in names}
    first, second = subject.draw.choice(
        [(a, b) for a in names for b in names if a < b and sizes[a] == sizes[b]]
    )
    one, other = layer.get_submodule(first), layer.get_submodule(second)
    one.weight.data, other.weight.data = other.weight.data, one.weight.data
    return Truth(
        module=f"{path}.{first}",
        ops=LINEAR_OPS,
        what=f"{first} and {second} exchanged",
        accept_modules=(f"{path}.{second}",),
    )


@mutant(needs="attention", lacks="encoder_decoder window", changes="weights")
def layers_swapped(subject: Subject) -> Truth:
    """Two layers were loaded in each other's place. Ref: arcee-ai/mergekit#143"""
    first, second = subject.draw.choice(((0, 1), (1, 2), (0, 2)))
    paths = subject.paths(is_layer)
    _exchange(subject.target.get_submodule(paths[first]), subject.target.get_submodule(paths[second]))
    layer = subject.target.get_submodule(paths[first])
    # Every weight of the first layer is wrong; the order in which they are read is the model's affair.
    owners = [
        f"{paths[first]}.{name}"
        for name, module in layer.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    ]
    return Truth(
        module=owners[0],
        ops=LINEAR_OPS + NORM_OPS,
        what=f"layers {first} and {second} exchanged",
        accept_modules=(paths[first], *owners),
    )


@mutant(needs="moe", changes="weights")
def experts_swapped(subject: Subject) -> Truth:
    """Two experts were loaded in each other's place. Ref: arcee-ai/mergekit#143 (family)"""
    path, experts = subject.choose(lambda path, _: path.endswith("mlp.experts"))
    order = [1, 0, *range(2, experts.num_experts)]
    experts.down_proj.data = experts.down_proj.data[order]
    return Truth(
        module=path, ops=(*LINEAR_OPS, *aten("select", "index")), what="down_proj of experts 0 and 1"
    )


@mutant(needs="state_space", changes="weights")
def decay_not_logged(subject: Subject) -> Truth:
    """The decay was converted without its logarithm, as when two codes store it differently."""
    path, mixer = subject.choose(lambda path, _: path.endswith(".mixer"))
    mixer.A_log.data = mixer.A_log.data.exp() / 4
    return Truth(module=path, ops=aten("exp"), what="A in place of log A")


@mutant(needs="conv", lacks="state_space", changes="weights")
def kernel_axes_swapped(subject: Subject) -> Truth:
    """A convolution's kernel was converted with its axes in the wrong order. Ref: Blaizzy/mlx-vlm#1871"""
    path, conv = subject.choose(lambda _, module: isinstance(module, torch.nn.Conv1d | torch.nn.Conv2d))
    weight = conv.weight.data
    conv.weight.data = weight.transpose(-1, -2).contiguous() if weight.ndim == 4 else weight.flip(-1)
    return Truth(module=path, ops=aten("convolution", "unsqueeze"), what="kernel transposed or flipped")


@mutant(needs="tokens", lacks="encoder_decoder", changes="weights")
def embedding_shifted(subject: Subject) -> Truth:
    """The embedding table is off by one token. Ref: pytorch/text#1840"""
    path, embedding = _token_embedding(subject)
    embedding.weight.data = embedding.weight.data.roll(1, dims=0)
    return Truth(module=path, ops=EMBEDDING_OPS, what="rows shifted by one")


@mutant(needs="tokens", lacks="encoder_decoder", changes="weights")
def embedding_row(subject: Subject) -> Truth:
    """One token has another token's embedding. Ref: MinishLab/model2vec#335 (family)"""
    path, embedding = _token_embedding(subject)
    token = subject.draw.choice(subject.inputs["input_ids"][0].tolist())
    embedding.weight.data[token] = embedding.weight.data[token - 1]
    return Truth(module=path, ops=EMBEDDING_OPS, what=f"token {token} embedded as {token - 1}")


def _is_square(path: str, module: Any) -> bool:
    return is_linear(path, module) and matrix_of(module).shape[0] == matrix_of(module).shape[1]


def _linear(path: str, what: str) -> Truth:
    return Truth(module=path, ops=LINEAR_OPS, what=what)


def _token_embedding(subject: Subject) -> tuple[str, Any]:
    return subject.choose(is_token_embedding)


def _exchange(first: torch.nn.Module, second: torch.nn.Module) -> None:
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        one.data, other.data = other.data, one.data
