"""A subclass with __torch_function__ carries a note along and unwraps itself. Ref: pytorch/pytorch#136565 (family), pytorch/ao#871 (family)"""

import torch
import torch.nn as nn


class Noted(torch.Tensor):
    """A tensor that remembers how many functions it went through."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        made = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(made, Noted):
            made.noted = 1 + max((getattr(a, "noted", 0) for a in args), default=0)
        return made


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, x):
        y = self.norm(torch.tanh(self.fc1(x.as_subclass(Noted))))
        if getattr(y, "noted", 0) < 3:
            raise RuntimeError("the note was lost")
        return self.fc2(y.as_subclass(torch.Tensor) * y.noted)


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
        a = m.fc1(x)
        b = m.norm(a.tanh())
        return {"fc1#0": a, "norm#0": b, "fc2#0": m.fc2(b * 3)}


EXPECT = {
    "where": None,
    "kind": "subclass",
    "must_capture": [
        "values of the subclass as plain data",
        "the attribute that the program hangs on its tensors, untouched",
    ],
    "note": "a recorder that calls functions on the subclass counts them up and changes the program",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
