"""A norm's weight is stored with one added; the norm no longer adds it. Ref: ggml-org/llama.cpp#13951 (family), mlc-ai/mlc-llm#3485 (family)"""

import torch
import torch.nn as nn


class Norm(nn.Module):
    def __init__(self, dim, one):
        super().__init__()
        self.weight, self.one = nn.Parameter(torch.randn(dim) * 0.3), one
        if not one:
            self.weight.data += 1

    def forward(self, x):
        x = x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        return x * (1 + self.weight) if self.one else x * self.weight


class Block(nn.Module):
    def __init__(self, dim, one):
        super().__init__()
        self.norm, self.up, self.down = Norm(dim, one), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def _mk(flag):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(20, 8), Block(8, not flag), Block(8, not flag), Norm(8, not flag), nn.Linear(8, 20)
    ).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 20, (2, 7)),)


EXPECT = {
    "where": None,
    "kind": "rewrite",
    "tol": 1e-5,
    "note": "every norm's weight differs and heals in its own module",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
