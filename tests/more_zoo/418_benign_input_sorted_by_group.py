"""Columns of a grouped weight are sorted by group and the input with them. Ref: huggingface/text-generation-inference#1027 (family), ModelCloud/GPTQModel#2350 (family)"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class GroupLinear(nn.Module):
    def __init__(self, linear, flag):
        super().__init__()
        order = torch.randperm(linear.in_features)
        index = torch.empty_like(order)
        index[order] = torch.arange(linear.in_features) // 4
        weight = linear.weight.detach()
        scale = torch.stack([weight[:, index == g].abs().amax(1) / 7 for g in range(4)], 1)
        codes = (weight / scale[:, index]).round().to(torch.int8)
        self.register_buffer("codes", codes[:, order] if flag else codes)
        self.register_buffer("scale", scale)
        self.register_buffer("order" if flag else "g_idx", order if flag else index)
        self.bias, self.flag = linear.bias, flag

    def forward(self, x):
        if self.flag:
            return F.linear(x[..., self.order], self.codes * self.scale.repeat_interleave(4, 1), self.bias)
        return F.linear(x, self.codes * self.scale[:, self.g_idx], self.bias)


def _mk(flag):
    torch.manual_seed(0)
    a, b = (GroupLinear(nn.Linear(16, n), flag) for n in (16, 5))
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), a, nn.GELU(), b).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(4, 6),)


EXPECT = {
    "where": None,
    "kind": "layout",
    "tol": 1e-5,
    "note": "codes, and the input of the product, in another order of columns",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
