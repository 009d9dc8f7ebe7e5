"""Experts split gate and up in halves where the weights interleave them. Ref: vllm-project/vllm#29273, ROCm/ATOM#885"""

import torch
from transformers import GptOssConfig, GptOssForCausalLM


def _mk():
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=4,
        max_position_embeddings=64,
        use_cache=False,
        initializer_range=0.3,
        attn_implementation="eager",
        experts_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return GptOssForCausalLM(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    for layer in model.model.layers:
        experts = layer.mlp.experts

        def split(gate_up, experts=experts):
            gate, up = gate_up.chunk(2, dim=-1)
            gate, up = gate.clamp(max=experts.limit), up.clamp(min=-experts.limit, max=experts.limit)
            return (up + 1) * gate * torch.sigmoid(gate * experts.alpha)

        experts._apply_gate = split
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 64, (1, 7)),)


EXPECT = {
    "where": {"module": "model.layers.0.mlp.experts", "op": "aten.clamp.default"},
    "accept": ["aten.slice.Tensor", "aten.split.Tensor", "aten.view.default"],
    "kind": "expert-layout",
    "note": "same values, other columns; the product after it is written in another order besides",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
