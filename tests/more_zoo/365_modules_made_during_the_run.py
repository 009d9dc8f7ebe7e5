"""A module is made in forward, another one is a copy of a part. Ref: johnmarktaylor91/torchlens#167 (family), pytorch/pytorch#104446 (family)"""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x):
        made = nn.Softplus(beta=2)
        twin = copy.deepcopy(self.fc)
        twin.bias.fill_(0.25)
        return made(self.fc(x)) + twin(x).erf()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = Block(), nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.block(x))


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
        a = m.block.fc(x)
        b = F.linear(x, m.block.fc.weight, torch.full((6,), 0.25)).erf()
        y = F.softplus(a, 2) + b
        return {
            "block.fc#0": a,
            "op:aten.softplus": F.softplus(a, 2),
            "op:aten.erf": b,
            "block#0": y,
            "head#0": m.head(y),
        }


EXPECT = {
    "where": None,
    "kind": "modules",
    "must_capture": [
        "ops of modules that nobody knew at the start",
        "a copy's weights apart from the original's",
    ],
    "note": "a deep copy takes hooks along; what it runs is not a second call of the original",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
