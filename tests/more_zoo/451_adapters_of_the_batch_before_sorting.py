"""Requests are sorted by length, and the adapters that they ask for are not. Ref: vllm-project/vllm#47724, vllm-project/vllm#16694 (family)"""

import torch
import torch.nn as nn


class Adapted(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.base = nn.Linear(dim, dim)
        self.a = nn.Parameter(torch.randn(4, dim, 3) / dim**0.5)
        self.b = nn.Parameter(torch.randn(4, 3, dim) / 3**0.5)

    def forward(self, x, adapters):
        return self.base(x) + x @ self.a[adapters] @ self.b[adapters]


class Net(nn.Module):
    def __init__(self, sorts_adapters):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.proj, self.head = nn.Embedding(30, 10), Adapted(10), nn.Linear(10, 5)
        self.sorts_adapters = sorts_adapters

    def forward(self, ids, lengths, adapters):
        order = lengths.argsort(descending=True)
        x = self.embed(ids[order])
        chosen = adapters[order] if self.sorts_adapters else adapters
        out = self.head(torch.tanh(self.proj(x, chosen)))
        return out[order.argsort()]


def reference():
    return Net(True).eval()


def target():
    return Net(False).eval()


def inputs():
    torch.manual_seed(1)
    return torch.randint(0, 30, (4, 6)), torch.tensor([3, 6, 2, 5]), torch.tensor([0, 1, 2, 3])


EXPECT = {
    "where": {"module": "", "op": None},
    "missing_op": "aten.index.Tensor",
    "kind": "wiring",
    "note": "the caller hands over the numbers as they came; the adapted layer is right",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
