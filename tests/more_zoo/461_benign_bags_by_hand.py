"""A bag of weighted embeddings by one op against rows, products and a sum. Ref: pytorch/pytorch#49237 (family), pytorch/pytorch#106374 (family)"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Bags(nn.Module):
    def __init__(self, dim, by_hand):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(20, dim))
        self.by_hand = by_hand

    def forward(self, ids, shares):
        if self.by_hand:
            return (self.weight[ids] * shares[..., None]).sum(1)
        offsets = torch.arange(0, ids.numel(), ids.shape[1])
        return F.embedding_bag(
            ids.flatten(), self.weight, offsets, mode="sum", per_sample_weights=shares.flatten()
        )


class Net(nn.Module):
    def __init__(self, by_hand):
        super().__init__()
        torch.manual_seed(0)
        self.bags, self.head = Bags(12, by_hand), nn.Linear(12, 3)

    def forward(self, ids, shares):
        return self.head(torch.tanh(self.bags(ids, shares)))


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    return torch.randint(0, 20, (5, 6)), torch.rand(5, 6)


EXPECT = {
    "where": None,
    "kind": "rewrite",
    "tol": 1e-5,
    "note": "one op against three, one of which is a gather",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
