"""Grouped key/value heads turned into full ones by repeating their weights. Ref: QwenLM/Qwen3#862"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def _mk(heads):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=heads,
        max_position_embeddings=64,
        use_cache=False,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def reference():
    return _mk(2)


def target():
    model, weights = _mk(4), _mk(2).state_dict()
    for name, weight in weights.items():
        if "k_proj" in name or "v_proj" in name:
            weights[name] = weight.view(2, 8, 32).repeat_interleave(2, 0).reshape(32, 32)
    model.load_state_dict(weights)
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(1, 64, (2, 9)),)


EXPECT = {
    "where": None,
    "kind": "benign-layout",
    "tol": 1e-5,
    "note": "weights and activations of another size, with every row of the reference's twice",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
