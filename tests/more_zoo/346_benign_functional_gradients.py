"""Gradients by torch.func.grad over functional_call instead of backward(). Ref: pytorch/pytorch#61447 (family), pytorch/pytorch#90477 (family)"""

import torch
import torch.nn as nn
from torch.func import functional_call, grad


class Train(nn.Module):
    def __init__(self, functional):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 2))
        self.functional = functional

    def forward(self, x):
        parameters = dict(self.net.named_parameters())
        with torch.enable_grad():
            if self.functional:
                grads = grad(lambda p: functional_call(self.net, p, (x,)).pow(2).mean())(parameters)
            else:
                loss = self.net(x).pow(2).mean()
                grads = dict(
                    zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True)
                )
        return torch.cat([(parameters[name] - 0.1 * g).detach().flatten() for name, g in grads.items()])


def reference():
    return Train(False)


def target():
    return Train(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(4, 6),)


EXPECT = {
    "where": None,
    "kind": "transform",
    "tol": 1e-6,
    "note": "the backward pass runs inside a transform, under wrapped tensors",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
