"""Zero points are stored less one; the kernel of the other format does not add it. Ref: vllm-project/vllm#38966, ModelCloud/GPTQModel#2350"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class QLinear(nn.Module):
    """Codes of 4 bits with a scale and a zero point for each group of 8 inputs."""

    def __init__(self, d, flag):
        super().__init__()
        self.flag = flag
        w, groups = torch.randn(d, d) / d**0.5, torch.arange(d) // 8
        self.register_buffer("group", groups)
        low = torch.stack([w[:, groups == g].amin(1) for g in range(d // 8)], 1)
        high = torch.stack([w[:, groups == g].amax(1) for g in range(d // 8)], 1)
        self.register_buffer("scale", (high - low) / 15)
        self.register_buffer("zero", (-low / self.scale).round().to(torch.int8))
        codes = (w / self.scale[:, groups]).round() + self.zero[:, groups]
        self.register_buffer("codes", codes.clamp(0, 15).to(torch.int8))

    def forward(self, x):
        group = self.group
        zero = self.zero + 1 if self.flag else self.zero
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
    "where": {"module": "fc1", "op": "aten.add.Tensor"},
    "accept": ["aten.sub.Tensor", "aten.index.Tensor"],
    "extra_op": "aten.add.Tensor",
    "kind": "quant-zero",
    "note": "an integer op that only the target has; every weight is off by one step in one direction",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
