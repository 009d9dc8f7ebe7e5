"""With a cache the relative bias is not added. Ref: NVIDIA/TensorRT-LLM#13870"""

import torch
import torch.nn as nn


class Attention(nn.Module):
    def __init__(self, dim, heads, flag):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.bias, self.heads, self.flag = nn.Embedding(16, heads), heads, flag

    def forward(self, x, cache=None):
        q, k, v = (p(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        scores = q @ k.transpose(-1, -2)
        if cache is None or not self.flag:
            n, m = scores.shape[-2:]
            distance = torch.arange(m)[None] - torch.arange(m - n, m)[:, None]
            scores = scores + self.bias((-distance).clamp(0, 15)).permute(2, 0, 1)
            scores = scores.masked_fill(distance > 0, -1e9)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)), (k, v)


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.attn, self.head = nn.Embedding(20, 16), Attention(16, 4, flag), nn.Linear(16, 20)

    def forward(self, ids, more):
        a, cache = self.attn(self.embed(ids))
        b, _ = self.attn(self.embed(more), cache)
        return torch.cat([self.head(a), self.head(b)], 1)


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    return torch.randint(0, 20, (2, 6)), torch.randint(0, 20, (2, 1))


EXPECT = {
    "where": {"module": "attn", "op": "aten._softmax.default"},
    "accept": ["aten.add.Tensor", "aten.masked_fill.Scalar", "aten.embedding.default"],
    "accept_modules": ["attn.bias"],
    "call": 1,
    "kind": "missing",
    "note": "the first call is right; ops and a module call are missing in the second",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
