"""The models that bugs are planted in: transformers' own, from small configs.

Random initialisation is not used as it is: with weights of size 0.02 every attention is uniform, every bias
zero and every norm weight one, and half of all bugs would change nothing. Weights here have the sizes
that a trained model's have.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from transformers.pytorch_utils import Conv1D

from .cases import ARCHS, TRAITS, Draw, Inputs

HIDDEN, LAYERS, HEADS, KV_HEADS, SEQ, BATCH, VOCAB = 64, 3, 4, 2, 12, 2, 97
WIDE, MAX_POSITIONS, HEAD_DIM = 112, 64, HIDDEN // HEADS
MELS, FRAMES, PIXELS, PATCH = 8, 24, 16, 4
LINEAR_STD, BIAS_STD, NORM_STD, EMBEDDING_STD, ROW_STD = 1.0, 0.2, 0.25, 0.7, 0.4

Build = Callable[[Draw, str], tuple[torch.nn.Module, Inputs]]

_ATTENTION = re.compile(
    r"(.*\.)?(self_attn|encoder_attn|attention\.self|attn|SelfAttention|EncDecAttention)|(.*\.)?layers\.\d+\.attention"
)
_LAYER = re.compile(r"(.*\.)?(layers|layer|h|block)\.\d+")
_ACTIVATION = re.compile(r"(.*\.)?(act_fn|act|activation_fn|intermediate_act_fn)")
_EMBEDDING = re.compile(r"(.*\.)?(embed_tokens|word_embeddings|embed_in|wte|shared|embeddings)")


def architecture(name: str, traits: str) -> Callable[[Build], Build]:
    """Registers an architecture.

    Args:
      traits: what its model has, in words that `mutant(needs=...)` asks for; "other" for one that no kind
        takes unless it asks for that, and no draw unless it is named.
    """

    def register(build: Build) -> Build:
        ARCHS[name] = build
        TRAITS[name] = frozenset(traits.split())
        return build

    return register


@architecture("llama", "rms rope gqa glu causal split_qkv prenorm attention tokens")
def build_llama(draw: Draw, attention: str) -> tuple[torch.nn.Module, Inputs]:
    """Llama with grouped key/value heads; the second row of the batch is padded, or nothing is."""
    config = hf.LlamaConfig(**_decoder(attention), num_key_value_heads=KV_HEADS)
    return _trained(hf.LlamaForCausalLM(config), draw), _text(draw)


@architecture("bert", "layernorm bias absolute postnorm padded pooler dropout attention tokens")
def build_bert(draw: Draw, attention: str) -> tuple[torch.nn.Module, Inputs]:
    """BERT with pooler; the second row of the batch is padded."""
    config = hf.BertConfig(**{**_decoder(attention), "max_position_embeddings": 32})
    model = _trained(hf.BertModel(config), draw)
    return model, padded_text(draw)


@architecture("qwen", "rms rope gqa glu causal split_qkv prenorm qk_norm attention tokens")
def build_qwen(draw: Draw, attention: str) -> tuple[torch.nn.Module, Inputs]:
    """Qwen3: Llama with norms on the heads of queries and keys."""
    config = hf.Qwen3Config(**_decoder(attention), num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM)
    return _trained(hf.Qwen3ForCausalLM(config), draw), _text(draw)


@architecture("gemma", "rms_plus_one rope gqa glu causal split_qkv softcap window attention tokens")
def build_gemma(draw: Draw, attention: str) -> tuple[torch.nn.Module, Inputs]:
    """Gemma2: norms of 1 + weight around each branch, scaled embeddings, softcaps, local layers."""
    config = hf.Gemma2Config(
        **_decoder("eager"),  # fused attention has no softcap
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        query_pre_attn_scalar=HEAD_DIM,
        sliding_window=SEQ // 2,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    )
    return _trained(hf.Gemma2ForCausalLM(config), draw), _text(draw)


@architecture("mixtral", "rms rope gqa causal split_qkv prenorm moe attention tokens")
def build_mixtral(draw: Draw, attention: str) -> tuple[torch.nn.Module, Inputs]:
    """Mixtral: two of four experts for each token."""
    config = hf.MixtralConfig(
        **_decoder(attention), num_key_value_heads=KV_HEADS, num_local_experts=4, num_experts_per_tok=2
    )
    config._experts_implementation = "eager"  # the grouped kernel refuses float64, in which noise is measured
    return _trained(hf.MixtralForCausalLM(config), draw), _text(draw)


@architecture("phi", "rms rope gqa causal prenorm attention tokens")
def build_phi(draw: Draw, attention: str) -> tuple[torch.nn.Module, Inputs]:
    """Phi3: one projection for queries, keys and values, one for gate and up."""
    config = hf.Phi3Config(**_decoder(attention), num_key_value_heads=KV_HEADS)
    return _trained(hf.Phi3ForCausalLM(config), draw), _text(draw)


@architecture("neox", "layernorm rope bias causal dropout attention tokens")
def build_neox(draw: Draw, attention: str) -> tuple[torch.nn.Module, Inputs]:
    """GPT-NeoX: attention and MLP side by side, a part of each head rotated, packed projections."""
    config = hf.GPTNeoXConfig(**_decoder(attention), rotary_pct=0.5)
    return _trained(hf.GPTNeoXForCausalLM(config), draw), _text(draw)


@architecture("gpt2", "layernorm bias absolute causal dropout attention tokens")
def build_gpt2(draw: Draw, attention: str) -> tuple[torch.nn.Module, Inputs]:
    """GPT-2: projections are Conv1D, whose weight is [in, out]."""
    config = hf.GPT2Config(
        vocab_size=VOCAB,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=MAX_POSITIONS,
        tie_word_embeddings=False,
        attn_implementation=attention,
    )
    return _trained(hf.GPT2LMHeadModel(config), draw), _text(draw)


@architecture("t5", "rms bucketed split_qkv encoder_decoder padded dropout attention tokens")
def build_t5(draw: Draw, attention: str) -> tuple[torch.nn.Module, Inputs]:
    """T5 with gated MLPs: relative position biases, an encoder and a decoder."""
    config = hf.T5Config(
        vocab_size=VOCAB,
        d_model=HIDDEN,
        d_kv=HEAD_DIM,
        d_ff=WIDE,
        num_layers=2,
        num_heads=HEADS,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        attn_implementation=attention,
    )
    model = _trained(hf.T5ForConditionalGeneration(config), draw)
    with torch.no_grad():
        for path, module in model.named_modules():  # scores are not scaled, the checkpoint's queries are
            if path.endswith("Attention.q"):
                module.weight.mul_(HEAD_DIM**-0.5)
    return model, {
        "input_ids": _tokens(draw),
        "attention_mask": _padding(),
        "decoder_input_ids": _tokens(draw),
    }


@architecture("whisper", "layernorm bias absolute split_qkv encoder_decoder conv attention")
def build_whisper(draw: Draw, attention: str) -> tuple[torch.nn.Module, Inputs]:
    """Whisper: convolutions before the encoder, a decoder that attends to it."""
    config = hf.WhisperConfig(
        vocab_size=VOCAB,
        d_model=HIDDEN,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=WIDE,
        decoder_ffn_dim=WIDE,
        num_mel_bins=MELS,
        max_source_positions=FRAMES // 2,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        attn_implementation=attention,
    )
    model = _trained(hf.WhisperForConditionalGeneration(config), draw)
    return model, {"input_features": draw.randn(BATCH, MELS, FRAMES), "decoder_input_ids": _tokens(draw)}


@architecture("vit", "layernorm bias split_qkv conv pooler dropout attention")
def build_vit(draw: Draw, attention: str) -> tuple[torch.nn.Module, Inputs]:
    """ViT with pooler."""
    config = hf.ViTConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=WIDE,
        image_size=PIXELS,
        patch_size=PATCH,
        attn_implementation=attention,
    )
    model = _trained(hf.ViTModel(config), draw)
    return model, {"pixel_values": draw.randn(BATCH, 3, PIXELS, PIXELS)}


@architecture("mamba", "rms state_space conv tokens")
def build_mamba(draw: Draw, attention: str) -> tuple[torch.nn.Module, Inputs]:
    """Mamba: a selective state space scanned token by token."""
    config = hf.MambaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN // 2,
        state_size=8,
        num_hidden_layers=2,
        tie_word_embeddings=False,
    )
    return _trained(hf.MambaForCausalLM(config), draw), {"input_ids": _tokens(draw), "use_cache": False}


def is_linear(path: str, module: torch.nn.Module) -> bool:
    """A projection that is a module of its own and is called."""
    return isinstance(module, torch.nn.Linear | Conv1D) and not path.endswith("dt_proj")


def matrix_of(linear: Any) -> torch.Tensor:
    """Its weight, [out, in] whatever the module's own layout; a view."""
    weight: torch.Tensor = linear.weight.data
    return weight.t() if isinstance(linear, Conv1D) else weight


