"""Router weights scale what experts read, not what they return. Ref: vllm-project/vllm#16744, vllm-project/vllm#43694 (family)"""

import torch
from transformers import MixtralConfig, MixtralForCausalLM


def _mk():
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        use_cache=False,
        initializer_range=0.2,
        experts_implementation="eager",
    )
    return MixtralForCausalLM(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    for layer in model.model.layers:
        experts = layer.mlp.experts

        def forward(x, index, weights, experts=experts):
            out = torch.zeros_like(x)
            mask = torch.nn.functional.one_hot(index, num_classes=experts.num_experts + 1).permute(2, 1, 0)
            for hit in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
                slot, token = torch.where(mask[hit[0]])
                read = x[token] * weights[token, slot, None]
                gate, up = torch.nn.functional.linear(read, experts.gate_up_proj[hit[0]]).chunk(2, dim=-1)
                made = torch.nn.functional.linear(experts.act_fn(gate) * up, experts.down_proj[hit[0]])
                out.index_add_(0, token, made)
            return out

        experts.forward = forward
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 64, (1, 9)),)


EXPECT = {
    "where": {"module": "model.layers.0.mlp.experts", "op": "aten.mul.Tensor"},
    "accept": ["aten.mm.default"],
    "kind": "order",
    "note": "one product stands before two linear ops and an activation instead of behind them",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
