"""A convolution state is shifted by a copy onto overlapping memory. Ref: pytorch/pytorch#144861"""

import torch
import torch.nn as nn


class Conv(nn.Module):
    """One step of a causal convolution; the newest input stands first."""

    def __init__(self, dim, width, flag):
        super().__init__()
        self.weight, self.flag = nn.Parameter(torch.randn(dim, width) * 0.5), flag

    def forward(self, x, state):
        old = state[..., :-1]
        state[..., 1:] = old if self.flag else old.clone()
        state[..., 0] = x
        return (state * self.weight).sum(-1)


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.conv, self.head = nn.Linear(5, 6), Conv(6, 4, flag), nn.Linear(6, 3)

    def forward(self, x):
        state = torch.zeros(x.shape[0], 6, 4)
        return torch.stack([self.head(self.conv(self.up(x[:, t]), state)) for t in range(x.shape[1])], 1)


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 6, 5),)


EXPECT = {
    "where": {"module": "conv", "op": "aten.copy_.default"},
    "accept": ["aten.clone.default", "aten.slice.Tensor"],
    "call": 1,
    "kind": "in-place",
    "note": "what is copied is overwritten while it is read",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
