"""Patches cut by views and projected by one linear instead of a strided convolution. Ref: lucidrains/vit-pytorch#236"""

import torch
from transformers import ViTConfig, ViTModel


def _mk():
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=32,
        patch_size=8,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        initializer_range=0.1,
    )
    return ViTModel(config, add_pooling_layer=False).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    patches = model.embeddings.patch_embeddings

    def forward(x):
        b, c, h, w = x.shape
        x = x.view(b, c, h // 8, 8, w // 8, 8).permute(0, 2, 4, 1, 3, 5).reshape(b, -1, c * 64)
        return torch.nn.functional.linear(x, patches.projection.weight.flatten(1), patches.projection.bias)

    patches.forward = forward
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 3, 32, 32),)


EXPECT = {
    "where": None,
    "kind": "benign-decomposition",
    "tol": 2e-5,
    "note": "a child is never called though its weight is read",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
