"""A convolution as a product over unfolded patches. Ref: pytorch/pytorch#110387 (family)"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Conv(nn.Conv2d):
    flag = False

    def forward(self, x):
        if not self.flag:
            return super().forward(x)
        h, w = x.shape[-2:]
        y = self.weight.flatten(1) @ F.unfold(x, 3, padding=1)
        return (y + self.bias[:, None]).view(x.shape[0], -1, h, w)


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.conv1, self.conv2, self.bn = (
            Conv(3, 8, 3, padding=1),
            Conv(8, 8, 3, padding=1),
            nn.BatchNorm2d(8),
        )
        self.conv1.flag = self.conv2.flag = flag

    def forward(self, x):
        return self.bn(self.conv2(F.relu(self.conv1(x)))).mean((2, 3))


def _mk(flag):
    torch.manual_seed(0)
    return Net(flag).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 3, 6, 6),)


EXPECT = {
    "where": None,
    "kind": "benign-decomposition",
    "tol": 5e-6,
    "note": "patches of nine times the size, which the reference has not",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
