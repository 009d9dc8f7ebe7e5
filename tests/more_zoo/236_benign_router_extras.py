"""The target also computes a balancing loss and statistics that nobody returns. Ref: pytorch/torchtitan#1448 (family)"""

import torch
from transformers import MixtralConfig, MixtralForCausalLM


def _mk(**changes):
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
        num_local_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.2,
        experts_implementation="eager",
        **changes,
    )
    return MixtralForCausalLM(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    for layer in model.model.layers:
        gate, route = layer.mlp.gate, layer.mlp.gate.forward

        def forward(x, gate=gate, route=route):
            logits, weights, index = route(x)
            shares = torch.nn.functional.one_hot(index, 4).float().mean((0, 1))
            gate.loss = (logits.float().softmax(-1).mean(0) * shares).sum() * 4
            gate.entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
            return logits, weights, index

        gate.forward = forward
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(1, 64, (2, 9)),)


EXPECT = {
    "where": None,
    "kind": "benign-extra",
    "tol": 0,
    "note": "a dozen ops beside the path, on what it reads",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
