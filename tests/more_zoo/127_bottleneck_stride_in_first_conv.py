"""The stride of a bottleneck sits in its 1x1 convolution. Ref: pytorch/vision#191, pytorch/vision#606"""

import torch
from transformers import ResNetConfig, ResNetForImageClassification


def _mk(first):
    torch.manual_seed(0)
    config = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[16, 32],
        depths=[1, 2],
        layer_type="bottleneck",
        num_labels=5,
        downsample_in_bottleneck=first,
    )
    return ResNetForImageClassification(config).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(1, 3, 32, 32),)


EXPECT = {
    "where": {
        "module": "resnet.encoder.stages.1.layers.0.layer.0.convolution",
        "op": "aten.convolution.default",
    },
    "kind": "argument",
    "note": "inside the block shapes differ, from its sum on they agree again",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
