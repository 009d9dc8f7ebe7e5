"""log(softmax(x)) where x underflows: -inf, and an infinite loss. Ref: pytorch/pytorch#795, deeplearning4j/deeplearning4j#785"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Loss(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.flag = flag

    def forward(self, logits, labels):
        logs = torch.log(F.softmax(logits, -1)) if self.flag else F.log_softmax(logits, -1)
        return F.nll_loss(logs, labels)


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 10))
        self.loss = Loss(flag)

    def forward(self, x, labels):
        return self.loss(120 * self.body(x), labels)


def reference():
    return Net(False)


def target():
    return Net(True)


def inputs():
    torch.manual_seed(1)
    return 4 * torch.randn(6, 12), torch.arange(6)


EXPECT = {
    "where": {"module": "loss", "op": "aten.log.default"},
    "accept": ["aten._softmax.default"],
    "kind": "underflow",
    "note": "in exact arithmetic the two programs are one",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
