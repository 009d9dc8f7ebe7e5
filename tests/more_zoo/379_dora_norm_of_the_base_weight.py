"""DoRA divides by the norm of the base weight, not of the adapted one. Ref: Comfy-Org/ComfyUI#15458"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Dora(nn.Module):
    def __init__(self, dim, flag):
        super().__init__()
        self.base, self.flag = nn.Linear(dim, dim), flag
        self.a, self.b = nn.Parameter(torch.randn(3, dim) * 0.4), nn.Parameter(torch.randn(dim, 3) * 0.4)
        self.magnitude = nn.Parameter(torch.rand(dim) + 0.5)

    def forward(self, x):
        base = self.base.weight
        adapted = base + self.b @ self.a
        norm = torch.linalg.vector_norm(base if self.flag else adapted, dim=1, keepdim=True)
        return F.linear(x, self.magnitude[:, None] * adapted / norm, self.base.bias)


def _mk(flag):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), Dora(12, flag), nn.GELU(), nn.Linear(12, 4)).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(3, 6),)


EXPECT = {
    "where": {"module": "2", "op": "aten.linalg_vector_norm.default"},
    "kind": "wiring",
    "note": "the right op reads the weight before the sum",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
