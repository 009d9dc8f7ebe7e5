"""Attention over blocks of keys with a running maximum. Ref: pytorch/pytorch#124025 (family)"""

import torch
import torch.nn as nn


class Attention(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.qkv, self.out, self.flag = nn.Linear(32, 96), nn.Linear(32, 32), flag

    def forward(self, x):
        q, k, v = (z.unflatten(-1, (4, 8)).transpose(1, 2) for z in self.qkv(x).chunk(3, -1))
        if self.flag:
            top = torch.full((*q.shape[:3], 1), float("-inf"))
            total, y = torch.zeros_like(top), torch.zeros_like(q)
            for keys, values in zip(k.split(4, 2), v.split(4, 2), strict=True):
                s = q @ keys.transpose(-1, -2) * 8**-0.5
                higher = torch.maximum(top, s.amax(-1, keepdim=True))
                p, shrink = (s - higher).exp(), (top - higher).exp()
                total, y, top = total * shrink + p.sum(-1, keepdim=True), y * shrink + p @ values, higher
            y = y / total
        else:
            y = (q @ k.transpose(-1, -2) * 8**-0.5).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.attn, self.norm = Attention(flag), nn.LayerNorm(32)

    def forward(self, x):
        return self.norm(x + self.attn(x))


def _mk(flag):
    torch.manual_seed(0)
    return Net(flag).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 10, 32),)


EXPECT = {
    "where": None,
    "kind": "benign-decomposition",
    "tol": 5e-6,
    "note": "a loop of a dozen ops, the first of which meets -inf, against three",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
