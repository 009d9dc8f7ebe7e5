"""The state of earlier chunks decays by one step too few. Ref: syncdoth/RetNet#10 (family), vllm-project/vllm#21783 (family)"""

import torch
import torch.nn as nn


class Retention(nn.Module):
    def __init__(self, dim, chunk, flag):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.chunk, self.first, self.gamma = chunk, 0 if flag else 1, 0.8

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        i = torch.arange(self.chunk)
        inner = (self.gamma ** (i[:, None] - i).clamp(min=0)) * (i[:, None] >= i)
        cross = self.gamma ** (i + self.first)
        state, outs = x.new_zeros(x.shape[0], x.shape[2], x.shape[2]), []
        for a, b, c in zip(
            q.split(self.chunk, 1), k.split(self.chunk, 1), v.split(self.chunk, 1), strict=True
        ):
            outs.append((a @ b.transpose(1, 2) * inner) @ c + (a * cross[:, None]) @ state)
            state = (
                state * self.gamma**self.chunk
                + (b * self.gamma ** (self.chunk - 1 - i)[:, None]).transpose(1, 2) @ c
            )
        return self.o(torch.cat(outs, 1))


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.mix, self.head = (
            nn.Embedding(20, 8),
            nn.LayerNorm(8),
            Retention(8, 4, flag),
            nn.Linear(8, 20),
        )

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + self.mix(self.norm(x)))


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 20, (2, 12)),)


EXPECT = {
    "where": {"module": "mix", "op": "aten.add.Tensor"},
    "accept": ["aten.pow.Scalar"],
    "kind": "argument",
    "note": "an exponent one less; state zero hides it in the first chunk",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
