"""A bilinear layer against one contraction over all of its indices. Ref: pytorch/pytorch#124025 (family), google-research/bert#1065 (family)"""

import torch
import torch.nn as nn


class Written(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, a, b):
        return torch.einsum("bi,oij,bj->bo", a, self.weight, b) + self.bias


class Net(nn.Module):
    def __init__(self, written):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.join, self.out = (
            nn.Linear(5, 6),
            nn.Linear(5, 7),
            nn.Bilinear(6, 7, 9),
            nn.Linear(9, 2),
        )
        if written:
            self.join = Written(self.join)

    def forward(self, x):
        return self.out(torch.relu(self.join(self.a(x).sin(), self.b(x).cos())))


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    return (torch.randn(8, 5),)


EXPECT = {"where": None, "kind": "rewrite", "tol": 1e-5, "note": "products in another order of contraction"}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
