"""Neighbouring patches are joined row by row, the checkpoint has them column by column. Ref: berniwal/swin-transformer-pytorch#22, HuCaoFighting/Swin-Unet#48 (family)"""

import torch
from transformers import SwinConfig, SwinForImageClassification


def _mk():
    torch.manual_seed(0)
    config = SwinConfig(
        image_size=16,
        patch_size=2,
        embed_dim=16,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=4,
        num_labels=3,
        initializer_range=0.2,
    )
    return SwinForImageClassification(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    merging = model.swin.encoder.layers[0].downsample

    def forward(x, dimensions):
        height, width = dimensions
        batch, _, channels = x.shape
        x = x.view(batch, height // 2, 2, width // 2, 2, channels).permute(0, 1, 3, 2, 4, 5)
        return merging.reduction(merging.norm(x.reshape(batch, -1, 4 * channels)))

    merging.forward = forward
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 3, 16, 16),)


EXPECT = {
    "where": {"module": "swin.encoder.layers.0.downsample", "op": None},
    "accept_modules": ["swin.encoder.layers.0.downsample.norm"],
    "kind": "layout",
    "note": "the port reshapes where the reference slices and joins; norms per row agree up to the order",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
