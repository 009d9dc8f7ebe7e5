"""A hand-written softmax does not subtract the maximum and overflows. Ref: deeplearning4j/deeplearning4j#6039, uTensor/uTensor#175"""

import torch
import torch.nn as nn


class Softmax(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.flag = flag

    def forward(self, x):
        if self.flag:
            e = torch.exp(x)
            return e / e.sum(-1, keepdim=True)
        return x.softmax(-1)


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.q, self.k, self.softmax, self.out = (
            nn.Linear(16, 16),
            nn.Linear(16, 16),
            Softmax(flag),
            nn.Linear(16, 4),
        )

    def forward(self, x):
        return self.out(self.softmax(self.q(x) @ self.k(x).t()) @ x)


def _mk(flag):
    torch.manual_seed(0)
    return Net(flag).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    x = torch.randn(6, 16)
    x[2] *= 60
    return (x,)


EXPECT = {
    "where": {"module": "softmax", "op": "aten.exp.default"},
    "accept": ["aten.div.Tensor", "aten.sum.dim_IntList"],
    "kind": "nonfinite",
    "note": "inf at first, NaN after the division; rows without large scores agree to rounding",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
