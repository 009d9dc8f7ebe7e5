"""Sampling multiplies noise by exp(logvar), the variance. Ref: rachtsingh/ibp_vae#3, keras-team/keras#9972"""

import torch
import torch.nn as nn


class Sample(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.flag = flag

    def forward(self, mean, logvar):
        noise = torch.randn_like(mean)
        return mean + noise * (logvar.exp() if self.flag else (0.5 * logvar).exp())


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        torch.manual_seed(0)
        self.encode, self.mean, self.logvar = nn.Linear(8, 6), nn.Linear(6, 3), nn.Linear(6, 3)
        self.sample, self.decode = Sample(flag), nn.Sequential(nn.Linear(3, 8), nn.Sigmoid())

    def forward(self, x):
        h = torch.relu(self.encode(x))
        return self.decode(self.sample(self.mean(h), self.logvar(h)))


def reference():
    return Net(False)


def target():
    return Net(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(4, 8),)


EXPECT = {
    "where": {"module": "sample", "op": "aten.exp.default"},
    "accept": ["aten.mul.Tensor"],
    "kind": "missing",
    "note": "equal draws; an op in front of one operand is missing",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
