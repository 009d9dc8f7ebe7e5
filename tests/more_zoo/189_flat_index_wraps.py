"""A flat index is computed in too few bits and wraps. Ref: microsoft/onnxruntime#28107"""

import torch
import torch.nn as nn


class Grid(nn.Module):
    def __init__(self, narrow):
        super().__init__()
        self.table = nn.Parameter(torch.randn(200 * 300, 8))
        self.narrow = narrow

    def forward(self, row, column):
        if self.narrow:
            row, column = row.to(torch.int16), column.to(torch.int16)
        return self.table[(row * 300 + column).long()]


class Net(nn.Module):
    def __init__(self, narrow):
        super().__init__()
        torch.manual_seed(0)
        self.grid = Grid(narrow)
        self.mix = nn.Linear(8, 8)

    def forward(self, row, column):
        return torch.tanh(self.mix(self.grid(row, column)))


def reference():
    return Net(False)


def target():
    return Net(True)


def inputs():
    torch.manual_seed(1)
    return torch.randint(0, 200, (2, 12)), torch.randint(0, 300, (2, 12))


EXPECT = {
    "where": {"module": "grid", "op": "aten.mul.Tensor"},
    "accept": ["aten.add.Tensor", "aten.index.Tensor", "aten._to_copy.default"],
    "kind": "overflow",
    "note": "integers; half of the rows are right",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
