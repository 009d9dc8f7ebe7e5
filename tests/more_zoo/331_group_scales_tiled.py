"""Scales of groups are tiled over the columns, not repeated one by one. Ref: pytorch/executorch#21023 (family), deepspeedai/DeepSpeed#3433 (family)"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class GroupLinear(nn.Module):
    def __init__(self, linear, flag):
        super().__init__()
        groups = linear.weight.detach().view(linear.out_features, -1, 8)
        scale = groups.abs().amax(-1) / 127
        self.register_buffer("codes", (groups / scale[..., None]).round().to(torch.int8).flatten(1))
        self.register_buffer("scale", scale)
        self.bias, self.flag = linear.bias, flag

    def forward(self, x):
        scale = self.scale.repeat(1, 8) if self.flag else self.scale.repeat_interleave(8, 1)
        return F.linear(x, (self.codes * scale).to(x.dtype), self.bias)


def _mk(flag, dtype):
    torch.manual_seed(0)
    first, second = nn.Linear(16, 32), nn.Linear(32, 16)
    second.weight.data *= torch.tensor([1.0, 0.5, 2.0, 1.5]).repeat_interleave(8)
    return nn.Sequential(first, nn.GELU(), GroupLinear(second, flag), nn.Tanh()).eval().to(dtype)


def reference():
    return _mk(False, torch.bfloat16)


def target():
    return _mk(True, torch.bfloat16)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(4, 16).to(torch.bfloat16),)


EXPECT = {
    "where": {"module": "2", "op": "aten.repeat.default"},
    "accept": ["aten.mul.Tensor", "aten.expand.default", "aten.clone.default", "aten.view.default"],
    "kind": "quant-layout",
    "note": "bfloat16 on both sides; the same numbers in other columns",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
