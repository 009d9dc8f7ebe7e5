"""A fused bias is cut per head though it is stored per kind. Ref: ggml-org/llama.cpp#2376 (family), NVIDIA-NeMo/Automodel#1324 (family)"""

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM


def _mk(**changes):
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        use_cache=False,
        attention_bias=True,
        hidden_act="gelu",
        **changes,
    )
    return GPTNeoXForCausalLM(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    for layer in model.gpt_neox.layers:
        bias = layer.attention.query_key_value.bias
        bias.data = bias.data.view(4, 3, 8).transpose(0, 1).reshape(-1).clone()
    return model


_make = _mk


def _mk(**changes):
    model = _make(**changes)
    for layer in model.gpt_neox.layers:
        layer.attention.query_key_value.bias.data.normal_(std=0.3)
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(1, 64, (2, 9)),)


EXPECT = {
    "where": {"module": "gpt_neox.layers.0.attention.query_key_value", "op": "aten.addmm.default"},
    "kind": "weight-order",
    "note": "the weight agrees, the bias holds the same numbers in another order",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
