"""Height and width are exchanged where position embeddings are interpolated. Ref: princeton-vl/WAFT#2, facebookresearch/dino#8 (family)"""

import torch
from transformers import Dinov2Config, Dinov2Model


def _mk():
    torch.manual_seed(0)
    config = Dinov2Config(
        image_size=16,
        patch_size=4,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        mlp_ratio=2,
        initializer_range=0.2,
    )
    return Dinov2Model(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    interpolate = model.embeddings.interpolate_pos_encoding
    model.embeddings.interpolate_pos_encoding = lambda x, height, width: interpolate(x, width, height)
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randn(1, 3, 24, 12),)


EXPECT = {
    "where": {"module": "embeddings", "op": "aten.upsample_bicubic2d.default"},
    "kind": "argument",
    "note": "the number of patches is the same, so nothing fails; a picture of 6 by 3 patches",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
