"""Messages of a graph by a product with the adjacency matrix against a scatter. Ref: pyg-team/pytorch_geometric#2219 (family)"""

import torch
import torch.nn as nn


class Conv(nn.Module):
    def __init__(self, n, m, dense):
        super().__init__()
        self.own, self.other, self.dense = nn.Linear(n, m), nn.Linear(n, m, bias=False), dense

    def forward(self, x, edges):
        source, destination = edges
        if self.dense:
            matrix = torch.zeros(x.shape[0], x.shape[0])
            matrix[destination, source] = 1
            return self.own(x) + self.other(matrix @ x / matrix.sum(1, keepdim=True).clamp(min=1))
        messages = self.other(x)[source]
        count = torch.zeros(x.shape[0]).scatter_add_(0, destination, torch.ones(source.shape[0])).clamp(min=1)
        return (
            self.own(x)
            + torch.zeros_like(messages[:1]).expand(x.shape[0], -1).index_add(0, destination, messages)
            / count[:, None]
        )


class Net(nn.Module):
    def __init__(self, dense):
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.conv2, self.head = Conv(5, 8, dense), Conv(8, 8, dense), nn.Linear(8, 3)

    def forward(self, x, edges):
        return self.head(torch.relu(self.conv2(torch.relu(self.conv1(x, edges)), edges)).mean(0))


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2], [1, 2, 1, 4, 5, 0, 4, 3]])
    return torch.randn(6, 5), edges


EXPECT = {
    "where": None,
    "kind": "rewrite",
    "tol": 1e-5,
    "note": "the linear map comes behind the mean, not before it",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
