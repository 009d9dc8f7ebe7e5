"""A low-rank adapter merged into its weight. Ref: unslothai/unsloth#289 (family)"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Adapted(nn.Module):
    def __init__(self, i, o, merged):
        super().__init__()
        self.base = nn.Linear(i, o)
        self.a, self.b = nn.Parameter(torch.randn(4, i) * 0.3), nn.Parameter(torch.randn(o, 4) * 0.3)
        self.merged = merged
        if merged:
            self.base.weight.data += 2.0 * self.b.data @ self.a.data

    def forward(self, x):
        return self.base(x) if self.merged else self.base(x) + 2.0 * F.linear(F.linear(x, self.a), self.b)


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.fc1, self.fc2, self.head = Adapted(16, 32, flag), Adapted(32, 16, flag), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(x + self.fc2(F.silu(self.fc1(x))))


def _mk(flag):
    torch.manual_seed(0)
    return Net(flag).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(5, 16),)


EXPECT = {
    "where": None,
    "kind": "benign-folding",
    "tol": 5e-6,
    "note": "weights of one name differ by much, two are not read; the children return other values",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
