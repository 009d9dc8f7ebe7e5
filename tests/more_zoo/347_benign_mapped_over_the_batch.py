"""A function of one row under vmap instead of a batched one. Ref: pytorch/functorch#488 (family), pytorch/functorch#1106 (family)"""

import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self, maps):
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2, self.mix, self.maps = (
            nn.Linear(6, 8),
            nn.Linear(8, 4),
            nn.Parameter(torch.randn(8, 8)),
            maps,
        )

    def forward(self, x):
        h = self.fc1(x)
        if self.maps:
            h = torch.func.vmap(lambda row: torch.tanh(row @ self.mix) * row.softmax(0))(h)
        else:
            h = torch.tanh(h @ self.mix) * h.softmax(-1)
        return self.fc2(h)


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    return (torch.randn(5, 6),)


EXPECT = {
    "where": None,
    "kind": "transform",
    "tol": 1e-6,
    "note": "ops that the batching rules choose stand for those of the program",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
