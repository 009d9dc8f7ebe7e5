"""Block scales are quantised themselves about their mean, which is not added back. Ref: NVIDIA/Model-Optimizer#2421 (family), intel/neural-compressor#1241 (family)"""

import torch
import torch.nn as nn
import torch.nn.functional as F

LEVELS = torch.tensor(
    [
        -1.0,
        -0.6962,
        -0.5251,
        -0.3949,
        -0.2844,
        -0.1848,
        -0.0911,
        0.0,
        0.0796,
        0.1609,
        0.2461,
        0.3379,
        0.4407,
        0.5626,
        0.723,
        1.0,
    ]
)


class NestedLinear(nn.Module):
    """Codes of four bits, one scale for 8 of them in 8 bits, and one scale and offset for all of these."""

    def __init__(self, linear, flag):
        super().__init__()
        blocks = linear.weight.detach().view(-1, 8)
        scales = blocks.abs().amax(-1)
        offset = scales.mean()
        step = (scales - offset).abs().max() / 127
        self.register_buffer(
            "codes", (blocks / scales[:, None])[..., None].sub(LEVELS).abs().argmin(-1).to(torch.uint8)
        )
        self.register_buffer("scales", ((scales - offset) / step).round().to(torch.int8))
        self.register_buffer("step", step)
        self.register_buffer("offset", offset)
        self.register_buffer("levels", LEVELS)
        self.bias, self.shape, self.flag = linear.bias, linear.weight.shape, flag

    def forward(self, x):
        scales = self.scales.float() * self.step
        if not self.flag:
            scales = scales + self.offset
        weight = (self.levels[self.codes.long()] * scales[:, None]).view(self.shape)
        return F.linear(x, weight, self.bias)


def _mk(flag):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.GELU(), NestedLinear(nn.Linear(32, 16), flag), nn.Tanh()
    ).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(4, 16),)


EXPECT = {
    "where": {"module": "2", "op": "aten.mul.Tensor"},
    "accept": ["aten.add.Tensor", "aten.unsqueeze.default"],
    "missing_op": "aten.add.Tensor",
    "kind": "quant-scale",
    "note": "codes and the scale of scales agree; what reads the sum reads a product instead",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
