"""Models that differ most from those of `models`: where a rule of the judges may have learnt those by heart.

They take part where they are named (`--arch falcon`), in the kinds of `anywhere` alone, which need no place
of a given name: so what is drawn of the others stays what it is.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import transformers as hf
from transformers.pytorch_utils import Conv1D

from .cases import Draw, Inputs
from .models import (
    BATCH,
    BIAS_STD,
    EMBEDDING_STD,
    MAX_POSITIONS,
    NORM_STD,
    ROW_STD,
    VOCAB,
    architecture,
    padded_text,
    plain_text,
    text_config,
)

HIDDEN, HEADS, WIDE, LAYERS = 32, 4, 48, 2
_SMALL = text_config(HIDDEN, WIDE, LAYERS, HEADS)

Built = tuple[torch.nn.Module, Inputs]


@architecture("gpt_oss", "other")
def build_gpt_oss(draw: Draw, attention: str) -> Built:
    """GPT-OSS: experts in stacks with biases, sinks in the softmax, every other layer local."""
    config = hf.GptOssConfig(
        **_SMALL,
        head_dim=HIDDEN // HEADS,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=6,
        attn_implementation="eager",
    )
    config._experts_implementation = "eager"
    return _spread(hf.GptOssForCausalLM(config), draw), plain_text(draw)


@architecture("deepseek", "other")
def build_deepseek(draw: Draw, attention: str) -> Built:
    """DeepSeek-V3: keys and values from a latent, a part of the keys rotated, shared experts, groups."""
    config = hf.DeepseekV3Config(
        **_SMALL,
        num_key_value_heads=HEADS,
        moe_intermediate_size=24,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        attn_implementation=attention,
    )
    config._experts_implementation = "eager"
    return _spread(hf.DeepseekV3ForCausalLM(config), draw), plain_text(draw)


@architecture("falcon", "other")
def build_falcon(draw: Draw, attention: str) -> Built:
    """Falcon with ALiBi: one head of keys and values, attention and MLP side by side."""
    given = {name: value for name, value in _SMALL.items() if name != "intermediate_size"}
    config = hf.FalconConfig(**given, ffn_hidden_size=WIDE, alibi=True, attn_implementation=attention)
    return _spread(hf.FalconForCausalLM(config), draw), padded_text(draw)


@architecture("bloom", "other")
def build_bloom(draw: Draw, attention: str) -> Built:
    """BLOOM: biases by distance, queries, keys and values packed by head, one product with an addend."""
    config = hf.BloomConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, n_layer=LAYERS, n_head=HEADS, tie_word_embeddings=False
    )
    return _spread(hf.BloomForCausalLM(config), draw), padded_text(draw)


@architecture("albert", "other")
def build_albert(draw: Draw, attention: str) -> Built:
    """ALBERT: one layer that is called again and again."""
    config = hf.AlbertConfig(**_SMALL, embedding_size=16, attn_implementation=attention)
    return _spread(hf.AlbertModel(config), draw), padded_text(draw)


@architecture("deberta", "other")
def build_deberta(draw: Draw, attention: str) -> Built:
    """DeBERTa-v2: content and positions attend to each other, by gathers."""
    config = hf.DebertaV2Config(
        **_SMALL,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=8,
        max_relative_positions=16,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        position_biased_input=False,
    )
    return _spread(hf.DebertaV2Model(config), draw), padded_text(draw)


@architecture("longt5", "other")
def build_longt5(draw: Draw, attention: str) -> Built:
    """LongT5: attention within blocks, masked by -1e10."""
    config = hf.LongT5Config(
        vocab_size=VOCAB,
        d_model=HIDDEN,
        d_kv=HIDDEN // HEADS,
        d_ff=WIDE,
        num_layers=LAYERS,
        num_decoder_layers=LAYERS,
        num_heads=HEADS,
        local_radius=3,
        tie_word_embeddings=False,
    )
    return _translating(hf.LongT5ForConditionalGeneration(config), draw)


@architecture("bart", "other")
def build_bart(draw: Draw, attention: str) -> Built:
    """BART: encoder and decoder with learned positions and norms behind the sums."""
    config = hf.BartConfig(
        vocab_size=VOCAB,
        d_model=HIDDEN,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=WIDE,
        decoder_ffn_dim=WIDE,
        max_position_embeddings=MAX_POSITIONS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        tie_word_embeddings=False,
        attn_implementation=attention,
    )
    return _translating(hf.BartForConditionalGeneration(config), draw)


@architecture("recurrent_gemma", "other")
def build_recurrent_gemma(draw: Draw, attention: str) -> Built:
    """RecurrentGemma: a gated linear recurrence in two layers of three, local attention in the third."""
    given = {**_SMALL, "num_hidden_layers": 3}
    del given["max_position_embeddings"]
    config = hf.RecurrentGemmaConfig(
        **given, num_key_value_heads=1, head_dim=HIDDEN // HEADS, lru_width=HIDDEN, attention_window_size=6
    )
    return _spread(hf.RecurrentGemmaForCausalLM(config), draw), {**plain_text(draw), "use_cache": False}


@architecture("rwkv", "other")
def build_rwkv(draw: Draw, attention: str) -> Built:
    """RWKV: no attention; a state that decays from token to token."""
    config = hf.RwkvConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        attention_hidden_size=HIDDEN,
        intermediate_size=WIDE,
        num_hidden_layers=LAYERS,
        context_length=MAX_POSITIONS,
    )
    return _spread(hf.RwkvForCausalLM(config), draw), {**plain_text(draw), "use_cache": False}


@architecture("swin", "other")
def build_swin(draw: Draw, attention: str) -> Built:
    """Swin: attention in windows that shift, patches merged between the stages."""
    config = hf.SwinConfig(
        image_size=16, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4
    )
    model = _spread(hf.SwinModel(config), draw)
    return model, {"pixel_values": draw.randn(BATCH, 3, 16, 16)}


@architecture("wav2vec2", "other")
def build_wav2vec2(draw: Draw, attention: str) -> Built:
    """Wav2Vec2: strided convolutions over samples, a norm by groups, positions by a convolution."""
    config = hf.Wav2Vec2Config(
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=WIDE,
        conv_dim=[16, 16],
        conv_stride=[5, 2],
        conv_kernel=[10, 3],
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        attn_implementation=attention,
    )
    return _spread(hf.Wav2Vec2Model(config), draw), {"input_values": draw.randn(BATCH, 400)}


@architecture("convnext", "other")
def build_convnext(draw: Draw, attention: str) -> Built:
    """ConvNeXt: depthwise convolutions, norms over channels, a scale for each branch."""
    config = hf.ConvNextConfig(
        image_size=32, patch_size=4, hidden_sizes=[16, 24, 32, 40], depths=[1, 1, 2, 1]
    )
    model = _spread(hf.ConvNextModel(config), draw)
    return model, {"pixel_values": draw.randn(BATCH, 3, 32, 32)}


def _translating(model: Any, draw: Draw) -> Built:
    inputs = padded_text(draw)
    return _spread(model, draw), {**inputs, "decoder_input_ids": plain_text(draw)["input_ids"]}


def _spread(model: Any, draw: Draw) -> torch.nn.Module:
    """Gives weights the sizes of trained ones, by their shapes and by what they begin as."""
    with torch.no_grad():
        for module in model.modules():
            for name, weight in module.named_parameters(recurse=False):
                if isinstance(module, torch.nn.Embedding):
                    weight.copy_(EMBEDDING_STD * draw.randn(*weight.shape))
                elif name == "weight" and isinstance(
                    module, torch.nn.Linear | torch.nn.Conv1d | Conv1D | torch.nn.Conv2d
                ):
                    out = int(isinstance(module, Conv1D))
                    row = torch.exp(
                        ROW_STD * draw.randn(*[n if dim == out else 1 for dim, n in enumerate(weight.shape)])
                    )
                    fan_in = weight.numel() // weight.shape[out]
                    weight.copy_(row * draw.randn(*weight.shape) / math.sqrt(fan_in))
                elif weight.ndim > 1 and 0 < weight.std() < 0.05:
                    weight.copy_(draw.randn(*weight.shape) / math.sqrt(weight.shape[-1]))
                elif weight.ndim == 1 and name == "weight" and bool((weight == 1).all()):
                    weight.copy_(1.0 + NORM_STD * draw.randn(*weight.shape))
                elif weight.ndim < 3 and bool((weight == 0).all()):
                    weight.copy_(BIAS_STD * draw.randn(*weight.shape))
    return model.eval()
