"""Scores and mixture by einsum, with grouped heads broadcast instead of repeated. Ref: pytorch/pytorch#124025 (family)"""

import torch
import torch.nn as nn


class Attention(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16)
        self.out, self.flag = nn.Linear(32, 32), flag

    def forward(self, x):
        b, t, _ = x.shape
        if self.flag:
            q = self.q(x).view(b, t, 2, 2, 8)
            k, v = self.k(x).view(b, t, 2, 8), self.v(x).view(b, t, 2, 8)
            p = (torch.einsum("bqgrd,bkgd->bgrqk", q, k) * 8**-0.5).softmax(-1)
            y = torch.einsum("bgrqk,bkgd->bqgrd", p, v).reshape(b, t, 32)
        else:
            q = self.q(x).view(b, t, 4, 8).transpose(1, 2)
            k, v = (
                z.view(b, t, 2, 8).transpose(1, 2).repeat_interleave(2, 1) for z in (self.k(x), self.v(x))
            )
            y = ((q @ k.transpose(-1, -2) * 8**-0.5).softmax(-1) @ v).transpose(1, 2).reshape(b, t, 32)
        return self.out(y)


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.layers = nn.ModuleList(Attention(flag) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def _mk(flag):
    torch.manual_seed(0)
    return Net(flag).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 6, 32),)


EXPECT = {
    "where": None,
    "kind": "benign-decomposition",
    "tol": 5e-6,
    "note": "no repeated heads in the target, and products over other axes",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
