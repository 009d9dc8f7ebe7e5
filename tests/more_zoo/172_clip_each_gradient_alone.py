"""Gradients are clipped one by one, not by their common norm. Ref: anhquan0412/basic_model_scratch#2 (family)"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Train(nn.Module):
    def __init__(self, flag):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.flag = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)), flag

    def forward(self, x, y):
        with torch.enable_grad():
            F.mse_loss(self.net(x), y).backward()
        parameters = list(self.net.parameters())
        for group in [[p] for p in parameters] if self.flag else [parameters]:
            nn.utils.clip_grad_norm_(group, 0.1, foreach=False)
        with torch.no_grad():
            for p in parameters:
                p.sub_(p.grad)
        return self.net(x)


def reference():
    return Train(False)


def target():
    return Train(True)


def inputs():
    torch.manual_seed(1)
    return torch.randn(8, 6), torch.randn(8, 2)


EXPECT = {
    "where": {"module": "", "op": None},
    "kind": "optimizer",
    "note": "the gradients agree; norms are taken of one instead of of all, and factors differ for each",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
