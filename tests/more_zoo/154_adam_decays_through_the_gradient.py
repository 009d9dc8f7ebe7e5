"""Weight decay goes through Adam's moments instead of beside them. Ref: anhquan0412/basic_model_scratch#2, pytorch/pytorch#22163"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Train(nn.Module):
    def __init__(self, flag):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
        self.make = torch.optim.Adam if flag else torch.optim.AdamW

    def forward(self, x, y):
        optimizer = self.make(self.net.parameters(), lr=1e-2, weight_decay=0.1)
        losses = []
        with torch.enable_grad():
            for _ in range(3):
                optimizer.zero_grad()
                loss = F.mse_loss(self.net(x), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
        return torch.stack(losses)


def reference():
    return Train(False)


def target():
    return Train(True)


def inputs():
    torch.manual_seed(1)
    return torch.randn(8, 6), torch.randn(8, 2)


EXPECT = {
    "where": {"module": "", "op": "aten.add.Tensor"},
    "accept": ["aten.mul_.Tensor", "aten.lerp_.Scalar", "aten.addcdiv_.default", "aten._foreach_add.List"],
    "kind": "optimizer",
    "note": "the first loss and the first gradients agree; the step is made of other ops on the same weights",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
