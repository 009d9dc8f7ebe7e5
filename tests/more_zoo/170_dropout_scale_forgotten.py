"""Inverted dropout without its scale: activations shrink in training. Ref: ipolharvard/ethos-ares#20 (family)"""

import torch
import torch.nn as nn


class Drop(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.flag = flag

    def forward(self, x):
        keep = torch.rand(x.shape) > 0.25
        return x * keep if self.flag else x * keep / 0.75


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.fc1, self.drop, self.fc2 = nn.Linear(8, 32), Drop(flag), nn.Linear(32, 4)

    def forward(self, x):
        torch.manual_seed(3)
        return self.fc2(self.drop(torch.relu(self.fc1(x))))


def _mk(flag):
    torch.manual_seed(0)
    return Net(flag).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(6, 8),)


EXPECT = {
    "where": {"module": "drop", "op": "aten.div.Tensor"},
    "missing_op": "aten.div.Tensor",
    "accept_modules": ["fc2"],
    "accept": ["aten.mul.Tensor", "aten.addmm.default"],
    "cos_blind": True,
    "kind": "scale",
    "note": "the draws agree; one division is absent at the end of a module",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
