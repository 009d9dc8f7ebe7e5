"""Gradients of the steps before are still there: zero_grad is missing. Ref: pytorch/pytorch#47175, meta-pytorch/torchforge#71"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Train(nn.Module):
    def __init__(self, clear):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
        self.clear = clear

    def forward(self, x, y):
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        losses = []
        with torch.enable_grad():
            for _ in range(3):
                if self.clear:
                    optimizer.zero_grad()
                loss = F.mse_loss(self.net(x), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
        return torch.stack(losses)


def reference():
    return Train(True)


def target():
    return Train(False)


def inputs():
    torch.manual_seed(1)
    return torch.randn(8, 6), torch.randn(8, 2)


EXPECT = {
    "where": {"module": "", "op": "aten.add_.Tensor"},
    "accept": ["aten._foreach_add_.List", None],
    "accept_modules": ["net.0", "net.2"],
    "extra_op": "aten.add_.Tensor",
    "kind": "training",
    "note": "each gradient of the second step is right; it is added to the first step's, where autograd does it",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
