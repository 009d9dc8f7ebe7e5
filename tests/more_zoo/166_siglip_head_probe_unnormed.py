"""The attention pooling head skips its layer norm. Ref: Blaizzy/mlx-vlm#893 (family)"""

import torch
from transformers import SiglipVisionConfig, SiglipVisionModel


def _mk():
    torch.manual_seed(0)
    config = SiglipVisionConfig(
        image_size=32,
        patch_size=8,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
    )
    return SiglipVisionModel(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    head = next(m for n, m in model.named_modules() if n.endswith("head"))

    def forward(x):
        probe = head.probe.repeat(x.shape[0], 1, 1)
        x = head.attention(probe, x, x)[0]
        return (x + head.mlp(x))[:, 0]

    head.forward = forward
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 3, 32, 32),)


EXPECT = {
    "where": {"module": "head.layernorm", "op": None},
    "accept_modules": [
        "head",
        "vision_model.head",
        "vision_model.head.layernorm",
        "head.mlp.fc1",
        "vision_model.head.mlp.fc1",
    ],
    "missing_module": "head.layernorm",
    "kind": "missing-module",
    "note": "multi-head attention runs as one fused op of torch before it",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
