"""The chosen experts come in another order of slots. Ref: deepseek-ai/DeepSeek-V3.2-Exp#28, bytedance/xpu-perf#167"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Mixture(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.router = nn.Linear(12, 6, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(6, 12, 16)), nn.Parameter(torch.randn(6, 16, 12))
        self.flag = flag

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        if self.flag:
            index = scores.argsort(-1)[:, -3:]
            share = scores.gather(-1, index)
        else:
            share, index = scores.topk(3, -1)
        share = share / share.sum(-1, keepdim=True)
        h = F.silu(torch.einsum("td,tkdf->tkf", x, self.up[index]))
        return (torch.einsum("tkf,tkfd->tkd", h, self.down[index]) * share[..., None]).sum(1)


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        torch.manual_seed(0)
        self.mixture, self.norm, self.head = Mixture(flag), nn.LayerNorm(12), nn.Linear(12, 4)

    def forward(self, x):
        return self.head(self.norm(x + self.mixture(x)))


def reference():
    return Net(False)


def target():
    return Net(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(7, 12),)


EXPECT = {
    "where": None,
    "kind": "benign-permutation",
    "tol": 2e-5,
    "note": "sums of the same terms; every record between is in reverse order of slots",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
