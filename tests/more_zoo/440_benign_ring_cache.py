"""A ring of a sliding window's size against a cache of everything and a mask. Ref: ml-explore/mlx-lm#430 (family)"""

import torch
import torch.nn as nn


class Attention(nn.Module):
    def __init__(self, dim, window, ring):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.window, self.ring = window, ring

    def forward(self, x, keys, values, t):
        at = t % self.window if self.ring else t
        keys[:, at], values[:, at] = self.k(x), self.v(x)
        first = 0 if self.ring else max(0, t + 1 - self.window)
        last = min(t + 1, self.window) if self.ring else t + 1
        k, v = keys[:, first:last], values[:, first:last]
        shares = ((k @ self.q(x)[..., None])[..., 0] / x.shape[-1] ** 0.5).softmax(-1)
        return self.o((shares[:, None] @ v)[:, 0])


class Net(nn.Module):
    def __init__(self, ring):
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.head, self.size = Attention(8, 3, ring), nn.Linear(8, 4), 3 if ring else 8

    def forward(self, x):
        keys, values = torch.zeros(2, x.shape[0], self.size, 8).unbind(0)
        return torch.stack(
            [self.head(self.attention(x[:, t], keys, values, t)) for t in range(x.shape[1])], 1
        )


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 8, 8),)


EXPECT = {
    "where": None,
    "kind": "layout",
    "tol": 1e-5,
    "note": "keys in another order of slots; scores are permuted",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
