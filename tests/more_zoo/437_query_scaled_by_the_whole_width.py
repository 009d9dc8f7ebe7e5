"""Scores are scaled by the width of all heads. Ref: Graylab/DL4Proteins-notebooks#12, FrancescoSaverioZuppichini/ViT#1"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    def __init__(self, dim, heads, flag):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), heads
        self.scale, self.written = (dim if flag else dim // heads) ** -0.5, flag

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.written:
            out = (q @ k.transpose(-1, -2) * self.scale).softmax(-1) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v)
        return self.out(out.transpose(1, 2).flatten(2))


def _mk(flag):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), Attention(16, 4, flag), nn.Linear(16, 3)).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 7, 6),)


EXPECT = {
    "where": {"module": "2", "op": None},
    "kind": "argument",
    "note": "written out in the target, fused and with the default scale in the reference",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
