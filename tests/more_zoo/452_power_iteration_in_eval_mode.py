"""Spectral normalisation goes on iterating in eval mode, and changes its vectors at each call. Ref: pytorch/pytorch#8208"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Spectral(nn.Module):
    def __init__(self, dim, always):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(dim, dim)), nn.Parameter(torch.randn(dim))
        self.register_buffer("u", F.normalize(torch.randn(dim), dim=0))
        self.register_buffer("v", F.normalize(torch.randn(dim), dim=0))
        self.always = always

    def forward(self, x):
        if self.training or self.always:
            self.v.copy_(F.normalize(self.weight.t() @ self.u, dim=0))
            self.u.copy_(F.normalize(self.weight @ self.v, dim=0))
        sigma = self.u @ (self.weight @ self.v)
        return F.linear(x, self.weight / sigma, self.bias)


class Net(nn.Module):
    def __init__(self, always):
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.body, self.out = nn.Linear(4, 8), Spectral(8, always), nn.Linear(8, 1)

    def forward(self, x):
        return self.out(F.leaky_relu(self.body(F.leaky_relu(self.inp(x)))))


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    return (torch.randn(6, 4),)


EXPECT = {
    "where": {"module": "body", "op": "aten.copy_.default"},
    "accept": [
        "aten.mv.default",
        "aten.dot.default",
        "aten.div.Tensor",
        "aten.linalg_vector_norm.default",
        "aten.t.default",
    ],
    "extra_op": "aten.copy_.default",
    "kind": "train-eval",
    "note": "buffers are written to before they are read",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
