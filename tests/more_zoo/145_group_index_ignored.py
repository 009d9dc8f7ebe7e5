"""Groups of an act-order checkpoint are taken as contiguous. Ref: huggingface/text-generation-inference#1027, intel/ipex-llm#10851"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class QLinear(nn.Module):
    """Codes of 4 bits with a scale and a zero point for each group of 8 inputs."""

    def __init__(self, d, flag):
        super().__init__()
        self.flag = flag
        w, groups = torch.randn(d, d) / d**0.5, torch.randperm(d) // 8
        self.register_buffer("group", groups)
        low = torch.stack([w[:, groups == g].amin(1) for g in range(d // 8)], 1)
        high = torch.stack([w[:, groups == g].amax(1) for g in range(d // 8)], 1)
        self.register_buffer("scale", (high - low) / 15)
        self.register_buffer("zero", (-low / self.scale).round().to(torch.int8))
        codes = (w / self.scale[:, groups]).round() + self.zero[:, groups]
        self.register_buffer("codes", codes.clamp(0, 15).to(torch.int8))

    def forward(self, x):
        group = torch.arange(x.shape[-1]) // 8 if self.flag else self.group
        zero = self.zero
        w = (self.codes - zero[:, group]).float() * self.scale[:, group]
        return F.linear(x, w)


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.fc1, self.fc2 = QLinear(32, flag), nn.Linear(32, 4)

    def forward(self, x):
        return self.fc2(F.silu(self.fc1(x)))


def _mk(flag):
    torch.manual_seed(0)
    return Net(flag).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(5, 32),)


EXPECT = {
    "where": {"module": "fc1", "op": "aten.index.Tensor"},
    "accept": ["aten.arange.default", "aten.floor_divide.default", "aten.div.Tensor_mode"],
    "kind": "quant-group",
    "note": "a buffer is not read; indices are made by the program, of the same shape and range",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
