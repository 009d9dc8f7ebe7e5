"""A flow whose halves are kept apart against columns that alternate. Ref: karpathy/pytorch-normalizing-flows#10 (family)"""

import torch
import torch.nn as nn


class Coupling(nn.Module):
    def __init__(self, dim, apart):
        super().__init__()
        self.scale, self.shift = nn.Linear(dim // 2, dim // 2), nn.Linear(dim // 2, dim // 2)
        self.apart = apart

    def forward(self, x):
        a, b = x.chunk(2, -1) if self.apart else (x[:, ::2], x[:, 1::2])
        b = b * self.scale(a).tanh().exp() + self.shift(a)
        return torch.cat([b, a], 1) if self.apart else torch.stack([b, a], 2).flatten(1)


class Net(nn.Module):
    def __init__(self, apart):
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.flows, self.out = (
            nn.Linear(5, 6),
            nn.Sequential(*(Coupling(6, apart) for _ in range(3))),
            nn.Linear(6, 3),
        )
        if apart:
            order = torch.tensor([0, 2, 4, 1, 3, 5])
            self.inp.weight.data, self.inp.bias.data = self.inp.weight.data[order], self.inp.bias.data[order]
            self.out.weight.data = self.out.weight.data[:, order].contiguous()

    def forward(self, x):
        return self.out(self.flows(self.inp(x)))


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    return (torch.randn(4, 5),)


EXPECT = {
    "where": None,
    "kind": "layout",
    "tol": 1e-5,
    "note": "hidden columns in another order from the first weight to the last",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
