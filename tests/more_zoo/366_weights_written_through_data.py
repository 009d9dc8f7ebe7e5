"""A weight is changed through .data between two calls of one forward, another one through set_. Ref: pytorch/pytorch#5396, pytorch/pytorch#20391 (family)"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.head = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        first = self.fc(x)
        self.fc.weight.data.mul_(2)
        second = self.fc(x)
        self.fc.weight.data = torch.eye(6)
        third = self.fc(x)
        buffer = torch.empty(0)
        torch.add(first, second, out=buffer)
        buffer.set_(buffer.add(third).untyped_storage(), 0, (3, 6), (6, 1))
        return self.head(buffer)


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
        w, b = m.fc.weight.detach().clone(), m.fc.bias
        made = [F.linear(x, weight, b) for weight in (w, w * 2, torch.eye(6))]
        d = {f"fc#{i}": y for i, y in enumerate(made)}
        d |= {f"fc.weight@{i}": weight for i, weight in enumerate((w, w * 2, torch.eye(6)))}
        return d | {"head#0": m.head(made[0] + made[1] + made[2])}


EXPECT = {
    "where": None,
    "kind": "in-place",
    "must_capture": [
        "three values of one weight, as each call read it",
        "results that came by out= and by another storage",
    ],
    "note": "writes through .data leave the version counter of the parameter alone",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
