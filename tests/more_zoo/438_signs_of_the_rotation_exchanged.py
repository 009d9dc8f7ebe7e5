"""The rotation turns the other way round: the sine's signs are exchanged. Ref: ml-explore/mlx-lm#1702 (family), huggingface/transformers#31788 (family)"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Rotate(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.flag = flag

    def forward(self, x):
        half = x.shape[-1] // 2
        angles = torch.arange(x.shape[2])[:, None] * 100.0 ** (-torch.arange(half) / half)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        a, b = x.chunk(2, -1)
        turned = torch.cat([b, -a], -1) if self.flag else torch.cat([-b, a], -1)
        return x * cos + turned * sin


class Attention(nn.Module):
    def __init__(self, dim, flag):
        super().__init__()
        self.qkv, self.out, self.rotate_q, self.rotate_k = (
            nn.Linear(dim, 3 * dim),
            nn.Linear(dim, dim),
            Rotate(flag),
            Rotate(False),
        )

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(self.rotate_q(q), self.rotate_k(k), v, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


def _mk(flag):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(20, 16), Attention(16, flag), nn.LayerNorm(16), nn.Linear(16, 20)
    ).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 20, (2, 8)),)


EXPECT = {
    "where": {"module": "1.rotate_q", "op": "aten.neg.default"},
    "accept": ["aten.cat.default", "aten.split.Tensor", "aten.mul.Tensor"],
    "kind": "order",
    "note": "another half is negated; of the queries only",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
