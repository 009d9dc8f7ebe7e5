"""A fused gated unit's backward pass stores each gradient in the other's place. Ref: unslothai/unsloth#3314"""

import torch
import torch.nn as nn


class SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, value, flag):
        ctx.save_for_backward(gate, value)
        ctx.flag = flag
        return gate * torch.sigmoid(gate) * value

    @staticmethod
    def backward(ctx, grad):
        gate, value = ctx.saved_tensors
        s = torch.sigmoid(gate)
        d_gate, d_value = grad * value * s * (1 + gate * (1 - s)), grad * gate * s
        return (d_value, d_gate, None) if ctx.flag else (d_gate, d_value, None)


class Mlp(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.gate, self.value, self.down = nn.Linear(6, 16), nn.Linear(6, 16), nn.Linear(16, 6)
        self.flag = flag

    def forward(self, x):
        return self.down(SwiGlu.apply(self.gate(x), self.value(x), self.flag))


class Train(nn.Module):
    def __init__(self, flag):
        super().__init__()
        torch.manual_seed(0)
        self.mlp, self.head = Mlp(flag), nn.Linear(6, 2)

    def forward(self, x, y):
        with torch.enable_grad():
            loss = (self.head(x + self.mlp(x)) - y).square().mean()
            grads = torch.autograd.grad(loss, list(self.parameters()))
        return torch.cat([g.flatten() for g in grads])


def reference():
    return Train(False)


def target():
    return Train(True)


def inputs():
    torch.manual_seed(1)
    return torch.randn(5, 6), torch.randn(5, 2)


EXPECT = {
    "where": {"module": "mlp", "op": "aten.mm.default"},
    "accept": ["aten.sum.dim_IntList", "aten.t.default", "aten.view.default", "aten.mul.Tensor", None],
    "kind": "backward",
    "note": "the forward pass and both gradients are right; each goes to the other projection",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
