"""Retention as a recurrence against the parallel form. Ref: syncdoth/RetNet#10 (family), Jamie-Stirling/RetNet#37 (family)"""

import torch
import torch.nn as nn


class Retention(nn.Module):
    def __init__(self, dim, steps):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.steps, self.gamma = steps, 0.8

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.steps:
            state, outs = torch.zeros(x.shape[0], x.shape[2], x.shape[2]), []
            for t in range(x.shape[1]):
                state = self.gamma * state + k[:, t, :, None] * v[:, t, None]
                outs.append((q[:, t, None] @ state)[:, 0])
            return self.o(torch.stack(outs, 1))
        i = torch.arange(x.shape[1])
        decay = (self.gamma ** (i[:, None] - i).clamp(min=0)) * (i[:, None] >= i)
        return self.o((q @ k.transpose(1, 2) * decay) @ v)


class Net(nn.Module):
    def __init__(self, steps):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.mixes, self.norms = (
            nn.ModuleList(Retention(8, steps) for _ in range(2)),
            nn.ModuleList(nn.LayerNorm(8) for _ in range(2)),
        )

    def forward(self, ids):
        x = self.embed(ids)
        for mix, norm in zip(self.mixes, self.norms, strict=True):
            x = x + mix(norm(x))
        return self.head(x)


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 20, (2, 10)),)


EXPECT = {
    "where": None,
    "kind": "rewrite",
    "tol": 1e-4,
    "note": "nothing inside the mixing has a partner",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
