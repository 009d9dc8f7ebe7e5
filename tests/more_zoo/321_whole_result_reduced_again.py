"""A layer that was not sharded hands its whole result to a sum over ranks. Ref: lightseekorg/tokenspeed#80"""

import torch
import torch.nn as nn


class FeedForward(nn.Module):
    """Two ranks run one after the other; the sum stands for the all-reduce."""

    def __init__(self, flag):
        super().__init__()
        self.up, self.down, self.flag = nn.Linear(12, 32), nn.Linear(32, 12, bias=False), flag

    def forward(self, x):
        hidden = torch.relu(self.up(x))
        if self.flag:  # each rank holds the whole layer
            parts = [hidden @ self.down.weight.t() for _ in range(2)]
        else:
            parts = [
                h @ w.t() for h, w in zip(hidden.chunk(2, -1), self.down.weight.chunk(2, -1), strict=True)
            ]
        return parts[0] + parts[1]


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.mlp, self.head = nn.LayerNorm(12), FeedForward(flag), nn.Linear(12, 5)

    def forward(self, x):
        return self.head(x + self.mlp(self.norm(x)))


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    return (torch.randn(3, 12),)


EXPECT = {
    "where": {"module": "mlp", "op": "aten.add.Tensor"},
    "accept": ["aten.mm.default", "aten.split.Tensor", "aten.t.default"],
    "kind": "tensor-parallel",
    "note": "each product is right by itself and twice too much together",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
