"""Bugs in the weights: the program is that of the reference, one tensor of the checkpoint is not.

The op to name is the first that reads the weight: a view of it, or the product itself.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .cases import Subject, Truth, aten, mutant
from .models import HEADS, LINEAR_STD, is_layer, is_linear, is_norm

LINEAR_OPS = aten("t", "mm", "addmm", "linear", "permute", "transpose")
NORM_OPS = aten("mul", "native_layer_norm", "layer_norm")
EMBEDDING_OPS = aten("embedding", "index_select", "index")


@mutant(changes="weights")
def weight_random(subject: Subject) -> Truth:
    """One weight was not in the checkpoint and stays random. Ref: vllm-project/vllm#53019"""
    path, linear = subject.choose(is_linear)
    linear.weight.data = LINEAR_STD * subject.draw.randn(*linear.weight.shape) / math.sqrt(linear.in_features)
    return _linear(path, "weight drawn anew")


@mutant(changes="weights")
def weight_transposed(subject: Subject) -> Truth:
    """A square weight was copied untransposed. Ref: AutoGPTQ/AutoGPTQ#139"""
    path, linear = subject.choose(_is_square)
    linear.weight.data = linear.weight.data.t().contiguous()
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
    row = subject.draw.choice(range(linear.out_features))
    linear.weight.data[row] = 0
    return _linear(path, f"row {row} zeroed")


@mutant(changes="weights")
def weight_scale_axis(subject: Subject) -> Truth:
    """Codes with a scale per output are decoded with it per input. Ref: microsoft/onnxruntime#28228"""
    path, linear = subject.choose(_is_square)
    weight = linear.weight.data
    top = subject.draw.choice((7, 127))
    scale = weight.abs().amax(dim=1) / top  # [out]
    codes = (weight / scale[:, None]).round().clamp(-top - 1, top)
    linear.weight.data = codes * scale[None, :]
    return _linear(path, f"{'int4' if top == 7 else 'int8'} scale broadcast along the wrong axis")


@mutant(changes="weights")
def weight_of_other_layer(subject: Subject) -> Truth:
    """A key was mapped to another layer's tensor. Ref: arcee-ai/mergekit#143 (family)"""
    path, linear = subject.choose(lambda path, module: is_linear(path, module) and ".0." in path)
    other = subject.target.get_submodule(path.replace(".0.", ".2."))
    linear.weight.data = other.weight.data.clone()
    return _linear(path, "weight of layer 2")


@mutant(changes="weights")
def weight_lora_twice(subject: Subject) -> Truth:
    """An adapter was merged twice. Ref: unslothai/unsloth#289"""
    path, linear = subject.choose(is_linear)
    rank = 2
    update = subject.draw.randn(linear.out_features, rank) @ subject.draw.randn(rank, linear.in_features)
    linear.weight.data = linear.weight.data + 0.05 * update / math.sqrt(linear.in_features)
    return _linear(path, "adapter added once more")


@mutant(changes="weights")
def weight_shard_order(subject: Subject) -> Truth:
    """Tensor-parallel shards were joined in the wrong order. Ref: NVIDIA-NeMo/Automodel#1324"""
    path, linear = subject.choose(is_linear)
    first, second = linear.weight.data.chunk(2, dim=1)
    linear.weight.data = torch.cat((second, first), dim=1)
    return _linear(path, "input halves exchanged")


