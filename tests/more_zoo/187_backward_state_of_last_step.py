"""The backward direction's summary is taken at the last step, where it has seen one token. Ref: yunjey/pytorch-tutorial#149"""

import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(30, 12)
        self.lstm = nn.LSTM(12, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 4)
        self.flag = flag

    def forward(self, ids):
        x, _ = self.lstm(self.embed(ids))
        if self.flag:
            return self.head(x[:, -1])
        return self.head(torch.cat([x[:, -1, :8], x[:, 0, 8:]], -1))


def reference():
    return Net(False)


def target():
    return Net(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 30, (3, 7)),)


EXPECT = {
    "where": {"module": "", "op": "aten.cat.default"},
    "accept": ["aten.select.int", "aten.slice.Tensor", "aten.addmm.default", None],
    "missing_op": "aten.cat.default",
    "kind": "wiring",
    "note": "the caller hands another slice of the right tensor to the right module; half of it is right",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
