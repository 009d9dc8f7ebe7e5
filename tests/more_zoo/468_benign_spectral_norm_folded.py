"""A weight divided by its norm when it was exported, not in each call. Ref: pytorch/pytorch#8208 (family), pytorch/pytorch#48181 (family)"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parametrizations, parametrize


class Net(nn.Module):
    def __init__(self, folded):
        super().__init__()
        torch.manual_seed(0)
        self.inp = nn.Conv2d(3, 6, 3, padding=1)
        self.body = parametrizations.spectral_norm(nn.Conv2d(6, 6, 3, padding=1))
        self.out = parametrizations.spectral_norm(nn.Linear(6, 2))
        self.eval()
        if folded:
            parametrize.remove_parametrizations(self.body, "weight")
            parametrize.remove_parametrizations(self.out, "weight")

    def forward(self, x):
        return self.out(F.relu(self.body(F.relu(self.inp(x)))).mean((2, 3)))


def reference():
    return Net(False)


def target():
    return Net(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 3, 8, 8),)


EXPECT = {"where": None, "kind": "rewrite", "tol": 1e-5, "note": "weights of one name hold other numbers"}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
