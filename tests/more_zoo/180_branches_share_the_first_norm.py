"""Falcon's two branches have a norm each; the port gives both the first. Ref: NVIDIA/TransformerEngine#625, antonellof/ferrox#236 (family)"""

import torch
from transformers import FalconConfig, FalconForCausalLM


def _mk():
    torch.manual_seed(0)
    config = FalconConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_kv_heads=2,
        new_decoder_architecture=True,
        max_position_embeddings=64,
        use_cache=False,
        initializer_range=0.2,
    )
    model = FalconForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        if "ln_" in name:
            weight.data += 0.3 * torch.randn_like(weight)
    return model


def reference():
    return _mk()


def target():
    model = _mk()
    for layer in model.transformer.h:

        def forward(hidden_states, layer=layer, **kwargs):
            normed = layer.ln_attn(hidden_states)
            kwargs.pop("use_cache", None)
            attended, weights = layer.self_attention(normed, **kwargs)
            out = layer.mlp(normed)
            out += attended
            return hidden_states + out, weights

        layer.forward = forward
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(1, 64, (2, 9)),)


EXPECT = {
    "where": {"module": "transformer.h.0", "op": "aten.mm.default"},
    "accept": ["aten.native_layer_norm.default", "aten.view.default", "aten._unsafe_view.default", None],
    "accept_modules": ["transformer.h.0.ln_mlp"],
    "missing_module": "transformer.h.0.ln_mlp",
    "kind": "norm-placement",
    "note": "a module is never called and its readers get what its sibling returned",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
