"""forward replaced on an instance, a module that calls itself, names with spaces. Ref: frgfm/torch-scan#24 (family), facebookresearch/ClassyVision#487 (family)"""

import types

import torch
import torch.nn as nn
import torch.nn.functional as F


class Folder(nn.Module):
    """Calls itself with half of its input until one column is left."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(2, 2)

    def forward(self, x, depth=0):
        if x.shape[-1] == 2:
            return self.mix(x)
        a, b = x.chunk(2, -1)
        return self(a, depth + 1) + self(b, depth + 1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.folder = Folder()
        self.add_module("the head", nn.Linear(2, 3))
        self.add_module("0-1", nn.Linear(3, 2))
        head = getattr(self, "the head")
        head.forward = types.MethodType(lambda self, x: F.linear(x, self.weight) * 2, head)

    def forward(self, x):
        return getattr(self, "0-1")(getattr(self, "the head")(self.folder(x)))


def reference():
    torch.manual_seed(0)
    return Net().eval()


target = reference


def inputs():
    torch.manual_seed(1)
    return (torch.randn(3, 8),)


def truth():
    m, (x,) = reference(), inputs()
    with torch.no_grad():
        mix = m.folder.mix
        parts = [F.linear(p, mix.weight, mix.bias) for p in x.chunk(4, -1)]
        whole = (parts[0] + parts[1]) + (parts[2] + parts[3])
        head = F.linear(whole, getattr(m, "the head").weight) * 2
        last = getattr(m, "0-1")
        made = {f"folder.mix#{i}": p for i, p in enumerate(parts)}
        return made | {
            "folder#0": whole,
            "folder#1": parts[0] + parts[1],
            "the head#0": head,
            "0-1#0": F.linear(head, last.weight, last.bias),
        }


EXPECT = {
    "where": None,
    "kind": "modules",
    "must_capture": [
        "calls of a module inside itself, each with its number",
        "modules whose names are no identifiers",
    ],
    "note": "calls are numbered as they are entered",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
