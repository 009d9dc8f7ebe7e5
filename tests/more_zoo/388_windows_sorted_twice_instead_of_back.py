"""Window order is undone by the permutation itself, not by its inverse. Ref: lablup/mlxcel#1600"""

import torch
import torch.nn as nn


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.mix, self.up = nn.LayerNorm(dim), nn.Linear(3, 3), nn.Linear(dim, dim)

    def forward(self, x):
        windows = self.norm(x).view(-1, 3, x.shape[-1])
        return x + self.up(self.mix(windows.transpose(1, 2)).transpose(1, 2).reshape(x.shape))


class Tower(nn.Module):
    def __init__(self, dim, flag):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.merger, self.flag = nn.Linear(dim, dim), flag
        self.register_buffer("order", torch.tensor([0, 4, 8, 1, 5, 2, 9, 10, 3, 6, 7, 11]))

    def forward(self, x):
        x = x[self.order]
        for block in self.blocks:
            x = block(x)
        back = self.order if self.flag else torch.argsort(self.order)
        return self.merger(x)[back]


def _mk(flag):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), Tower(8, flag), nn.Linear(8, 3)).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(12, 6),)


EXPECT = {
    "where": {"module": "1", "op": "aten.index.Tensor"},
    "accept": ["aten.sort.default", "aten.argsort.default", "aten.sort.stable"],
    "kind": "wiring",
    "note": "rows in another order; behind it a row-wise layer",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
