"""Scales of an int8 weight multiply the result, not the weight. Ref: pytorch/executorch#22431 (family), HabanaAI/vllm-fork#1153 (family)"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ByteLinear(nn.Module):
    def __init__(self, linear, flag):
        super().__init__()
        weight = linear.weight.detach()
        scale = weight.abs().amax(1) / 127
        self.register_buffer("codes", (weight / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias, self.flag = linear.bias, flag

    def forward(self, x):
        if self.flag:
            return F.linear(x, self.codes.to(x.dtype)) * self.scale + self.bias
        return F.linear(x, self.codes.to(x.dtype) * self.scale[:, None], self.bias)


def _mk(flag):
    torch.manual_seed(0)
    layers = [nn.Linear(12, 24), nn.Linear(24, 24), nn.Linear(24, 5)]
    a, b, c = (ByteLinear(layer, flag) for layer in layers)
    return nn.Sequential(a, nn.GELU(), b, nn.GELU(), c).eval().to(torch.bfloat16)


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(6, 12).to(torch.bfloat16),)


EXPECT = {
    "where": None,
    "kind": "rewrite",
    "tol": 0.05,
    "note": "bfloat16 on both sides; other roundings in each of three layers",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
