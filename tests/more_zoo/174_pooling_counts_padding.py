"""Average pooling counts the padding it added. Ref: microsoft/MMdnn#153 (family), pytorch/pytorch#183523 (family)"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.pool = nn.AvgPool2d(3, 2, padding=1, count_include_pad=flag)
        self.norm, self.head = nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.head(F.silu(self.norm(self.pool(self.conv(x)))))


def _mk(flag):
    torch.manual_seed(0)
    return Net(flag).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(1, 3, 8, 8),)


EXPECT = {
    "where": {"module": "pool", "op": "aten.avg_pool2d.default"},
    "kind": "argument",
    "note": "only the first row and column differ",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