def set_matrix(linear: Any, matrix: torch.Tensor) -> None:
    """Gives a projection another weight, [out, in]."""
    linear.weight.data = (matrix.t() if isinstance(linear, Conv1D) else matrix).contiguous()


def is_norm(path: str, module: torch.nn.Module) -> bool:
    return type(module).__name__.endswith(("RMSNorm", "LayerNorm"))


def is_attention(path: str, module: torch.nn.Module) -> bool:
    """The module whose forward computes the attention itself."""
    return _ATTENTION.fullmatch(path) is not None


def is_layer(path: str, module: torch.nn.Module) -> bool:
    """A whole layer of the stack (T5 has layers within its blocks, which are not meant)."""
    return _LAYER.fullmatch(path) is not None and not re.search(r"block\.\d+\.layer", path)


def is_activation(path: str, module: torch.nn.Module) -> bool:
    return _ACTIVATION.fullmatch(path) is not None and next(module.parameters(), None) is None


def is_token_embedding(path: str, module: torch.nn.Module) -> bool:
    return _EMBEDDING.fullmatch(path) is not None and isinstance(module, torch.nn.Embedding)


def eps_name(norm: torch.nn.Module) -> str:
    """What a norm calls its epsilon."""
    return "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps"


def home_of(module: torch.nn.Module) -> str:
    """The Python module that defines its class, whose globals its forward reads."""
    return type(module).__module__


