"""Host code writes into a tensor through its NumPy view. Ref: pytorch/pytorch#20391 (family)"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.head = nn.Linear(6, 4), nn.Linear(4, 2)

    def forward(self, x):
        h = self.fc(x)
        array = h.numpy()
        array[:, 1] = 7.0
        first = self.head(h)
        array *= 2
        return first + self.head(h)


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
        a = h.clone()
        a[:, 1] = 7.0
        w, b = m.head.weight, m.head.bias
        return {
            "fc#0": h,
            "head#0/in/0": a,
            "head#0": F.linear(a, w, b),
            "head#1/in/0": a * 2,
            "head#1": F.linear(a * 2, w, b),
        }


EXPECT = {
    "where": None,
    "kind": "unseen-write",
    "must_capture": ["what a module returned before the host wrote, and what each call then read"],
    "note": "no op tells of the writes",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
