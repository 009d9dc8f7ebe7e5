"""A fast path raises in the middle; the caller catches that and takes the slow one. Ref: OpenMDAO/OpenMDAO#700 (family)"""

import torch
import torch.nn as nn


class Fast(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.limit = nn.Linear(6, 6), 4

    def forward(self, x):
        y = self.fc(x)
        if len(x) > self.limit:
            raise RuntimeError("too large a batch")
        return torch.tanh(y)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fast, self.slow, self.head = Fast(), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        made = []
        for part in (x, x[:3]):
            try:
                y = self.fast(part)
            except RuntimeError:
                y = self.slow(part)
            made.append(self.head(y))
        return torch.cat(made)


def reference():
    torch.manual_seed(0)
    return Net().eval()


target = reference


def inputs():
    torch.manual_seed(1)
    return (torch.randn(7, 6),)


def truth():
    m, (x,) = reference(), inputs()
    with torch.no_grad():
        slow, fast = m.slow(x), torch.tanh(m.fast.fc(x[:3]))
        return {
            "fast.fc#0": m.fast.fc(x),
            "slow#0": slow,
            "head#0": m.head(slow),
            "fast.fc#1": m.fast.fc(x[:3]),
            "fast#1": fast,
            "head#1": m.head(fast),
        }


EXPECT = {
    "where": None,
    "kind": "exception",
    "must_capture": [
        "what ran before the exception, under the module that ran it",
        "the slow path under its own name, not inside the call that raised",
        "the second entry of `fast` as its call 1",
    ],
    "note": "a stack that is not unwound puts everything behind it one level too deep",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
