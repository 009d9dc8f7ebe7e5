"""A gated recurrent cell uses its reset gate for both gates. Ref: CrispStrobe/CrispASR#106 (family)"""

import torch
import torch.nn as nn


class Cell(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.x, self.h, self.flag = nn.Linear(8, 24), nn.Linear(8, 24), flag

    def forward(self, x, h):
        rx, zx, nx = self.x(x).chunk(3, -1)
        rh, zh, nh = self.h(h).chunk(3, -1)
        r = torch.sigmoid(rx + rh)
        z = r if self.flag else torch.sigmoid(zx + zh)
        n = torch.tanh(nx + r * nh)
        return (1 - z) * n + z * h


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.cell, self.out = Cell(flag), nn.Linear(8, 2)

    def forward(self, xs):
        h = torch.zeros(2, 8)
        for x in xs:
            h = self.cell(x, h)
        return self.out(h)


def _mk(flag):
    torch.manual_seed(0)
    return Net(flag).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(4, 2, 8),)


EXPECT = {
    "where": {"module": "cell", "op": "aten.rsub.Scalar"},
    "call": 0,
    "accept": ["aten.sub.Tensor", "aten.sigmoid.default", "aten.add.Tensor", "aten.mul.Tensor"],
    "kind": "wiring",
    "note": "a sum and a sigmoid are absent; an operand is another value of the same module",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
