"""A decode step looks its cached blocks up in the first request's table. Ref: gittensor-ai-lab/sparkinfer#289, tanishqkumar/ssd#23 (family)"""

import torch
import torch.nn as nn


class Attention(nn.Module):
    """Keys and values live in blocks of two slots; a table says which blocks are a request's."""

    def __init__(self, forgets):
        super().__init__()
        self.qkv, self.out, self.forgets = nn.Linear(16, 48), nn.Linear(16, 16), forgets
        self.register_buffer("pool", torch.zeros(2, 8, 2, 16), persistent=False)

    def forward(self, x, tables, at):
        q, k, v = self.qkv(x).chunk(3, -1)
        slots = tables.gather(1, at[:, None] // 2)[:, 0], at % 2
        self.pool[0].index_put_(slots, k)
        self.pool[1].index_put_(slots, v)
        read = tables[:1].expand_as(tables) if self.forgets else tables
        keys, values = (pool[read].flatten(1, 2) for pool in self.pool)
        scores = torch.einsum("bd,btd->bt", q, keys) * 0.25
        scores = scores.masked_fill(torch.arange(keys.shape[1]) > at[:, None], float("-inf"))
        return self.out(torch.einsum("bt,btd->bd", scores.softmax(-1), values))


class Net(nn.Module):
    def __init__(self, forgets):
        super().__init__()
        torch.manual_seed(0)
        self.attn, self.fc = Attention(forgets), nn.Linear(16, 16)

    def forward(self, x, tables):
        made = []
        for step in range(x.shape[0]):
            at = torch.full((x.shape[1],), step)
            made.append(torch.tanh(self.fc(x[step] + self.attn(x[step], tables, at))))
        return torch.stack(made)


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    return torch.randn(4, 2, 16), torch.tensor([[5, 2], [1, 6]])


EXPECT = {
    "where": {"module": "attn", "op": "aten.index.Tensor"},
    "call": 0,
    "accept": ["aten.expand.default", "aten.slice.Tensor"],
    "kind": "kv-cache",
    "note": "what is written is right; the second request reads the first one's blocks",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
