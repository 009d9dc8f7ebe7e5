"""A chunked scan starts each chunk from zeros. Ref: vllm-project/vllm#23279 (family), ooples/AiDotNet#1514 (family)"""

import torch
import torch.nn as nn


class Scan(nn.Module):
    def __init__(self, dim, flag):
        super().__init__()
        self.decay, self.inp, self.out, self.flag = (
            nn.Linear(dim, dim),
            nn.Linear(dim, dim),
            nn.Linear(dim, dim),
            flag,
        )

    def forward(self, x):
        a, b = torch.sigmoid(self.decay(x)), self.inp(x)
        state, outs = torch.zeros_like(x[:, 0]), []
        for a_chunk, b_chunk in zip(a.split(4, 1), b.split(4, 1), strict=True):
            if self.flag:
                state = torch.zeros_like(state)
            for t in range(a_chunk.shape[1]):
                state = a_chunk[:, t] * state + b_chunk[:, t]
                outs.append(state)
        return self.out(torch.stack(outs, 1))


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.scan, self.head = nn.Embedding(20, 8), Scan(8, flag), nn.Linear(8, 20)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + self.scan(x))


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 20, (2, 10)),)


EXPECT = {
    "where": {"module": "scan", "op": "aten.mul.Tensor"},
    "accept": ["aten.zeros_like.default", "aten.add.Tensor"],
    "kind": "cache-state",
    "note": "the first chunk is right, zeros are",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
