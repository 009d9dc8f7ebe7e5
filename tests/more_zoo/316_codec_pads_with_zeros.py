"""The codec's convolutions reflect the signal at its ends; the port pads with zeros. Ref: NVIDIA/TensorRT-Incubator#695, huggingface/transformers#39431 (family)"""

import torch
from transformers import EncodecConfig, EncodecModel


class Encode(torch.nn.Module):
    def __init__(self, mode):
        super().__init__()
        torch.manual_seed(0)
        config = EncodecConfig(
            hidden_size=16,
            num_filters=4,
            upsampling_ratios=[4, 2],
            num_lstm_layers=1,
            codebook_size=16,
            codebook_dim=16,
            num_residual_layers=1,
            pad_mode=mode,
        )
        self.encoder = EncodecModel(config).eval().encoder

    def forward(self, x):
        return self.encoder(x)


def reference():
    return Encode("reflect")


def target():
    return Encode("constant")


def inputs():
    torch.manual_seed(1)
    return (torch.randn(1, 1, 64),)


EXPECT = {
    "where": {"module": "encoder.layers.0", "op": "aten.constant_pad_nd.default"},
    "accept": ["aten.reflection_pad1d.default", "aten.convolution.default"],
    "kind": "padding",
    "note": "only the first samples differ; every convolution behind pads the same way",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
