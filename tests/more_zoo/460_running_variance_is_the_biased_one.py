"""The running variance is updated with the biased estimate, the eval pass that follows reads it. Ref: ml-explore/mlx#3817, tenstorrent/tt-metal#55438"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Norm(nn.Module):
    def __init__(self, dim, correction):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(dim) + 0.5), nn.Parameter(torch.randn(dim))
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("var", torch.ones(dim))
        self.correction = correction

    def forward(self, x, learn):
        if learn:
            mean, var = x.mean(0), x.var(0, correction=0)
            self.mean.lerp_(mean, 0.5)
            self.var.lerp_(x.var(0, correction=self.correction), 0.5)
        else:
            mean, var = self.mean, self.var
        return (x - mean) * (var + 1e-5).rsqrt() * self.weight + self.bias


class Net(nn.Module):
    def __init__(self, correction):
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.norm, self.out = nn.Linear(5, 10), Norm(10, correction), nn.Linear(10, 3)

    def run(self, x, learn):
        return self.out(F.relu(self.norm(self.inp(x), learn)))

    def forward(self, x, y):
        return self.run(x, True).sum() + self.run(y, False)


def reference():
    return Net(1)


def target():
    return Net(0)


def inputs():
    torch.manual_seed(1)
    return torch.randn(6, 5), torch.randn(4, 5)


EXPECT = {
    "where": {"module": "norm", "op": "aten.var.correction"},
    "accept": ["aten.lerp_.Scalar"],
    "kind": "statistics",
    "note": "the call that goes wrong returns the right result: what it keeps for the next one is wrong",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