@mutant(archs=["llama"], changes="weights")
def weight_rope_permuted(subject: Subject) -> Truth:
    """The permutation of the rotary halves was forgotten. Ref: nurl-lang/nurl#584, ggml-org/llama.cpp#2376"""
    path, linear = subject.choose(lambda path, _: path.endswith("q_proj"))
    rows, columns = linear.weight.shape
    halves = linear.weight.data.view(HEADS, 2, rows // HEADS // 2, columns)
    linear.weight.data = halves.transpose(1, 2).reshape(rows, columns)
    return _linear(path, "rotary halves interleaved")


@mutant(archs=["bert"], changes="weights")
def bias_zeroed(subject: Subject) -> Truth:
    """A bias was not loaded. Ref: sbryngelson/ANEForge#253"""
    # Softmax does not see the bias of the keys.
    path, linear = subject.choose(lambda path, module: is_linear(path, module) and "key" not in path)
    linear.bias.data = torch.zeros_like(linear.bias.data)
    return Truth(module=path, ops=aten("addmm", "linear", "add"), what="bias zero")


@mutant(changes="weights")
def norm_weight_ones(subject: Subject) -> Truth:
    """A norm's weight was not loaded. Ref: tracel-ai/burn#5023"""
    path, norm = subject.choose(is_norm)
    norm.weight.data = torch.ones_like(norm.weight.data)
    return Truth(module=path, ops=NORM_OPS, what="weight one")


@mutant(changes="weights")
def projections_swapped(subject: Subject) -> Truth:
    """Two projections' weights were exchanged. Ref: flashinfer-ai/flashinfer#4130 (packing order)"""
    path, layer = subject.choose(is_layer)
    pairs = (
        (("mlp.gate_proj", "mlp.up_proj"), ("self_attn.k_proj", "self_attn.v_proj"))
        if subject.arch == "llama"
        else (("attention.self.query", "attention.self.key"), ("attention.self.key", "attention.self.value"))
    )
    first, second = subject.draw.choice(pairs)
    _exchange(layer.get_submodule(first), layer.get_submodule(second))
    return Truth(
        module=f"{path}.{first}",
        ops=LINEAR_OPS,
        what=f"{first} and {second} exchanged",
        accept_modules=(f"{path}.{second}",),
    )


@mutant(changes="weights")
def layers_swapped(subject: Subject) -> Truth:
    """Two layers were loaded in each other's place. Ref: arcee-ai/mergekit#143"""
    first, second = subject.draw.choice(((0, 1), (1, 2), (0, 2)))
    paths = subject.paths(is_layer)
    _exchange(subject.target.get_submodule(paths[first]), subject.target.get_submodule(paths[second]))
    layer = subject.target.get_submodule(paths[first])
    # Every weight of the first layer is wrong; the first to be read comes first in the truth.
    owners = [
        f"{paths[first]}.{name}"
        for name, module in layer.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    ]
    reads = "input_layernorm" if subject.arch == "llama" else "attention.self.query"
    return Truth(
        module=f"{paths[first]}.{reads}",
        ops=LINEAR_OPS + NORM_OPS,
        what=f"layers {first} and {second} exchanged",
        accept_modules=(paths[first], *owners),
    )


@mutant(changes="weights")
def embedding_shifted(subject: Subject) -> Truth:
    """The embedding table is off by one token. Ref: pytorch/text#1840"""
    path, embedding = _token_embedding(subject)
    embedding.weight.data = embedding.weight.data.roll(1, dims=0)
    return Truth(module=path, ops=EMBEDDING_OPS, what="rows shifted by one")


@mutant(changes="weights")
def embedding_row(subject: Subject) -> Truth:
    """One token has another token's embedding. Ref: MinishLab/model2vec#335 (family)"""
    path, embedding = _token_embedding(subject)
    token = subject.draw.choice(subject.inputs["input_ids"][0].tolist())
    embedding.weight.data[token] = embedding.weight.data[token - 1]
    return Truth(module=path, ops=EMBEDDING_OPS, what=f"token {token} embedded as {token - 1}")


def _is_square(path: str, module: Any) -> bool:
    return is_linear(path, module) and module.in_features == module.out_features


def _linear(path: str, what: str) -> Truth:
    return Truth(module=path, ops=LINEAR_OPS, what=what)


def _token_embedding(subject: Subject) -> tuple[str, Any]:
    return subject.choose(lambda path, _: path.endswith(("embed_tokens", "word_embeddings")))


def _exchange(first: torch.nn.Module, second: torch.nn.Module) -> None:
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        one.data, other.data = other.data, one.data
