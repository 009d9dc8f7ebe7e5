"""A hand-written norm takes the standard deviation over n - 1. Ref: harvardnlp/annotated-transformer#119, LBANN/lbann#2024"""

import torch
import torch.nn as nn


class Norm(nn.Module):
    def __init__(self, size, correction):
        super().__init__()
        self.a, self.b, self.correction = (
            nn.Parameter(torch.ones(size)),
            nn.Parameter(torch.zeros(size)),
            correction,
        )

    def forward(self, x):
        mean, deviation = x.mean(-1, keepdim=True), x.std(-1, keepdim=True, correction=self.correction)
        return self.a * (x - mean) / (deviation + 1e-6) + self.b


def _mk(correction):
    torch.manual_seed(0)
    layers = [
        nn.Linear(8, 12),
        Norm(12, correction),
        nn.GELU(),
        nn.Linear(12, 12),
        Norm(12, 0),
        nn.Linear(12, 4),
    ]
    return nn.Sequential(*layers).eval().to(torch.bfloat16)


def reference():
    return _mk(0)


def target():
    return _mk(1)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(6, 8).to(torch.bfloat16),)


EXPECT = {
    "where": {"module": "1", "op": "aten.std.correction"},
    "accept": ["aten.var.correction", "aten.var_mean.correction"],
    "kind": "argument",
    "note": "bfloat16 on both sides; 4 % of a divisor",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
