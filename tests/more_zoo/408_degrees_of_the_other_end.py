"""Degrees are counted at the sources of directed edges. Ref: pyg-team/pytorch_geometric#5149, pyg-team/pytorch_geometric#10042"""

import torch
import torch.nn as nn


class Conv(nn.Module):
    def __init__(self, dim, flag):
        super().__init__()
        self.proj, self.flag = nn.Linear(dim, dim, bias=False), flag

    def forward(self, x, edges):
        source, destination = edges
        degree = torch.ones(x.shape[0]).scatter_add(
            0, source if self.flag else destination, torch.ones(edges.shape[1])
        )
        root = degree.rsqrt()
        x = self.proj(x)
        out = x / degree[:, None]
        return out.index_add(0, destination, x[source] * (root[source] * root[destination])[:, None])


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.conv2, self.head = Conv(5, flag), Conv(5, flag), nn.Linear(5, 3)

    def forward(self, x, edges):
        return self.head(self.conv2(torch.relu(self.conv1(x, edges)), edges))


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2], [1, 2, 1, 4, 5, 0, 4, 3]])
    return torch.randn(6, 5), edges


EXPECT = {
    "where": {"module": "conv1", "op": "aten.scatter_add.default"},
    "accept": ["aten.select.int", "aten.unbind.int"],
    "kind": "wiring",
    "note": "the other row of an integer input",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
