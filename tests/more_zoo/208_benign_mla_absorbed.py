"""Latent attention with the up-projection absorbed into queries and outputs. Ref: ml-explore/mlx-lm#1509, sgl-project/sglang-jax#950"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Latent(nn.Module):
    def __init__(self, absorbed):
        super().__init__()
        self.q, self.down, self.out = (
            nn.Linear(32, 32, False),
            nn.Linear(32, 12, False),
            nn.Linear(32, 32, False),
        )
        self.up = nn.Linear(12, 64, False)
        self.absorbed = absorbed

    def forward(self, x):
        b, t, _ = x.shape
        q, c = self.q(x).view(b, t, 4, 8).transpose(1, 2), self.down(x)
        mask = torch.full((t, t), float("-inf")).triu(1)
        if self.absorbed:
            to_k, to_v = self.up.weight.view(4, 16, 12).split(8, 1)
            scores = (q @ to_k) @ c[:, None].transpose(-1, -2)
            y = ((scores * 8**-0.5 + mask).softmax(-1) @ c[:, None]) @ to_v.transpose(-1, -2)
        else:
            k, v = self.up(c).view(b, t, 4, 16).transpose(1, 2).split(8, -1)
            y = (q @ k.transpose(-1, -2) * 8**-0.5 + mask).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, 32))


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.layers = nn.ModuleList(Latent(flag) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(F.layer_norm(x, (32,)))
        return x


def _mk(flag):
    torch.manual_seed(0)
    return Net(flag).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 7, 32),)


EXPECT = {
    "where": None,
    "kind": "benign-associativity",
    "tol": 5e-6,
    "note": "a module is never called though its weight is read; keys and values do not exist in the target",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
