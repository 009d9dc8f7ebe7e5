"""The optimizer works on lists of tensors instead of one after the other. Ref: pytorch/pytorch#34765 (family)"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Train(nn.Module):
    def __init__(self, foreach):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 2))
        self.foreach = foreach

    def forward(self, x, y):
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2, foreach=self.foreach)
        losses = []
        with torch.enable_grad():
            for _ in range(3):
                optimizer.zero_grad(set_to_none=not self.foreach)
                loss = F.mse_loss(self.net(x), y)
                loss.backward()
                nn.utils.clip_grad_norm_(self.net.parameters(), 0.5, foreach=self.foreach)
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
    "where": None,
    "kind": "benign-optimizer",
    "tol": 1e-6,
    "note": "ops on lists without results, gradients zeroed in place instead of dropped",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
