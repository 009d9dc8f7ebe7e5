"""Fake quantisation without the straight-through estimator: rounding has no gradient. Ref: pytorch/ao#4806"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class FakeQuant(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.flag = flag

    def forward(self, w):
        scale = w.detach().abs().amax() / 7
        q = (w / scale).round() * scale
        return q if self.flag else w + (q - w).detach()


class Train(nn.Module):
    def __init__(self, flag):
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.quant, self.fc2 = nn.Linear(6, 8), FakeQuant(flag), nn.Linear(8, 1)

    def forward(self, x):
        with torch.enable_grad():
            h = F.linear(x, self.quant(self.fc1.weight), self.fc1.bias)
            loss = self.fc2(torch.tanh(h)).pow(2).mean()
            loss.backward()
        return torch.cat([loss.detach()[None], *(p.grad.flatten() for p in self.parameters())])


def reference():
    return Train(False)


def target():
    return Train(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(5, 6),)


EXPECT = {
    "where": {"module": "quant", "op": None},
    "kind": "gradient",
    "note": "the forward pass agrees to rounding, one gradient of three is zero",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
