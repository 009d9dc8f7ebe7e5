"""The gate of the shared expert is loaded and never used. Ref: NousResearch/torchtitan#36, InternLM/lmdeploy#3491"""

import torch
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM


def _mk():
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        shared_expert_intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        use_cache=False,
        initializer_range=0.2,
        experts_implementation="eager",
    )
    return Qwen2MoeForCausalLM(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    for layer in model.model.layers:
        block = layer.mlp

        def forward(hidden_states, block=block):
            flat = hidden_states.view(-1, hidden_states.shape[-1])
            shared = block.shared_expert(flat)
            _, weights, chosen = block.gate(flat)
            return (block.experts(flat, chosen, weights) + shared).reshape(hidden_states.shape)

        block.forward = forward
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 64, (1, 8)),)


EXPECT = {
    "where": {"module": "model.layers.0.mlp", "op": "aten.add.Tensor"},
    "accept": ["aten.mul.Tensor", "aten.sigmoid.default", None],
    "accept_modules": ["model.layers.0.mlp.shared_expert_gate"],
    "missing_module": "model.layers.0.mlp.shared_expert_gate",
    "kind": "routing",
    "note": "a module, a sigmoid and a product are absent; the sum reads the ungated output",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
