"""Layers without positions scale their queries by the logarithm of the position; the port does not. Ref: vllm-project/vllm#16439, AI-Hypercomputer/maxtext#1611"""

import torch
from transformers import Llama4ForCausalLM, Llama4TextConfig


def _mk(dtype, **changes):
    torch.manual_seed(0)
    config = Llama4TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        intermediate_size_mlp=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        max_position_embeddings=64,
        moe_layers=[],
        no_rope_layers=[1, 1, 1, 0],
        floor_scale=4,
        attn_scale=0.5,
        attention_chunk_size=64,
        use_cache=False,
        initializer_range=0.2,
        pad_token_id=None,
        **changes,
    )
    return Llama4ForCausalLM(config).eval().to(dtype)


def reference():
    return _mk(torch.float32)


def target():
    return _mk(torch.bfloat16, attn_temperature_tuning=False)


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 64, (1, 24)),)


EXPECT = {
    "where": {"module": "model.layers.3.self_attn", "op": "aten.mul.Tensor"},
    "accept": [
        "aten.transpose.int",
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "aten.bmm.default",
    ],
    "missing_op": "aten.mul.Tensor",
    "kind": "missing-op",
    "note": "a float32 reference and a bfloat16 target; the last layer only",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
