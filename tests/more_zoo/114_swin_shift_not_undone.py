"""The cyclic shift is applied a second time instead of being undone. Ref: lizhuoq/WeatherLearn#4, NVIDIA/physicsnemo#1399 (family)"""

import torch
from transformers import SwinConfig, SwinForImageClassification


def _mk():
    torch.manual_seed(0)
    config = SwinConfig(
        image_size=32,
        patch_size=4,
        num_channels=3,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        num_labels=5,
    )
    return SwinForImageClassification(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    for stage in model.swin.encoder.layers:
        for block in stage.blocks:
            shift = block.cyclic_shift
            block.cyclic_shift = lambda x, reverse=False, shift=shift: shift(x)
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 3, 32, 32),)


EXPECT = {
    "where": {"module": "swin.encoder.layers.0.blocks.1", "op": "aten.roll.default"},
    "kind": "argument",
    "note": "only the sign of the second roll differs; the values are all there, elsewhere",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
