"""Each rank adds its share of the residual before the sum over ranks. Ref: mlc-ai/mlc-llm#941"""

import torch
import torch.nn as nn


class Net(nn.Module):
    """Two ranks run one after the other; the sum stands for the all-reduce."""

    def __init__(self, shares):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down, self.head = (
            nn.LayerNorm(12),
            nn.Linear(12, 32),
            nn.Linear(32, 12, bias=False),
            nn.Linear(12, 5),
        )
        self.shares = shares

    def forward(self, x):
        hidden = torch.relu(self.up(self.norm(x)))
        parts = [h @ w.t() for h, w in zip(hidden.chunk(2, -1), self.down.weight.chunk(2, -1), strict=True)]
        if self.shares:
            parts = [part + x / 2 for part in parts]
            return self.head(parts[0] + parts[1])
        return self.head(x + (parts[0] + parts[1]))


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    return (torch.randn(3, 12),)


EXPECT = {
    "where": None,
    "kind": "rewrite",
    "tol": 1e-5,
    "note": "ops between the products and the sum, and no residual behind it",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
