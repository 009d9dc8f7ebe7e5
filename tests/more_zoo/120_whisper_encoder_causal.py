"""The encoder attends causally: is_causal is left as for a decoder. Ref: OpenNMT/CTranslate2#2083"""

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration


def _mk():
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=8,
        max_source_positions=12,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        use_cache=False,
        init_std=0.2,
    )
    return WhisperForConditionalGeneration(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    for layer in model.model.encoder.layers:
        layer.self_attn.is_causal = True
    return model


def inputs():
    torch.manual_seed(1)
    return torch.randn(1, 8, 24), None, torch.randint(3, 64, (1, 5))


EXPECT = {
    "where": {
        "module": "model.encoder.layers.0.self_attn",
        "op": "aten._scaled_dot_product_flash_attention_for_cpu.default",
    },
    "kind": "argument",
    "note": "one flag of one fused op; the last frame agrees in the first layer",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
