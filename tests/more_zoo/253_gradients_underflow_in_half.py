"""float16 gradients without a scale of the loss vanish. Ref: engichang1467/Open-Rig3R#35, pytorch/pytorch#26512 (family)"""

import torch
import torch.nn as nn


class Train(nn.Module):
    def __init__(self, scale):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).half()
        self.scale = scale

    def forward(self, x, y):
        with torch.enable_grad():
            loss = (self.net(x.half()).float() - y).square().mean() * 1e-6
            grads = torch.autograd.grad(loss * self.scale, list(self.parameters()))
        return torch.cat([g.float().flatten() for g in grads]) / self.scale


def reference():
    return Train(65536.0)


def target():
    return Train(1.0)


def inputs():
    torch.manual_seed(1)
    return torch.randn(8, 6), torch.randn(8, 4)


EXPECT = {
    "where": {"module": "", "op": "aten._to_copy.default"},
    "accept": ["aten.mul.Tensor", "aten.div.Tensor", None],
    "kind": "underflow",
    "note": "in exact arithmetic the two programs are one; float16 has nothing below 6e-8",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
