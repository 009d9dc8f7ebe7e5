"""A DoRA adapter merged into the weight against the adapter. Ref: huggingface/peft#3608 (family)"""

import torch
import torch.nn as nn


class Dora(nn.Module):
    def __init__(self, base, rank):
        super().__init__()
        self.base = base
        self.a, self.b = (
            nn.Linear(base.in_features, rank, bias=False),
            nn.Linear(rank, base.out_features, bias=False),
        )
        self.magnitude = nn.Parameter(torch.rand(base.out_features) + 0.5)

    def factor(self):
        return self.magnitude / torch.linalg.vector_norm(
            self.base.weight + self.b.weight @ self.a.weight, dim=1
        )

    def forward(self, x):
        factor, base = self.factor(), self.base(x)
        return base + (factor - 1) * (base - self.base.bias) + factor * self.b(self.a(x))

    def merged(self):
        with torch.no_grad():
            self.base.weight.copy_(
                self.factor()[:, None] * (self.base.weight + self.b.weight @ self.a.weight)
            )
        return self.base


def _mk(flag):
    torch.manual_seed(0)
    layers = [Dora(nn.Linear(12, 12), 3) for _ in range(2)]
    if flag:
        layers = [layer.merged() for layer in layers]
    return nn.Sequential(
        nn.Linear(6, 12), nn.GELU(), layers[0], nn.GELU(), layers[1], nn.Linear(12, 4)
    ).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(3, 6),)


EXPECT = {
    "where": None,
    "kind": "rewrite",
    "tol": 1e-5,
    "note": "modules inside a module against one, with another weight",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
