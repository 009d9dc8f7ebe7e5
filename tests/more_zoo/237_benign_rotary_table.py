"""Cosines and sines are looked up in tables made ahead. Ref: huggingface/transformers#45748, vllm-project/vllm-omni#5503"""

import torch
from transformers import StableLmConfig, StableLmForCausalLM


def _mk():
    torch.manual_seed(0)
    config = StableLmConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
        initializer_range=0.2,
    )
    return StableLmForCausalLM(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    rotary = model.model.rotary_emb
    cos, sin = rotary(torch.zeros(1), torch.arange(64)[None])
    rotary.register_buffer("cos", cos[0])
    rotary.register_buffer("sin", sin[0])
    rotary.forward = lambda x, position_ids: (rotary.cos[position_ids], rotary.sin[position_ids])
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(1, 64, (2, 9)),)


EXPECT = {
    "where": None,
    "kind": "benign-precomputed",
    "tol": 1e-6,
    "note": "a gather from a buffer that the reference has not, for a product, cosines and sines",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
