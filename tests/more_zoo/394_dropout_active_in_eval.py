"""F.dropout without training= drops in eval mode. Ref: pytorch/pytorch#26338, Coderx7/SimpleNet#2"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, dim, flag):
        super().__init__()
        self.fc1, self.fc2, self.flag = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim), flag

    def forward(self, x):
        h = torch.relu(self.fc1(x))
        return x + self.fc2(F.dropout(h, 0.2) if self.flag else F.dropout(h, 0.2, training=self.training))


def _mk(flag):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), Block(8, False), Block(8, flag), nn.Linear(8, 3)).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(6, 5),)


EXPECT = {
    "where": {"module": "2", "op": "aten.bernoulli_.float"},
    "accept": [
        "aten.native_dropout.default",
        "aten.dropout.default",
        "aten.empty_like.default",
        "aten.mul.Tensor",
        "aten.div_.Scalar",
    ],
    "kind": "random",
    "note": "a random op that the reference lacks",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
