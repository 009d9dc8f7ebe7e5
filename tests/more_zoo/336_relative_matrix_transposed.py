"""An equation contracts the wrong one of two equal axes. Ref: labmlai/annotated_deep_learning_paper_implementations#185 (family), google-research/bert#1065 (family)"""

import torch
import torch.nn as nn


class Attention(nn.Module):
    def __init__(self, equation):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.mix, self.equation = nn.Parameter(torch.randn(2, 8, 8)), equation

    def forward(self, x):
        q, k, v = (p(x).view(*x.shape[:2], 2, 8).transpose(1, 2) for p in (self.q, self.k, self.v))
        q = torch.einsum(self.equation, q, self.mix)
        return ((q @ k.mT * 0.2).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Net(nn.Module):
    def __init__(self, equation):
        super().__init__()
        torch.manual_seed(0)
        self.attn, self.out = Attention(equation), nn.Linear(16, 4)

    def forward(self, x):
        return self.out(x + self.attn(x))


def reference():
    return Net("bhtd,hde->bhte").eval()


def target():
    return Net("bhtd,hed->bhte").eval()


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 5, 16),)


EXPECT = {
    "where": {"module": "attn", "op": "aten.bmm.default"},
    "accept": ["aten.permute.default", "aten.view.default", "aten.expand.default"],
    "kind": "layout",
    "note": "a square parameter, so every shape agrees",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
