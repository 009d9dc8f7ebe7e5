"""Softmax over all experts and a share of the chosen, or softmax over the chosen alone. Ref: huggingface/transformers#27942"""

import torch
from transformers import MixtralConfig, MixtralForCausalLM


def _mk():
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        use_cache=False,
        initializer_range=0.2,
        sliding_window=None,
    )
    return MixtralForCausalLM(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    for layer in model.model.layers:
        gate = layer.mlp.gate

        def forward(x, gate=gate):
            logits = torch.nn.functional.linear(x.reshape(-1, gate.hidden_dim), gate.weight)
            values, chosen = torch.topk(logits, gate.top_k, dim=-1)
            return logits, values.float().softmax(-1), chosen

        gate.forward = forward
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 64, (1, 10)),)


EXPECT = {
    "where": None,
    "kind": "rewrite",
    "tol": 1e-4,
    "note": "what is chosen from differs, the choice and its weights do not",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