def _decoder(attention: str) -> dict[str, Any]:
    return {**text_config(HIDDEN, WIDE, LAYERS, HEADS), "attn_implementation": attention}


def text_config(hidden: int, wide: int, layers: int, heads: int) -> dict[str, Any]:
    """What the configs of text models share."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": MAX_POSITIONS,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }


def plain_text(draw: Draw) -> Inputs:
    """Tokens of which none is padding."""
    return {"input_ids": _tokens(draw)}


def padded_text(draw: Draw) -> Inputs:
    """Tokens of which the second row's last are padding."""
    return {"input_ids": _tokens(draw), "attention_mask": _padding()}


def _text(draw: Draw) -> Inputs:
    inputs = plain_text(draw)
    if draw.choice((True, False)):
        inputs["attention_mask"] = _padding()
    return inputs


def _tokens(draw: Draw) -> torch.Tensor:
    return torch.randint(3, VOCAB, (BATCH, SEQ), generator=draw.generator)


def _padding() -> torch.Tensor:
    mask = torch.ones(BATCH, SEQ, dtype=torch.long)
    mask[1, SEQ - 3 :] = 0
    return mask


def _trained(model: Any, draw: Draw) -> torch.nn.Module:
    with torch.no_grad():
        for path, module in model.named_modules():
            if is_linear(path, module):
                rows, columns = matrix_of(module).shape
                row_scale = torch.exp(ROW_STD * draw.randn(rows, 1))
                set_matrix(module, LINEAR_STD * row_scale * draw.randn(rows, columns) / math.sqrt(columns))
                if module.bias is not None:
                    module.bias.copy_(BIAS_STD * draw.randn(rows))
            elif isinstance(module, torch.nn.Embedding):
                module.weight.copy_(EMBEDDING_STD * draw.randn(*module.weight.shape))
            elif is_norm(path, module):
                centre = 0.0 if type(module).__name__.startswith("Gemma") else 1.0
                module.weight.copy_(centre + NORM_STD * draw.randn(*module.weight.shape))
                if getattr(module, "bias", None) is not None:
                    module.bias.copy_(BIAS_STD * draw.randn(*module.bias.shape))
            elif path.endswith((".gate", ".experts", "embeddings")):
                for parameter in module.parameters(recurse=False):
                    parameter.copy_(
                        LINEAR_STD * draw.randn(*parameter.shape) / math.sqrt(parameter.shape[-1])
                    )
            elif isinstance(module, torch.nn.Conv1d | torch.nn.Conv2d):
                fan_in = module.weight[0].numel()
                module.weight.copy_(draw.randn(*module.weight.shape) / math.sqrt(fan_in))
                if module.bias is not None:
                    module.bias.copy_(BIAS_STD * draw.randn(*module.bias.shape))
    return model.eval()
