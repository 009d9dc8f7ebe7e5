"""Weight norm is folded into the weights, in another module type. Ref: bshall/knn-vc#3 (family), pytorch/pytorch#81195 (family)"""

import torch
import torch.nn as nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import remove_parametrizations


class Net(nn.Module):
    def __init__(self, fold):
        super().__init__()
        torch.manual_seed(0)
        self.pre, self.up = (
            weight_norm(nn.Conv1d(4, 8, 5, padding=2)),
            weight_norm(nn.ConvTranspose1d(8, 6, 4, 2, 1), dim=1),
        )
        self.post = weight_norm(nn.Conv1d(6, 1, 3, padding=1))
        for conv in (self.pre, self.up, self.post):
            conv.parametrizations.weight.original0.data.uniform_(0.5, 1.5)
            if fold:
                remove_parametrizations(conv, "weight")

    def forward(self, x):
        return torch.tanh(self.post(torch.relu(self.up(torch.relu(self.pre(x))))))


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 4, 10),)


EXPECT = {
    "where": None,
    "kind": "rewrite",
    "tol": 1e-5,
    "note": "a parameter stands for what the reference computes from two",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
