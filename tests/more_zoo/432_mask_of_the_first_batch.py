"""A mask is kept from the first batch and used for the next one. Ref: NVIDIA/Model-Optimizer#1343 (family), facebookresearch/xformers#655 (family)"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    def __init__(self, dim, keep):
        super().__init__()
        self.qkv, self.out, self.keep, self.mask = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), keep, None

    def forward(self, x, lengths):
        if self.mask is None or not self.keep:
            real = torch.arange(x.shape[1]) < lengths[:, None]
            self.mask = torch.zeros(real.shape).masked_fill(~real, -1e9)[:, None, None]
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, self.mask).transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self, keep):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.attention, self.head = nn.Embedding(20, 8), Attention(8, keep), nn.Linear(8, 3)

    def forward(self, first, one, second, two):
        a = self.head(self.attention(self.embed(first), one).mean(1))
        b = self.head(self.attention(self.embed(second), two).mean(1))
        return torch.cat([a, b])


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    ids = torch.randint(0, 20, (2, 2, 6))
    return ids[0], torch.tensor([6, 3]), ids[1], torch.tensor([2, 5])


EXPECT = {
    "where": {"module": "attention", "op": "aten._scaled_dot_product_flash_attention_for_cpu.default"},
    "accept": [None, "aten.masked_fill.Scalar", "aten.lt.Tensor", "aten.bitwise_not.default"],
    "call": 1,
    "kind": "stale-state",
    "note": "right values of an earlier call; ops are missing in the second",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
