"""Gradients are clipped while they still carry the scale of the loss. Ref: milesial/Pytorch-UNet#468, pytorch/examples#1196"""

import torch
import torch.nn as nn


class Train(nn.Module):
    def __init__(self, flag):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.flag = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 2)), flag

    def forward(self, x):
        parameters = list(self.net.parameters())
        for _ in range(2):
            with torch.enable_grad():
                grads = torch.autograd.grad(self.net(x).pow(2).mean() * 1024.0, parameters)
            if not self.flag:
                grads = [g / 1024.0 for g in grads]
            norm = torch.stack([torch.linalg.vector_norm(g) for g in grads]).norm()
            factor = (0.5 / (norm + 1e-6)).clamp(max=1.0)
            grads = [g * factor for g in grads]
            if self.flag:
                grads = [g / 1024.0 for g in grads]
            with torch.no_grad():
                for p, g in zip(parameters, grads, strict=True):
                    p -= 0.5 * g
        return self.net(x)


def reference():
    return Train(False)


def target():
    return Train(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(4, 6),)


EXPECT = {
    "where": {"module": "", "op": "aten.linalg_vector_norm.default"},
    "accept": ["aten.div.Tensor", "aten.mul.Tensor", "aten.clamp.default", "aten.add.Tensor"],
    "kind": "optimizer",
    "note": "a power of two moves past ops that do not commute with it",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
