"""Tensors whose shape is changed in place after they were made. Ref: pytorch/pytorch#185888 (family)"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.head = nn.Linear(6, 4), nn.Linear(3, 2)

    def forward(self, x):
        h = self.fc(x)
        h.t_()
        h.unsqueeze_(0)
        h.squeeze_(0)
        g = h * 2
        g.as_strided_((4, 3), (3, 1))
        kept = torch.zeros(2)
        kept.resize_(4, 3)
        kept.copy_(g)
        return self.head(kept)


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
        g = h.t() * 2
        g = g.as_strided((4, 3), (3, 1))
        return {"fc#0": h, "head#0/in/0": g.clone(), "head#0": F.linear(g, m.head.weight, m.head.bias)}


EXPECT = {
    "where": None,
    "kind": "in-place",
    "must_capture": ["the shape that a module returned, not the one its result was given later"],
    "note": "t_, unsqueeze_, squeeze_, as_strided_ and resize_ write no values",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
