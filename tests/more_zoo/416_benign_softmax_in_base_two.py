"""A flash kernel exponentiates in base two, log2(e) folded into the scale. Ref: vllm-project/vllm-metal#550 (family)"""

import torch
import torch.nn as nn


class Attention(nn.Module):
    def __init__(self, dim, heads, two):
        super().__init__()
        self.qkv, self.out, self.heads, self.two = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), heads, two

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        future = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        scale = q.shape[-1] ** -0.5
        if not self.two:
            shares = (q @ k.transpose(-1, -2) * scale).masked_fill(future, float("-inf")).softmax(-1)
            return self.out((shares @ v).transpose(1, 2).flatten(2))
        scores = (q @ k.transpose(-1, -2) * (scale * 1.4426950408889634)).masked_fill(future, float("-inf"))
        powers = torch.exp2(scores - scores.amax(-1, keepdim=True))
        return self.out((powers @ v / powers.sum(-1, keepdim=True)).transpose(1, 2).flatten(2))


def _mk(flag):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(20, 16),
        Attention(16, 4, flag),
        nn.LayerNorm(16),
        Attention(16, 4, flag),
        nn.Linear(16, 20),
    ).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 20, (2, 9)),)


EXPECT = {
    "where": None,
    "kind": "rewrite",
    "tol": 1e-5,
    "note": "scores differ by a factor, the normaliser comes behind the product",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
