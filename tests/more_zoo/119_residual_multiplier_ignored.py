"""Granite's residual multiplier is applied to one of two branches. Ref: dphnAI/sonar#1054 (family)"""

import torch
from transformers import GraniteConfig, GraniteForCausalLM


def _mk():
    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        residual_multiplier=0.3,
        embedding_multiplier=6.0,
        logits_scaling=4.0,
        attention_multiplier=0.2,
        max_position_embeddings=64,
        use_cache=False,
    )
    return GraniteForCausalLM(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    for layer in model.model.layers:

        def forward(hidden_states, layer=layer, **rest):
            attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **rest)
            hidden_states = hidden_states + attended * layer.residual_multiplier
            return hidden_states + layer.mlp(layer.post_attention_layernorm(hidden_states))

        layer.forward = forward
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 64, (1, 9)),)


EXPECT = {
    "where": {"module": "model.layers.0", "op": "aten.add.Tensor"},
    "accept": ["aten.mul.Tensor"],
    "missing_op": "aten.mul.Tensor",
    "kind": "residual",
    "note": "one product by a number is absent, an equal one in the same body is there",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
