"""Norms of the branch's output are applied to its input. Ref: Howuhh/faster-trajectory-transformer#3 (family)"""

import torch
from transformers import Olmo2Config, Olmo2ForCausalLM


def _mk(**changes):
    torch.manual_seed(0)
    config = Olmo2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
        **changes,
    )
    return Olmo2ForCausalLM(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    for layer in model.model.layers:

        def forward(x, layer=layer, **rest):
            y, _ = layer.self_attn(hidden_states=layer.post_attention_layernorm(x), **rest)
            x = x + y
            return x + layer.mlp(layer.post_feedforward_layernorm(x))

        layer.forward = forward
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(1, 64, (2, 9)),)


EXPECT = {
    "where": {"module": "model.layers.0", "op": None},
    "accept_modules": ["model.layers.0.post_attention_layernorm", "model.layers.0.self_attn"],
    "kind": "order",
    "note": "the same modules are called in another order; each does what it should with what it is given",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
