"""Guidance by one call on a batch of both halves, or by two calls. Ref: huggingface/transformers#24536, microsoft/mattergen#203"""

import torch
import torch.nn as nn


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.cond, self.norm, self.out = (
            nn.Linear(6, 12),
            nn.Linear(4, 12),
            nn.LayerNorm(12),
            nn.Linear(12, 6),
        )

    def forward(self, x, c):
        return self.out(torch.tanh(self.norm(self.inp(x) + self.cond(c))))


class Guided(nn.Module):
    def __init__(self, two_calls):
        super().__init__()
        torch.manual_seed(0)
        self.model, self.two_calls = Denoiser(), two_calls

    def forward(self, x, c):
        for _ in range(3):
            if self.two_calls:
                free, bound = self.model(x, torch.zeros_like(c)), self.model(x, c)
            else:
                both = self.model(torch.cat((x, x)), torch.cat((torch.zeros_like(c), c)))
                free, bound = both.chunk(2)
            x = x - 0.3 * (free + 2.5 * (bound - free))
        return x


def reference():
    return Guided(False).eval()


def target():
    return Guided(True).eval()


def inputs():
    torch.manual_seed(1)
    return torch.randn(3, 6), torch.randn(3, 4)


EXPECT = {
    "where": None,
    "kind": "batching",
    "tol": 1e-5,
    "note": "twice as many calls of half the rows: calls do not correspond by number",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
