"""A row-parallel linear adds its bias on every rank before the sum. Ref: huggingface/text-generation-inference#1036, Wenyueh/MinivLLM#80"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class RowParallel(nn.Module):
    """Two ranks' parts of one linear, summed as an all-reduce would."""

    def __init__(self, flag):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(16, 32) * 0.2), nn.Parameter(torch.randn(16))
        self.flag = flag

    def forward(self, x):
        parts = zip(x.chunk(2, -1), self.weight.chunk(2, -1), strict=True)
        if self.flag:
            a, b = (F.linear(part, weight, self.bias) for part, weight in parts)
            return a + b
        a, b = (F.linear(part, weight) for part, weight in parts)
        return a + b + self.bias


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 32), RowParallel(flag), nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(x + self.down(F.gelu(self.up(x))))


def _mk(flag):
    torch.manual_seed(0)
    return Net(flag).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(4, 16),)


EXPECT = {
    "where": {"module": "down", "op": "aten.add.Tensor"},
    "accept": ["aten.addmm.default"],
    "kind": "tensor-parallel",
    "note": "each part with its bias is no error by itself; the sum holds the bias twice",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
