"""A flow takes every other column apart and puts the halves side by side. Ref: karpathy/pytorch-normalizing-flows#10"""

import torch
import torch.nn as nn


class Coupling(nn.Module):
    def __init__(self, dim, flag):
        super().__init__()
        self.scale = nn.Sequential(nn.Linear(dim // 2, 8), nn.Tanh(), nn.Linear(8, dim // 2))
        self.shift = nn.Sequential(nn.Linear(dim // 2, 8), nn.Tanh(), nn.Linear(8, dim // 2))
        self.flag = flag

    def forward(self, x):
        a, b = x[:, ::2], x[:, 1::2]
        b = b * self.scale(a).exp() + self.shift(a)
        return torch.cat([a, b], 1) if self.flag else torch.stack([a, b], 2).flatten(1)


def _mk(flag):
    torch.manual_seed(0)
    return nn.Sequential(Coupling(6, False), Coupling(6, flag), Coupling(6, False)).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(4, 6),)


EXPECT = {
    "where": {"module": "1", "op": "aten.cat.default"},
    "accept": ["aten.stack.default"],
    "kind": "layout",
    "note": "the same numbers in other columns; only the second of three flows",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
