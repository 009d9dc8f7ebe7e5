"""A sliding window's ring wraps one slot early and overwrites what is still to be read. Ref: JustVugg/colibri#830 (family), ollama/ollama#14912 (family)"""

import torch
import torch.nn as nn


class Attention(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.wrap = wrap

    def forward(self, x, keys, values, t):
        keys[:, t % self.wrap] = self.k(x)
        values[:, t % self.wrap] = self.v(x)
        n = min(t + 1, self.wrap)
        scores = (keys[:, :4] @ self.q(x)[:, :, None])[..., 0] / 8**0.5
        scores = scores.masked_fill(torch.arange(4) >= n, float("-inf"))
        return (scores.softmax(-1)[:, None] @ values[:, :4])[:, 0]


class Net(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.head = Attention(wrap), nn.Linear(8, 3)

    def forward(self, x):
        keys, values = torch.zeros(2, x.shape[0], 4, 8).unbind(0)
        return torch.stack(
            [self.head(self.attention(x[:, t], keys, values, t)) for t in range(x.shape[1])], 1
        )


def reference():
    return Net(4)


def target():
    return Net(3)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 7, 8),)


EXPECT = {
    "where": {"module": "attention", "op": "aten.copy_.default"},
    "accept": ["aten.select.int", "aten.ge.Scalar"],
    "call": 3,
    "kind": "cache-state",
    "note": "the right value is written to another slot of memory that outlives the call",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
