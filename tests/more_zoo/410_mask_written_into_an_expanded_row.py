"""A mask is expanded, not repeated: what is written for one row is there for all. Ref: pytorch/pytorch#114302, pytorch/pytorch#4664"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Mask(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.flag = flag

    def forward(self, lengths, size):
        row = torch.zeros(1, size)
        mask = row.expand(len(lengths), -1) if self.flag else row.repeat(len(lengths), 1)
        for number, length in enumerate(lengths):
            mask[number, length:] = float("-inf")
        return mask[:, None, None]


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mask, self.qkv, self.head = (
            nn.Embedding(20, 8),
            Mask(flag),
            nn.Linear(8, 24),
            nn.Linear(8, 3),
        )

    def forward(self, ids, *lengths):
        q, k, v = self.qkv(self.embed(ids)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, self.mask(lengths, ids.shape[1]))
        return self.head(out.transpose(1, 2).flatten(2))


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    return torch.randint(0, 20, (3, 6)), 6, 3, 5


EXPECT = {
    "where": {"module": "mask", "op": "aten.fill_.Tensor"},
    "accept": ["aten.fill_.Scalar", "aten.copy_.default", "aten.expand.default", "aten.repeat.default"],
    "kind": "in-place",
    "note": "several rows of a result are one piece of memory",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
