"""A relative bias computed once for all layers against once for each. Ref: ml-explore/mlx-examples#1013 (family)"""

import torch
import torch.nn as nn


class Bias(nn.Module):
    def __init__(self, heads, reach):
        super().__init__()
        self.table, self.reach = nn.Embedding(2 * reach + 1, heads), reach

    def forward(self, n):
        relative = (torch.arange(n)[None] - torch.arange(n)[:, None]).clamp(-self.reach, self.reach)
        return self.table(relative + self.reach).permute(2, 0, 1)


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, bias):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(((q @ k.transpose(-1, -2) + bias).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self, each):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.bias, self.head, self.each = nn.Embedding(20, 8), Bias(2, 3), nn.Linear(8, 20), each
        self.layers = nn.ModuleList(Layer(8) for _ in range(3))

    def forward(self, ids):
        x, bias = self.embed(ids), None
        for layer in self.layers:
            bias = self.bias(ids.shape[1]) if self.each or bias is None else bias
            x = layer(x, bias)
        return self.head(x)


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 20, (2, 7)),)


EXPECT = {
    "where": None,
    "kind": "rewrite",
    "tol": 1e-5,
    "note": "a module is called once for each layer",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
