"""The reset gate multiplies the state before the recurrent product, not what comes out of it. Ref: microsoft/onnxscript#2852"""

import torch
import torch.nn as nn


class Cell(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.gates_x, self.gates_h = nn.Linear(6, 16), nn.Linear(8, 16)
        self.new_x, self.new_h = nn.Linear(6, 8), nn.Linear(8, 8)
        self.flag = flag

    def forward(self, x, h):
        reset, update = torch.sigmoid(self.gates_x(x) + self.gates_h(h)).chunk(2, -1)
        if self.flag:
            new = torch.tanh(self.new_x(x) + self.new_h(reset * h))
        else:
            new = torch.tanh(self.new_x(x) + reset * self.new_h(h))
        return (1 - update) * new + update * h


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = Cell(flag), nn.Linear(8, 3)

    def forward(self, x, h):
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return self.head(h)


def reference():
    return Net(False)


def target():
    return Net(True)


def inputs():
    torch.manual_seed(1)
    return torch.randn(3, 5, 6), torch.randn(3, 8)


EXPECT = {
    "where": {"module": "cell", "op": "aten.mul.Tensor"},
    "accept": ["aten.add.Tensor", "aten.addmm.default", None],
    "call": 0,
    "kind": "op-order",
    "note": "a product changes places with a module; the shapes agree",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
