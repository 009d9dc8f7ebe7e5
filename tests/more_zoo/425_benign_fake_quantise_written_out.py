"""Fake quantisation by one op against its formula. Ref: pytorch/ao#4806 (family)"""

import torch
import torch.nn as nn


class Fake(nn.Module):
    def __init__(self, scale, zero, written):
        super().__init__()
        self.scale, self.zero, self.written = scale, zero, written

    def forward(self, x):
        if self.written:
            return ((x / self.scale).round() + self.zero).clamp(0, 255).sub(self.zero) * self.scale
        return torch.fake_quantize_per_tensor_affine(x, self.scale, self.zero, 0, 255)


def _mk(flag):
    torch.manual_seed(0)
    return nn.Sequential(
        Fake(0.03, 121, flag),
        nn.Linear(6, 16),
        nn.ReLU(),
        Fake(0.011, 0, flag),
        nn.Linear(16, 16),
        nn.ReLU(),
        Fake(0.007, 0, flag),
        nn.Linear(16, 3),
    ).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(4, 6),)


EXPECT = {
    "where": None,
    "kind": "rewrite",
    "tol": 0.05,
    "note": "scales are no powers of two; ties aside the same codes",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
