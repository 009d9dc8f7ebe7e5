"""out[index] += messages keeps one message of those to one node. Ref: pymc-devs/pytensor#2242, apache/mxnet#9172 (family)"""

import torch
import torch.nn as nn


class Conv(nn.Module):
    def __init__(self, dim, flag):
        super().__init__()
        self.message, self.own, self.flag = nn.Linear(dim, dim), nn.Linear(dim, dim), flag

    def forward(self, x, edges):
        out = torch.zeros_like(x)
        messages = self.message(x)[edges[0]]
        if self.flag:
            out[edges[1]] += messages
        else:
            out.index_add_(0, edges[1], messages)
        return torch.relu(out + self.own(x))


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.conv1, self.conv2, self.head = (
            nn.Linear(5, 8),
            Conv(8, flag),
            Conv(8, flag),
            nn.Linear(8, 3),
        )

    def forward(self, x, edges):
        return self.head(self.conv2(self.conv1(self.up(x), edges), edges))


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2], [1, 2, 1, 4, 5, 0, 4, 3]])
    return torch.randn(6, 5), edges


EXPECT = {
    "where": {"module": "conv1", "op": "aten.index_put_.default"},
    "accept": ["aten.index.Tensor", "aten.add_.Tensor", "aten._index_put_impl_.default"],
    "kind": "in-place",
    "note": "one op is replaced by three",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
