"""Means of sorted segments from a running sum at their ends against sums by index. Ref: pyg-team/pytorch_geometric#2219 (family), pytorch/pytorch#142330 (family)"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Pool(nn.Module):
    def __init__(self, running):
        super().__init__()
        self.running = running

    def forward(self, x, segment):
        counts = torch.bincount(segment, minlength=3)
        if self.running:
            ends = F.pad(counts.cumsum(0), (1, 0))
            sums = F.pad(x.cumsum(0), (0, 0, 1, 0))[ends]
            total = sums[1:] - sums[:-1]
        else:
            total = x.new_zeros(3, x.shape[1]).index_add(0, segment, x)
        return total / counts[:, None]


class Net(nn.Module):
    def __init__(self, running):
        super().__init__()
        torch.manual_seed(0)
        self.node, self.pool, self.head = nn.Linear(6, 16), Pool(running), nn.Linear(16, 2)

    def forward(self, x, segment):
        return self.head(self.pool(F.gelu(self.node(x)), segment))


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    return torch.randn(10, 6), torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 2])


EXPECT = {"where": None, "kind": "rewrite", "tol": 1e-5, "note": "differences of running sums"}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
