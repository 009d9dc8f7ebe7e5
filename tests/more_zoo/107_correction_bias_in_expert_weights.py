"""The balancing bias, meant for the choice alone, also weighs the experts. Ref: vllm-project/vllm#12002"""

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM


def _mk():
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        max_position_embeddings=64,
        use_cache=False,
        initializer_range=0.3,
        experts_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model = DeepseekV3ForCausalLM(config).eval()
    model.model.layers[1].mlp.gate.e_score_correction_bias.normal_(std=0.3)
    return model


def reference():
    return _mk()


def target():
    model = _mk()
    gate = model.model.layers[1].mlp.gate

    def forward(hidden_states):
        logits = torch.nn.functional.linear(hidden_states.view(-1, gate.hidden_dim), gate.weight)
        scores = logits.sigmoid() + gate.e_score_correction_bias
        groups = scores.view(-1, gate.num_group, gate.num_experts // gate.num_group)
        best = groups.topk(2, dim=-1)[0].sum(dim=-1).topk(gate.topk_group, dim=-1, sorted=False)[1]
        mask = torch.zeros_like(groups[..., 0]).scatter_(1, best, 1)
        mask = mask.unsqueeze(-1).expand_as(groups).reshape(scores.shape)
        chosen = scores.masked_fill(~mask.bool(), float("-inf")).topk(gate.top_k, dim=-1, sorted=False)[1]
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * gate.routed_scaling_factor
        return logits, weights, chosen

    gate.forward = forward
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 64, (1, 8)),)


EXPECT = {
    "where": {"module": "model.layers.1.mlp.gate", "op": "aten.gather.default"},
    "kind": "routing",
    "note": "the same experts; the gather reads the sum with the bias instead of the plain scores",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
