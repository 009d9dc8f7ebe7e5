"""Messages run against the edges: the sparse matrix is transposed. Ref: pytorch/pytorch#14617, pytorch/pytorch#6219"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Conv(nn.Module):
    def __init__(self, i, o, transposed):
        super().__init__()
        self.lin = nn.Linear(i, o)
        self.transposed = transposed

    def forward(self, x, edges, weights):
        adjacency = torch.sparse_coo_tensor(edges, weights, (x.shape[0], x.shape[0]))
        if self.transposed:
            adjacency = adjacency.t()
        return torch.sparse.mm(adjacency, self.lin(x))


class Net(nn.Module):
    def __init__(self, transposed):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Conv(5, 8, False), Conv(8, 3, transposed)

    def forward(self, x, edges, weights):
        return self.second(F.relu(self.first(x, edges, weights)), edges, weights)


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    edges = torch.tensor([[0, 1, 1, 2, 3, 4, 5], [1, 2, 0, 3, 5, 0, 4]])
    return torch.randn(6, 5), edges, torch.rand(7) + 0.5


EXPECT = {
    "where": {"module": "second", "op": "aten._sparse_addmm.default"},
    "accept": ["aten.t.default"],
    "extra_op": "aten.t.default",
    "kind": "sparse",
    "note": "a view of a sparse tensor",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
