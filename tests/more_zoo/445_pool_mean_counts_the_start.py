"""scatter_reduce counts what the buffer began with: include_self is left at True. Ref: pytorch/pytorch#142330"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Pool(nn.Module):
    def __init__(self, include):
        super().__init__()
        self.include = include

    def forward(self, x, graph):
        index = graph[:, None].expand_as(x)
        return x.new_zeros(3, x.shape[1]).scatter_reduce(0, index, x, "mean", include_self=self.include)


class Net(nn.Module):
    def __init__(self, include):
        super().__init__()
        torch.manual_seed(0)
        self.node, self.pool, self.head = nn.Linear(6, 16), Pool(include), nn.Linear(16, 2)

    def forward(self, x, graph):
        return self.head(self.pool(F.gelu(self.node(x)), graph))


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    return torch.randn(10, 6), torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 2])


EXPECT = {
    "where": {"module": "pool", "op": "aten.scatter_reduce.two"},
    "kind": "argument",
    "note": "every mean is too small, by a factor of its own",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
