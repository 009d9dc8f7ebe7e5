"""Codes of unsigned bytes are read as signed ones. Ref: clevercool/SQuant#11 (family)"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ByteLinear(nn.Module):
    def __init__(self, linear, flag):
        super().__init__()
        weight = linear.weight.detach()
        low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        self.register_buffer("scale", (high - low) / 255)
        self.register_buffer("zero", (-low / self.scale).round())
        self.register_buffer("codes", (weight / self.scale + self.zero).round().clamp(0, 255).to(torch.uint8))
        self.bias, self.flag = linear.bias, flag

    def forward(self, x):
        codes = self.codes.view(torch.int8) if self.flag else self.codes
        return F.linear(x, (codes.float() - self.zero) * self.scale, self.bias)


def _mk(flag):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.GELU(), ByteLinear(nn.Linear(16, 12), flag), nn.LayerNorm(12), nn.Linear(12, 3)
    ).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(4, 6),)


EXPECT = {
    "where": {"module": "2", "op": "aten.view.dtype"},
    "accept": ["aten._to_copy.default", "aten.sub.Tensor"],
    "kind": "quant-dtype",
    "note": "the same bytes seen as another dtype",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
