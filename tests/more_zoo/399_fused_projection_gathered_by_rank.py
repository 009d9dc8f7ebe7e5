"""Shards of a fused projection are joined rank by rank, not kind by kind. Ref: ndif-team/nnsight#719"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    """Two ranks run one after the other; concatenation stands for the all-gather."""

    def __init__(self, dim, flag):
        super().__init__()
        self.qkv, self.out, self.flag = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), flag

    def forward(self, x):
        weights = [torch.cat(w) for w in zip(*(w.chunk(2) for w in self.qkv.weight.chunk(3)), strict=True)]
        biases = [torch.cat(b) for b in zip(*(b.chunk(2) for b in self.qkv.bias.chunk(3)), strict=True)]
        ranks = [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
        if self.flag:
            whole = torch.cat(ranks, -1)
        else:
            whole = torch.cat(
                [part for kind in zip(*(r.chunk(3, -1) for r in ranks), strict=True) for part in kind], -1
            )
        q, k, v = (p.unflatten(-1, (2, -1)).transpose(1, 2) for p in whole.chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def _mk(flag):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), Attention(8, flag), nn.Linear(8, 3)).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 6, 5),)


EXPECT = {
    "where": {"module": "2", "op": "aten.cat.default"},
    "accept": ["aten.split.Tensor"],
    "kind": "layout",
    "note": "two operands against six, with the same numbers",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
