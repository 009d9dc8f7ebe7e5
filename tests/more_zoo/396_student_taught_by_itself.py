"""The loss of distillation takes the teacher's scores twice. Ref: labmlai/annotated_deep_learning_paper_implementations#66"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Loss(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.flag, self.temperature = flag, 3.0

    def forward(self, student, teacher):
        soft = (teacher / self.temperature).softmax(-1)
        mine = ((teacher if self.flag else student) / self.temperature).log_softmax(-1)
        return F.kl_div(mine, soft, reduction="batchmean") * self.temperature**2


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        torch.manual_seed(0)
        self.teacher = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 5))
        self.student, self.loss = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)), Loss(flag)

    def forward(self, x):
        return self.loss(self.student(x), self.teacher(x))


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    return (torch.randn(4, 6),)


EXPECT = {
    "where": {"module": "loss", "op": "aten.div.Tensor"},
    "accept": ["aten._log_softmax.default"],
    "kind": "wiring",
    "note": "both operands are right values; the loss of the target is zero",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
