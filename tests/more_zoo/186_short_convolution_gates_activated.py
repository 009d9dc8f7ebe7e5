"""LFM2's convolution has plain gates; the port puts SiLU on both. Ref: mlx-node/mlx-node#47"""

import torch
import torch.nn.functional as F
from transformers import Lfm2Config, Lfm2ForCausalLM
from transformers.models.lfm2 import modeling_lfm2 as home


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
            b, c, x = conv.in_proj(hidden_states).transpose(-1, -2).chunk(3, dim=-2)
            x = home.causal_conv1d_fn(F.silu(b) * x, conv.conv.weight.squeeze(1), conv.conv.bias)
            return conv.out_proj((F.silu(c) * x).transpose(-1, -2).contiguous())

        layer.conv.forward = forward
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(1, 64, (1, 9)),)


EXPECT = {
    "where": {"module": "model.layers.0.conv", "op": "aten.silu.default"},
    "accept": ["aten.mul.Tensor"],
    "extra_op": "aten.silu.default",
    "kind": "extra-op",
    "note": "two ops are inserted on operands of products",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
