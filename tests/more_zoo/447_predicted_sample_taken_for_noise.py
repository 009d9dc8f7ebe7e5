"""The scheduler takes the predicted sample for the noise where it steps. Ref: huggingface/diffusers#1486, huggingface/diffusers#2094"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Scheduler(nn.Module):
    def __init__(self, right):
        super().__init__()
        self.right = right
        self.register_buffer("alphas", torch.tensor([0.99, 0.8, 0.45, 0.1]))

    def forward(self, predicted, sample, t):
        now, before = self.alphas[t], self.alphas[t - 1]
        noise = (sample - now.sqrt() * predicted) / (1 - now).sqrt() if self.right else predicted
        return before.sqrt() * predicted + (1 - before).sqrt() * noise


class Net(nn.Module):
    def __init__(self, right):
        super().__init__()
        torch.manual_seed(0)
        self.scheduler = Scheduler(right)
        self.inp, self.norm, self.out = (
            nn.Conv2d(2, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.Conv2d(8, 2, 3, padding=1),
        )

    def forward(self, x):
        for t in (3, 2, 1):
            x = self.scheduler(self.out(F.silu(self.norm(self.inp(x)))), x, t)
        return x


def reference():
    return Net(True).eval()


def target():
    return Net(False).eval()


def inputs():
    torch.manual_seed(1)
    return (torch.randn(1, 2, 8, 8),)


EXPECT = {
    "where": {"module": "scheduler", "op": "aten.mul.Tensor"},
    "accept": ["aten.div.Tensor", "aten.sub.Tensor"],
    "missing_op": "aten.div.Tensor",
    "kind": "wiring",
    "note": "ops are missing, and what they read is read in their place",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
