"""Queries are scaled before the product, or both sides by the root of the scale. Ref: huggingface/transformers#36536 (family), mlc-ai/mlc-llm#3426 (family)"""

import torch
import torch.nn as nn


class Attention(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.flag = flag

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (4, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.flag:
            s = (q * 8**-0.25) @ (k * 8**-0.25).transpose(-1, -2)
        else:
            s = q @ k.transpose(-1, -2) / 8**0.5
        keep = torch.ones(s.shape[-2:], dtype=torch.bool).tril()
        s = torch.where(keep, s, -1e30) if self.flag else s.masked_fill(~keep, float("-inf"))
        return self.out((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


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
    return (torch.randn(2, 7, 32),)


EXPECT = {
    "where": None,
    "kind": "benign-order",
    "tol": 5e-6,
    "note": "products by another number in another place, another mask number, another op that applies it",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
