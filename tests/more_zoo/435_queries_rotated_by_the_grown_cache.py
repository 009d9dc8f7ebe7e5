"""The queries of a layer that reads a shared cache rotate by the cache's length, one chunk too far. Ref: ml-explore/mlx-lm#1702"""

import torch
import torch.nn as nn
import torch.nn.functional as F


def rotate(x, offset):
    half = x.shape[-1] // 2
    angles = torch.arange(offset, offset + x.shape[2])[:, None] * 100.0 ** (-torch.arange(half) / half)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


class Reader(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q, self.o = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x, keys, values, offset):
        q = rotate(self.q(x).unflatten(-1, (2, -1)).transpose(1, 2), offset)
        mask = torch.arange(keys.shape[2]) <= torch.arange(keys.shape[2] - x.shape[1], keys.shape[2])[:, None]
        return self.o(F.scaled_dot_product_attention(q, keys, values, mask).transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self, late):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.k, self.v, self.head = (
            nn.Embedding(20, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 20),
        )
        self.readers, self.late = nn.ModuleList(Reader(8) for _ in range(2)), late

    def forward(self, ids):
        keys = values = torch.zeros(ids.shape[0], 2, 0, 4)
        outs = []
        for part in ids.split(4, 1):
            x, offset = self.embed(part), keys.shape[2]
            k, v = (p(x).unflatten(-1, (2, -1)).transpose(1, 2) for p in (self.k, self.v))
            keys, values = torch.cat([keys, rotate(k, offset)], 2), torch.cat([values, v], 2)
            for reader in self.readers:
                x = x + reader(x, keys, values, keys.shape[2] if self.late else offset)
            outs.append(self.head(x))
        return torch.cat(outs, 1)


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 20, (2, 8)),)


EXPECT = {
    "where": {"module": "readers.0", "op": "aten.arange.start"},
    "accept": ["aten.mul.Tensor", "aten.arange.start_step"],
    "call": 0,
    "kind": "argument",
    "note": "a number of Python that the caller hands over; the numbers of a factory",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
