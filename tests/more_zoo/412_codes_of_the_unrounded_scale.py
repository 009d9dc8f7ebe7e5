"""Codes are made with the scale as it was before it was rounded to a power of two. Ref: huggingface/transformers#46763"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Float8Linear(nn.Module):
    def __init__(self, linear, flag):
        super().__init__()
        weight = linear.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 448
        rounded = scale.log2().ceil().exp2()
        self.register_buffer("codes", (weight / (scale if flag else rounded)).to(torch.float8_e4m3fn))
        self.register_buffer("scale", rounded)
        self.bias = linear.bias

    def forward(self, x):
        return F.linear(x, self.codes.to(x.dtype) * self.scale.to(x.dtype), self.bias)


def _mk(flag):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.GELU(), Float8Linear(nn.Linear(16, 16), flag), nn.GELU(), nn.Linear(16, 3)
    ).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(4, 6),)


EXPECT = {
    "where": {"module": "2", "op": "aten._to_copy.default"},
    "accept": [None, "aten.mul.Tensor", "aten.linear.default", "aten.addmm.default", "aten.t.default"],
    "kind": "parameter",
    "note": "another factor up to two for each row, in codes of eight bits",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
