"""Weights in the order that rotates neighbouring columns against halves. Ref: huggingface/transformers#31788 (family), ggml-org/llama.cpp#2398 (family)"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    def __init__(self, dim, heads, pairs):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.heads, self.pairs = heads, pairs
        if pairs:
            for proj in (self.q, self.k):
                proj.weight.data = (
                    proj.weight.data.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()
                )

    def rotate(self, x):
        half = x.shape[-1] // 2
        angles = torch.arange(x.shape[2])[:, None] * 100.0 ** (-torch.arange(half) / half)
        cos, sin = angles.cos(), angles.sin()
        if self.pairs:
            a, b = x[..., ::2], x[..., 1::2]
            return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(3)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.o(out.transpose(1, 2).flatten(2))


def _mk(flag):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(20, 16),
        Attention(16, 2, flag),
        nn.LayerNorm(16),
        Attention(16, 2, flag),
        nn.Linear(16, 20),
    ).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 20, (2, 7)),)


EXPECT = {
    "where": None,
    "kind": "layout",
    "tol": 1e-5,
    "note": "rows of two weights in another order, with the rotation that goes with it",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
