"""Rows are sorted by length inside and put back at the end. Ref: pytorch/pytorch#4927"""

import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.embed, self.gru, self.head = (
            nn.Embedding(30, 12),
            nn.GRU(12, 12, batch_first=True),
            nn.Linear(12, 4),
        )
        self.flag = flag

    def forward(self, ids, lengths):
        if self.flag:
            order = lengths.argsort(descending=True)
            ids, lengths = ids[order], lengths[order]
        x, _ = self.gru(self.embed(ids))
        x = self.head(torch.tanh(x[torch.arange(len(ids)), lengths - 1]))
        return x[order.argsort()] if self.flag else x


def _mk(flag):
    torch.manual_seed(0)
    return Net(flag).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return torch.randint(0, 30, (4, 6)), torch.tensor([3, 6, 2, 5])


EXPECT = {
    "where": None,
    "kind": "benign-permutation",
    "tol": 2e-6,
    "note": "every record between the sort and its inverse has its rows in another order",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
