"""A checkpoint trained with x * sigmoid(1.702 x) is run with GELU. Ref: mlfoundations/open_clip#771, huggingface/pytorch-image-models#1754"""

import torch
from transformers import CLIPVisionConfig, CLIPVisionModel


def _mk(activation):
    torch.manual_seed(0)
    config = CLIPVisionConfig(
        image_size=16,
        patch_size=4,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_act=activation,
        initializer_range=0.2,
    )
    return CLIPVisionModel(config).eval().to(torch.bfloat16)


def reference():
    return _mk("quick_gelu")


def target():
    return _mk("gelu")


def inputs():
    torch.manual_seed(1)
    return (torch.randn(1, 3, 16, 16).to(torch.bfloat16),)


EXPECT = {
    "where": {"module": "encoder.layers.0.mlp.activation_fn", "op": "aten.gelu.default"},
    "kind": "activation",
    "note": "bfloat16 on both sides; one op for three, and at most 0.02 apart",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
