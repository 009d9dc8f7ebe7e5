"""Running statistics with the other library's momentum (0.99 for 0.01). Ref: pytorch/pytorch#7028 (family), ml-explore/mlx#3817 (family)"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Net(nn.Module):
    """Two training passes, then one in evaluation."""

    def __init__(self, flag):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.bn = nn.BatchNorm2d(6, momentum=0.99 if flag else 0.01)
        self.head = nn.Linear(6, 2)

    def forward(self, batches, x):
        self.bn.train()
        for batch in batches:
            self.bn(self.conv(batch))
        self.bn.eval()
        return self.head(F.relu(self.bn(self.conv(x))).mean((2, 3)))


def _mk(flag):
    torch.manual_seed(0)
    return Net(flag).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return torch.randn(2, 4, 3, 6, 6) * 2 + 1, torch.randn(2, 3, 6, 6)


EXPECT = {
    "where": {"module": "bn", "op": "aten.native_batch_norm.default"},
    "accept": ["aten._native_batch_norm_legit.default"],
    "call": 0,
    "kind": "argument",
    "note": "the training passes return the same values; buffers written in place differ and are read later",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
