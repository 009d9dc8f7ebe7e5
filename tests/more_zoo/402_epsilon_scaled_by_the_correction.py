"""Adam adds epsilon before the second moment is corrected. Ref: tensorflow/tensorflow#9047"""

import torch
import torch.nn as nn


class Update(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.flag, self.eps = flag, 0.1

    def forward(self, weight, grad, first, second, step):
        first.lerp_(grad, 0.1)
        second.mul_(0.999).addcmul_(grad, grad, value=0.001)
        a, b = 1 - 0.9**step, (1 - 0.999**step) ** 0.5
        root = (second.sqrt() + self.eps) / b if self.flag else second.sqrt() / b + self.eps
        return weight - 0.01 / a * first / root


class Train(nn.Module):
    def __init__(self, flag):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.update = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), Update(flag)

    def forward(self, x, y):
        moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self.net.parameters()]
        for step in (1, 2):
            with torch.enable_grad():
                loss = (self.net(x) - y).square().mean()
                grads = torch.autograd.grad(loss, list(self.net.parameters()))
            for p, g, (m, v) in zip(self.net.parameters(), grads, moments, strict=True):
                p.copy_(self.update(p, g, m, v, step))
        return self.net(x)


def reference():
    return Train(False)


def target():
    return Train(True)


def inputs():
    torch.manual_seed(1)
    return torch.randn(8, 6), torch.randn(8, 1)


EXPECT = {
    "where": {"module": "update", "op": "aten.add.Tensor"},
    "accept": ["aten.div.Tensor"],
    "call": 0,
    "kind": "order",
    "note": "two ops change places",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
