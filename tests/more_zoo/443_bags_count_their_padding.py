"""The mean over a bag of embeddings counts its padding: padding_idx is not passed on. Ref: pytorch/pytorch#49237"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Bags(nn.Module):
    def __init__(self, dim, padding):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(20, dim))
        self.padding = padding

    def forward(self, ids):
        return F.embedding_bag(ids, self.weight, mode="mean", padding_idx=self.padding)


class Net(nn.Module):
    def __init__(self, padding):
        super().__init__()
        torch.manual_seed(0)
        self.bags, self.fc, self.head = Bags(12, padding), nn.Linear(12, 16), nn.Linear(16, 3)

    def forward(self, ids):
        return self.head(F.relu(self.fc(self.bags(ids))))


def reference():
    return Net(0).eval()


def target():
    return Net(None).eval()


def inputs():
    torch.manual_seed(1)
    ids = torch.randint(1, 20, (5, 6))
    ids[1, 3:] = 0
    ids[3, 2:] = 0
    return (ids,)


EXPECT = {
    "where": {"module": "bags", "op": "aten._embedding_bag_forward_only.default"},
    "accept": ["aten._embedding_bag.default"],
    "kind": "argument",
    "note": "one argument; rows of full bags agree",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
