"""The moving average mixes with the weights exchanged. Ref: pytorch/pytorch#7028 (family)"""

import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.net, self.average = nn.Linear(6, 4), nn.Linear(6, 4)
        self.decay = 0.1 if flag else 0.9

    def forward(self, x):
        for _step in range(3):
            with torch.no_grad():
                for p, q in zip(self.average.parameters(), self.net.parameters(), strict=True):
                    p.lerp_(q, 1 - self.decay)
                    q.mul_(0.9)
        return self.average(x)


def _mk(flag):
    torch.manual_seed(0)
    return Net(flag).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(5, 6),)


EXPECT = {
    "where": {"module": "", "op": "aten.lerp_.Scalar"},
    "kind": "argument",
    "note": "parameters are written in place before the only module that reads them runs",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
