"""All products are written into one buffer made ahead. Ref: pytorch/pytorch#148439 (family)"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(16, 16))
        self.buffer = None

    def forward(self, x):
        return F.gelu(x @ self.weight if self.buffer is None else torch.mm(x, self.weight, out=self.buffer))


class Net(nn.Module):
    def __init__(self, shared):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(4)), nn.Linear(16, 3)
        if shared:
            buffer = torch.empty(5, 16)
            for layer in self.layers:
                layer.buffer = buffer

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def reference():
    return Net(False)


def target():
    return Net(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(5, 16),)


EXPECT = {
    "where": None,
    "kind": "benign-memory",
    "tol": 1e-6,
    "note": "memory written to four times, and read before it is written to again",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
