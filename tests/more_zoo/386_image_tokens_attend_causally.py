"""The mask that lets tokens of one image see each other does not reach attention. Ref: huggingface/transformers#39389"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Mask(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.flag = flag

    def forward(self, types):
        allowed = torch.ones(types.shape[1], types.shape[1]).tril().bool()[None]
        if not self.flag:
            same = types[:, :, None] == types[:, None]
            allowed = allowed | (same & (types > 0)[:, None])
        return torch.zeros(allowed.shape).masked_fill(~allowed, float("-inf"))[:, None]


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, mask):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mask, self.head = nn.Embedding(20, 16), Mask(flag), nn.Linear(16, 20)
        self.layers = nn.ModuleList(Layer(16) for _ in range(2))

    def forward(self, ids, types):
        x, mask = self.embed(ids), self.mask(types)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    return torch.randint(0, 20, (1, 9)), torch.tensor([[0, 0, 1, 1, 1, 0, 2, 2, 0]])


EXPECT = {
    "where": {"module": "mask", "op": "aten.bitwise_not.default"},
    "accept": ["aten.bitwise_or.Tensor", "aten.masked_fill.Scalar", "aten.__or__.Tensor"],
    "kind": "missing",
    "note": "ops are missing; a mask of another batch size that broadcasts",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
