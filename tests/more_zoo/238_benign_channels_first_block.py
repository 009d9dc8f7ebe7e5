"""ConvNeXt's pointwise layers as 1x1 convolutions, channels first. Ref: pytorch/pytorch#110387 (family)"""

import torch
import torch.nn.functional as F
from transformers import ConvNextConfig, ConvNextForImageClassification


def _mk():
    torch.manual_seed(0)
    config = ConvNextConfig(
        num_stages=2,
        depths=[1, 2],
        hidden_sizes=[16, 32],
        patch_size=2,
        layer_scale_init_value=0.5,
        initializer_range=0.2,
        num_labels=5,
        image_size=16,
    )
    return ConvNextForImageClassification(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    for stage in model.convnext.encoder.stages:
        for layer in stage.layers:

            def forward(features, layer=layer):
                x = layer.layernorm(layer.dwconv(features).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
                x = F.conv2d(x, layer.pwconv1.weight[:, :, None, None], layer.pwconv1.bias)
                x = F.conv2d(layer.act(x), layer.pwconv2.weight[:, :, None, None], layer.pwconv2.bias)
                return features + layer.layer_scale_parameter[:, None, None] * x

            layer.forward = forward
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 3, 16, 16),)


EXPECT = {
    "where": None,
    "kind": "benign-decomposition",
    "tol": 1e-5,
    "note": "modules are bypassed, products become convolutions, and dims stand in another order",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
