"""functional_call runs one module with three sets of parameters. Ref: pytorch/pytorch#61447 (family), pytorch/pytorch#195593 (family)"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.member = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))
        self.spread = nn.Parameter(torch.tensor([0.0, 0.1, -0.2]))

    def forward(self, x):
        made = []
        for s in self.spread:
            weights = {name: p + s for name, p in self.member.named_parameters()}
            made.append(functional_call(self.member, weights, (x,)))
        return torch.stack(made)


def reference():
    torch.manual_seed(0)
    return Net().eval()


target = reference


def inputs():
    torch.manual_seed(1)
    return (torch.randn(3, 5),)


def truth():
    m, (x,) = reference(), inputs()
    d = {}
    with torch.no_grad():
        for i, s in enumerate(m.spread):
            h = F.linear(x, m.member[0].weight + s, m.member[0].bias + s)
            d[f"member.0#{i}"] = h
            d[f"member.1#{i}"] = h.tanh()
            d[f"member.2#{i}"] = d[f"member#{i}"] = F.linear(
                h.tanh(), m.member[2].weight + s, m.member[2].bias + s
            )
    return d


EXPECT = {
    "where": None,
    "kind": "functional",
    "must_capture": [
        "three calls of one module with the values of each",
        "weights that are results of ops, not parameters, for the time of a call",
    ],
    "note": "the module's own parameters are read by the sums alone",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
