"""A module hands out the same output buffer each call; the first result is overwritten. Ref: pytorch/pytorch#148439, pytorch/pytorch#144386"""

import torch
import torch.nn as nn


class Encoder(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(12, 24), nn.Linear(24, 8)
        self.register_buffer("buffer", torch.zeros(3, 8))
        self.flag = flag

    def forward(self, x):
        self.buffer.copy_(self.fc2(torch.tanh(self.fc1(x))))
        return self.buffer if self.flag else self.buffer.clone()


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.encoder, self.head = Encoder(flag), nn.Bilinear(8, 8, 2)

    def forward(self, left, right):
        a = self.encoder(left)
        b = self.encoder(right)
        return self.head(a, b)


def _mk(flag):
    torch.manual_seed(0)
    return Net(flag).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return torch.randn(3, 12), torch.randn(3, 12)


EXPECT = {
    "where": {"module": "encoder", "op": "aten.copy_.default"},
    "accept": ["aten.clone.default"],
    "kind": "aliasing",
    "note": "both calls return the right values; the first is overwritten before it is read",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
