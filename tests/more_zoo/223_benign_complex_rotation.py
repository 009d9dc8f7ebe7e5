"""Rotary pairs multiplied as complex numbers. Ref: huggingface/candle#3948 (family)"""

import torch
import torch.nn as nn


class Rope(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.flag = flag

    def forward(self, x, pos):
        angle = pos[:, None] * 100.0 ** (-torch.arange(0, 8) / 8)
        if self.flag:
            turned = torch.view_as_complex(x.unflatten(-1, (8, 2))) * torch.polar(
                torch.ones_like(angle), angle
            )
            return torch.view_as_real(turned).flatten(-2)
        a, b = x[..., ::2], x[..., 1::2]
        c, s = angle.cos(), angle.sin()
        return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.q, self.k, self.rope, self.out = (
            nn.Linear(16, 16),
            nn.Linear(16, 16),
            Rope(flag),
            nn.Linear(16, 4),
        )

    def forward(self, x):
        pos = torch.arange(x.shape[0], dtype=torch.float32)
        q, k = self.rope(self.q(x), pos), self.rope(self.k(x), pos)
        return self.out((q @ k.t() * 0.25).softmax(-1) @ x)


def _mk(flag):
    torch.manual_seed(0)
    return Net(flag).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(9, 16),)


EXPECT = {
    "where": None,
    "kind": "benign-decomposition",
    "tol": 2e-6,
    "note": "complex numbers inside one module on one side only",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
