"""A layer that shares another layer's keys and values computes its own. Ref: ml-explore/mlx-lm#1674, ml-explore/mlx-lm#1702"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    def __init__(self, dim, shares):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.shares = shares

    def forward(self, x, shared):
        if self.shares:
            k, v = shared
        else:
            k, v = (p(x).unflatten(-1, (2, -1)).transpose(1, 2) for p in (self.k, self.v))
        q = self.q(x).unflatten(-1, (2, -1)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).flatten(2)), (k, v)


class Net(nn.Module):
    def __init__(self, own):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.layers = nn.ModuleList(Attention(8, i > 1 and not own) for i in range(3))

    def forward(self, ids):
        x, shared = self.embed(ids), None
        for layer in self.layers:
            out, shared = layer(F.layer_norm(x, x.shape[-1:]), shared)
            x = x + out
        return self.head(x)


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 20, (2, 7)),)


EXPECT = {
    "where": {"module": "layers.2", "op": "aten._scaled_dot_product_flash_attention_for_cpu.default"},
    "accept": [None, "aten.linear.default", "aten.addmm.default"],
    "accept_modules": ["layers.2.k", "layers.2.v"],
    "kind": "wiring",
    "note": "modules that only the target calls; the operand should come from another layer",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
