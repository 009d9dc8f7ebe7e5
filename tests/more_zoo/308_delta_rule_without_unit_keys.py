"""The gated delta rule normalises queries and keys in its kernel; the port leaves that to a caller who does not. Ref: NVIDIA/Megatron-LM#5396 (family), ml-explore/mlx-lm#1798 (family)"""

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.qwen3_next import modeling_qwen3_next as home


def _mk():
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=0,
        mlp_only_layers=[0, 1],
        layer_types=["linear_attention", "full_attention"],
        max_position_embeddings=64,
        use_cache=False,
        initializer_range=0.2,
        pad_token_id=None,
    )
    return Qwen3NextForCausalLM(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    attn = model.model.layers[0].linear_attn
    plain, rule = attn.forward, home.torch_chunk_gated_delta_rule

    def without(*args, **kwargs):
        return rule(*args, **kwargs | {"use_qk_l2norm_in_kernel": False})

    def forward(*args, **kwargs):
        home.torch_chunk_gated_delta_rule = without
        try:
            return plain(*args, **kwargs)
        finally:
            home.torch_chunk_gated_delta_rule = rule

    attn.forward = forward
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 64, (1, 10)),)


EXPECT = {
    "where": {"module": "model.layers.0.linear_attn", "op": "aten.mul.Tensor"},
    "accept": ["aten.constant_pad_nd.default"],
    "missing_op": "aten.mul.Tensor",
    "kind": "missing-op",
    "note": "what is missing stands in the middle of a function of fifty ops",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
