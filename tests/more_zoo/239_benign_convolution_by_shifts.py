"""A short causal convolution as a sum of shifted products. Ref: state-spaces/mamba#910 (family)"""

import torch
import torch.nn.functional as F
from transformers import Lfm2Config, Lfm2ForCausalLM


def _mk():
    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        block_multiple_of=16,
        layer_types=["conv", "full_attention", "conv"],
        use_cache=False,
        initializer_range=0.2,
    )
    return Lfm2ForCausalLM(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    for layer in model.model.layers:
        if layer.is_attention_layer:
            continue

        def forward(hidden_states, conv=layer.conv, **kwargs):
            b, c, x = conv.in_proj(hidden_states).chunk(3, dim=-1)
            x, weight = b * x, conv.conv.weight.squeeze(1)
            padded = F.pad(x, (0, 0, weight.shape[1] - 1, 0))
            x = sum(padded[:, k : k + x.shape[1]] * weight[:, k] for k in range(weight.shape[1]))
            return conv.out_proj(c * x)

        layer.conv.forward = forward
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(1, 64, (2, 9)),)


EXPECT = {
    "where": None,
    "kind": "benign-decomposition",
    "tol": 1e-5,
    "note": "one op against a loop of three products, tokens before channels",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
