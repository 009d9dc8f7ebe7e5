"""The optimizer counts a step for each parameter: bias corrections differ from weight to weight. Ref: mlx-node/mlx-node#11, deepspeedai/DeepSpeed#8471"""

import torch
import torch.nn as nn


class Adam:
    def __init__(self, each):
        self.each, self.t, self.state = each, 0, {}

    def step(self, parameters):
        if not self.each:
            self.t += 1
        for p in parameters:
            if self.each:
                self.t += 1
            m, v = self.state.setdefault(p, (torch.zeros_like(p), torch.zeros_like(p)))
            m.mul_(0.9).add_(p.grad, alpha=0.1)
            v.mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
            p.data.sub_(0.05 * (m / (1 - 0.9**self.t)) / ((v / (1 - 0.99**self.t)).sqrt() + 1e-8))


class Training(nn.Module):
    def __init__(self, each):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))
        self.each = each

    def forward(self, x, y):
        adam = Adam(self.each)
        with torch.enable_grad():
            for _ in range(3):
                self.zero_grad()
                (self.net(x) - y).pow(2).mean().backward()
                adam.step(list(self.parameters()))
        return self.net(x)


def reference():
    return Training(False)


def target():
    return Training(True)


def inputs():
    torch.manual_seed(1)
    return torch.randn(16, 6), torch.randn(16, 2)


EXPECT = {
    "where": {"module": "", "op": "aten.div.Tensor"},
    "accept": ["aten.sub_.Tensor", "aten.mul.Tensor"],
    "kind": "optimizer",
    "note": "the first weight's first step is right; numbers of Python's differ from the second on",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
