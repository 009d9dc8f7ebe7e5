"""A running sum is the constant of zeros itself, and changes it. Ref: kpot/keras-transformer#3"""

import torch
import torch.nn as nn


class Ponder(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.step, self.halt = nn.Linear(8, 8), nn.Linear(8, 1)
        self.shared = shared

    def forward(self, x):
        zeros = torch.zeros(x.shape[0], 1)
        remainder = zeros if self.shared else zeros.clone()
        total, out = torch.zeros_like(zeros), torch.zeros_like(x)
        for _ in range(4):
            x = torch.tanh(self.step(x))
            p = torch.sigmoid(self.halt(x))
            last = (total + p > 0.9) & (total < 0.9)
            remainder += torch.where(last, 1 - total, zeros)
            share = torch.where(last, 1 - total, torch.where(total < 0.9, p, zeros))
            total = total + share
            out = out + share * x
        return out * (1 + remainder)


class Net(nn.Module):
    def __init__(self, shared):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.ponder, self.head = nn.Linear(5, 8), Ponder(shared), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.ponder(self.embed(x)))


def reference():
    return Net(False)


def target():
    return Net(True)


def inputs():
    torch.manual_seed(1)
    return (2 * torch.randn(6, 5),)


EXPECT = {
    "where": {"module": "ponder", "op": "aten.add_.Tensor"},
    "accept": ["aten.where.self", "aten.clone.default"],
    "kind": "aliasing",
    "note": "a copy is missing; the write is right for one name of the memory and wrong for the other",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
