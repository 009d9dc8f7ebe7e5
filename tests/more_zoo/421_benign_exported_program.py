"""The exported program of a model against the model. Ref: huggingface/optimum-executorch#230 (family)"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.blocks, self.head = (
            nn.Embedding(20, 16),
            nn.Sequential(Block(16), Block(16)),
            nn.Linear(16, 20),
        )

    def forward(self, ids):
        return self.head(self.blocks(self.embed(ids)))


def reference():
    return Net().eval()


def target():
    return torch.export.export(Net().eval(), inputs()).run_decompositions({}).module()


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 20, (2, 7)),)


EXPECT = {
    "where": None,
    "kind": "export",
    "tol": 1e-5,
    "note": "a graph module whose ops belong to the root",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
