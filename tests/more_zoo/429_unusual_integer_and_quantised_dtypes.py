"""Outputs of quantised dtypes and of wide unsigned integers. Ref: Lightning-AI/litData#596 (family)"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Quantise(nn.Module):
    def forward(self, x):
        return torch.quantize_per_tensor(x, 0.05, 10, torch.quint8)


class Wide(nn.Module):
    def forward(self, x):
        whole = (x.abs() * 1000).to(torch.int64)
        return whole.to(torch.uint16), whole.to(torch.uint32), whole.to(torch.uint64)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.quantise, self.wide, self.head = nn.Linear(6, 4), Quantise(), Wide(), nn.Linear(4, 2)

    def forward(self, x):
        h = self.fc(x)
        q, (a, b, c) = self.quantise(h), self.wide(h)
        return self.head(q.dequantize()) + (a.float() + b.float() + c.float()).mean() * 1e-3


def reference():
    torch.manual_seed(0)
    return Net().eval()


target = reference


def inputs():
    torch.manual_seed(1)
    return (torch.randn(3, 6),)


def truth():
    m, (x,) = reference(), inputs()
    with torch.no_grad():
        h = F.linear(x, m.fc.weight, m.fc.bias)
        whole = (h.abs() * 1000).to(torch.int64)
        q = torch.quantize_per_tensor(h, 0.05, 10, torch.quint8).dequantize()
        return {
            "fc#0": h,
            "wide#0/0": whole.to(torch.uint16),
            "wide#0/1": whole.to(torch.uint32),
            "wide#0/2": whole.to(torch.uint64),
            "head#0/in/0": q,
        }


EXPECT = {
    "where": None,
    "kind": "dtypes",
    "must_capture": ["unsigned integers of 16, 32 and 64 bits", "what follows a quantised tensor"],
    "note": "few kernels know these dtypes; a recorder must not fail on them",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
