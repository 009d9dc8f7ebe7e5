"""A guard of 1e-8 is zero in half precision: 0 / 0 where scores are equal. Ref: lightonai/pylate#239"""

import torch
import torch.nn as nn


class Scale(nn.Module):
    def forward(self, x):
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        return (x - low) / (high - low + 1e-8)


def _mk(dtype):
    torch.manual_seed(0)
    first = nn.Linear(6, 8)
    first.bias.data.abs_().neg_()
    return nn.Sequential(first, nn.ReLU(), Scale(), nn.Linear(8, 3)).eval().to(dtype)


class Net(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.layers, self.dtype = _mk(dtype), dtype

    def forward(self, x):
        return self.layers(x.to(self.dtype)).float()


def reference():
    return Net(torch.float32)


def target():
    return Net(torch.float16)


def inputs():
    torch.manual_seed(1)
    x = torch.randn(4, 6)
    x[2] = 0  # every unit of the first layer rectifies it to nothing
    return (x,)


EXPECT = {
    "where": {"module": "layers.2", "op": "aten.div.Tensor"},
    "accept": ["aten.add.Tensor"],
    "kind": "nonfinite",
    "note": "float16 against float32; one row",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
