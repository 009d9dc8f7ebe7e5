"""A hook of the user's own replaces a module's output, another one its input. Ref: pytorch/functorch#488 (family), ModelCloud/GPTQModel#1027 (family)"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.fc1.register_forward_hook(lambda module, args, out: out.clamp(min=0) + 1)
        self.fc2.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))

    def forward(self, x):
        return self.head(self.fc2(self.fc1(x)))


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
        a = F.linear(x, m.fc1.weight, m.fc1.bias).clamp(min=0) + 1
        b = F.linear(a * 0.5, m.fc2.weight, m.fc2.bias)
        return {"fc1#0": a, "fc2#0": b, "head#0": F.linear(b, m.head.weight, m.head.bias), "head#0/in/0": b}


EXPECT = {
    "where": None,
    "kind": "hooks",
    "must_capture": [
        "what the caller is handed, not what forward returned",
        "the ops of the hooks, and no structure finding between two equal runs",
    ],
    "note": "hooks stood there before the recorder did",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
