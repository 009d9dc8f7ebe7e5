"""A fused unit writes its gradients into its inputs, which another function has saved. Ref: linkedin/Liger-Kernel#254"""

import torch
import torch.nn as nn


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.exp(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * y


def gated(in_place):
    class Gated(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return torch.nn.functional.silu(a) * b

        @staticmethod
        def backward(ctx, grad):
            a, b = ctx.saved_tensors
            s = torch.sigmoid(a)
            da, db = grad * b * (s * (1 + a * (1 - s))), grad * a * s
            if in_place:
                a.data.copy_(da)
                b.data.copy_(db)
                return a.clone(), b.clone()
            return da, db

    return Gated.apply


class Gate(nn.Module):
    def __init__(self, in_place):
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.gated = gated(in_place)

    def forward(self, x):
        return self.gated(Exponential.apply(self.up(x) * 0.3), x[:, :1].expand(-1, 8).clone())


class Step(nn.Module):
    def __init__(self, in_place):
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.gate, self.down = nn.Linear(5, 6), Gate(in_place), nn.Linear(8, 1)

    def forward(self, x):
        with torch.enable_grad():
            self.zero_grad()
            self.down(self.gate(self.inp(x))).pow(2).mean().backward()
        return torch.cat([p.grad.flatten() for p in self.parameters()])


def reference():
    return Step(False)


def target():
    return Step(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(7, 5),)


EXPECT = {
    "where": {"module": "gate", "op": "aten.copy_.default"},
    "accept": ["aten.mul.Tensor"],
    "kind": "in-place",
    "note": "the backward pass of one function spoils what another one has kept; the forward pass agrees",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
