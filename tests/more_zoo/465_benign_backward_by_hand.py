"""A function with a backward pass of its own against autograd's, in a training step with momentum. Ref: pytorch/pytorch#145041 (family), linkedin/Liger-Kernel#254 (family)"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class GatedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return F.silu(a) * b

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        s = torch.sigmoid(a)
        return grad * b * (s + a * s * (1 - s)), grad * a * s


class Gate(nn.Module):
    def __init__(self, by_hand):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(6, 8)
        self.by_hand = by_hand

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        return GatedFunction.apply(a, b) if self.by_hand else F.silu(a) * b


class Training(nn.Module):
    def __init__(self, by_hand):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(Gate(by_hand), nn.LayerNorm(8), nn.Linear(8, 2))

    def forward(self, x, y):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        with torch.enable_grad():
            for _ in range(2):
                optimizer.zero_grad()
                F.mse_loss(self.net(x), y).backward()
                optimizer.step()
        return self.net(x)


def reference():
    return Training(False)


def target():
    return Training(True)


def inputs():
    torch.manual_seed(1)
    return torch.randn(9, 6), torch.randn(9, 2)


EXPECT = {
    "where": None,
    "kind": "autograd",
    "tol": 1e-5,
    "note": "the derivative of SiLU by one op against six",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
