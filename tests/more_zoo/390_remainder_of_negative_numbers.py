"""A remainder keeps the sign of the dividend. Ref: brian-team/brian2#286, pyccel/pyccel#166"""

import torch
import torch.nn as nn


class Distance(nn.Module):
    def __init__(self, heads, period, flag):
        super().__init__()
        self.proj, self.period, self.flag = nn.Linear(1, heads), period, flag

    def forward(self, n):
        relative = torch.arange(n)[None] - torch.arange(n)[:, None]
        phase = torch.fmod(relative, self.period) if self.flag else torch.remainder(relative, self.period)
        return self.proj(phase[..., None] / self.period).permute(2, 0, 1)


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.distance, self.head = nn.Linear(6, 8), Distance(2, 4, flag), nn.Linear(8, 3)

    def forward(self, x):
        x = self.up(x)
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        shares = (heads @ heads.transpose(-1, -2) + self.distance(x.shape[1])).softmax(-1)
        return self.head((shares @ heads).transpose(1, 2).flatten(2))


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 7, 6),)


EXPECT = {
    "where": {"module": "distance", "op": "aten.fmod.Scalar"},
    "accept": ["aten.remainder.Scalar", "aten.fmod.Tensor"],
    "kind": "argument",
    "note": "integers; only differences below zero are wrong",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
