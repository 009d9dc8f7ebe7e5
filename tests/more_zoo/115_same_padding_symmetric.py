"""TensorFlow's SAME padding is one-sided at stride 2; the port pads both sides. Ref: microsoft/MMdnn#153, onnx/tensorflow-onnx#1028"""

import torch
from transformers import MobileNetV2Config, MobileNetV2ForImageClassification


def _mk(one_sided):
    torch.manual_seed(0)
    config = MobileNetV2Config(
        image_size=32,
        depth_multiplier=0.25,
        min_depth=4,
        tf_padding=one_sided,
        num_labels=4,
        initializer_range=0.3,
    )
    return MobileNetV2ForImageClassification(config).eval()


def reference():
    return _mk(True)


def target():
    return _mk(False)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(1, 3, 32, 32),)


EXPECT = {
    "where": {"module": "mobilenet_v2.conv_stem.first_conv.convolution", "op": "aten.convolution.default"},
    "accept": ["aten.constant_pad_nd.default"],
    "accept_modules": ["mobilenet_v2.conv_stem.first_conv"],
    "kind": "padding",
    "note": "a padding op is absent and an argument differs; at stride 1 both ways agree, so half of the "
    "unmatched ops are harmless",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
