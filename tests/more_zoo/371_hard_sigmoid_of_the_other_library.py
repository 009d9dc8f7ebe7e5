"""The gate's hard sigmoid has slope 0.2 instead of 1/6. Ref: PaddlePaddle/Paddle#44820, pytorch/pytorch#34545"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Gate(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.flag = flag

    def forward(self, x):
        return (0.2 * x + 0.5).clamp(0, 1) if self.flag else F.hardsigmoid(x)


class Squeeze(nn.Module):
    def __init__(self, dim, flag):
        super().__init__()
        self.fc1, self.fc2, self.gate = nn.Conv2d(dim, 4, 1), nn.Conv2d(4, dim, 1), Gate(flag)

    def forward(self, x):
        return x * self.gate(self.fc2(torch.relu(self.fc1(x.mean((2, 3), keepdim=True)))))


def _mk(flag):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.Hardswish(), Squeeze(8, flag), nn.Flatten(), nn.Linear(512, 5)
    ).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (2 * torch.randn(2, 3, 8, 8),)


EXPECT = {
    "where": {"module": "2.gate", "op": None},
    "kind": "argument",
    "note": "one op of the reference is three of the target",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
