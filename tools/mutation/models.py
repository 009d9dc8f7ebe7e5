"""The models that bugs are planted in: transformers' own, from small configs.

Random initialisation is not used as it is: with weights of size 0.02 every attention is uniform, every bias
zero and every norm weight one, and half of all bugs would change nothing. Weights here have the sizes
that a trained model's have.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from .cases import ARCHS, Draw, Inputs

HIDDEN, LAYERS, HEADS, KV_HEADS, SEQ, BATCH, VOCAB = 64, 3, 4, 2, 12, 2, 97
LINEAR_STD, BIAS_STD, NORM_STD, EMBEDDING_STD, ROW_STD = 1.0, 0.2, 0.25, 0.7, 0.4


def build_llama(draw: Draw, attention: str) -> tuple[torch.nn.Module, Inputs]:
    """Llama with grouped key/value heads; the second row of the batch is padded, or nothing is."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=112,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        attn_implementation=attention,
    )
    model = _trained(LlamaForCausalLM(config), draw)
    inputs: Inputs = {"input_ids": _tokens(draw)}
    if draw.choice((True, False)):
        inputs["attention_mask"] = _padding()
    return model, inputs


def build_bert(draw: Draw, attention: str) -> tuple[torch.nn.Module, Inputs]:
    """BERT with pooler; the second row of the batch is padded."""
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=112,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=32,
        attn_implementation=attention,
    )
    model = _trained(BertModel(config), draw)
    return model, {"input_ids": _tokens(draw), "attention_mask": _padding()}


ARCHS["llama"] = build_llama
ARCHS["bert"] = build_bert


def is_linear(path: str, module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear)


def is_norm(path: str, module: torch.nn.Module) -> bool:
    return type(module).__name__.endswith(("RMSNorm", "LayerNorm"))


def is_attention(path: str, module: torch.nn.Module) -> bool:
    """The module whose forward computes the attention itself."""
    return path.endswith((".self_attn", ".attention.self"))


def is_layer(path: str, module: torch.nn.Module) -> bool:
    return path.rpartition(".")[0].endswith(("layers", "encoder.layer"))


def home_of(module: torch.nn.Module) -> str:
    """The Python module that defines its class, whose globals its forward reads."""
    return type(module).__module__


def _tokens(draw: Draw) -> torch.Tensor:
    return torch.randint(1, VOCAB, (BATCH, SEQ), generator=draw.generator)


def _padding() -> torch.Tensor:
    mask = torch.ones(BATCH, SEQ, dtype=torch.long)
    mask[1, SEQ - 3 :] = 0
    return mask


def _trained(model: Any, draw: Draw) -> torch.nn.Module:
    with torch.no_grad():
        for path, module in model.named_modules():
            if is_linear(path, module):
                rows, columns = module.weight.shape
                row_scale = torch.exp(ROW_STD * draw.randn(rows, 1))
                module.weight.copy_(LINEAR_STD * row_scale * draw.randn(rows, columns) / math.sqrt(columns))
                if module.bias is not None:
                    module.bias.copy_(BIAS_STD * draw.randn(rows))
            elif isinstance(module, torch.nn.Embedding):
                module.weight.copy_(EMBEDDING_STD * draw.randn(*module.weight.shape))
            elif is_norm(path, module):
                module.weight.copy_(1 + NORM_STD * draw.randn(HIDDEN))
                if getattr(module, "bias", None) is not None:
                    module.bias.copy_(BIAS_STD * draw.randn(HIDDEN))
    return model.eval()
