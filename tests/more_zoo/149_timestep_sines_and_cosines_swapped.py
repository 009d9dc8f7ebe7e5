"""The halves of the timestep embedding are in the wrong order. Ref: flashinfer-ai/flashinfer#3819, huggingface/diffusers#1369"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Timesteps(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.flag = flag

    def forward(self, t):
        angle = t[:, None] * torch.exp(-torch.arange(8) * (9.21034 / 8))
        halves = (angle.cos(), angle.sin())
        return torch.cat(halves[::-1] if self.flag else halves, -1)


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.time, self.mlp = Timesteps(flag), nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 8))
        self.block = nn.Linear(8, 8)

    def forward(self, x, t):
        return self.block(F.layer_norm(x, (8,)) * (1 + self.mlp(self.time(t))))


def _mk(flag):
    torch.manual_seed(0)
    return Net(flag).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return torch.randn(3, 8), torch.tensor([1.0, 250.0, 999.0])


EXPECT = {
    "where": {"module": "time", "op": "aten.cat.default"},
    "accept": ["aten.sin.default", "aten.cos.default"],
    "kind": "order",
    "note": "both operands are right values in each other's place",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
