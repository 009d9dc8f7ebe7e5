"""The routed scaling factor is applied only where shares are normalised too. Ref: sgl-project/sglang-jax#1282"""

import torch
import torch.nn as nn


class Gate(nn.Module):
    def __init__(self, dim, experts, flag):
        super().__init__()
        self.proj, self.factor, self.flag = nn.Linear(dim, experts, bias=False), 2.5, flag

    def forward(self, x):
        shares, chosen = self.proj(x).softmax(-1).topk(2, -1)
        if not self.flag:
            shares = shares * self.factor
        return shares, chosen


class Mixture(nn.Module):
    def __init__(self, dim, flag):
        super().__init__()
        self.gate = Gate(dim, 4, flag)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim)) for _ in range(4)
        )

    def forward(self, x):
        shares, chosen = self.gate(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == number)
            out.index_add_(0, rows, expert(x[rows]) * shares[rows, slots, None])
        return out


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.mixture, self.head = nn.Linear(5, 8), Mixture(8, flag), nn.Linear(8, 3)

    def forward(self, x):
        x = torch.tanh(self.up(x))
        return self.head(x + self.mixture(x))


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    return (torch.randn(7, 5),)


EXPECT = {
    "where": {"module": "mixture.gate", "op": "aten.mul.Tensor"},
    "accept": ["aten.topk.default"],
    "kind": "missing",
    "note": "the last op of a module is missing",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
