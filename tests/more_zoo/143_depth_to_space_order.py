"""Depth to space takes channels block by block where the model means column by column. Ref: PINTO0309/onnx2tf#91, llvm/torch-mlir#4351"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Up(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.flag = flag

    def forward(self, x):
        b, c, h, w = x.shape
        if self.flag:
            x = x.view(b, 2, 2, c // 4, h, w).permute(0, 3, 4, 1, 5, 2)
        else:
            x = x.view(b, c // 4, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3)
        return x.reshape(b, c // 4, 2 * h, 2 * w)


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.conv, self.up, self.last = (
            nn.Conv2d(3, 16, 3, padding=1),
            Up(flag),
            nn.Conv2d(4, 3, 3, padding=1),
        )

    def forward(self, x):
        return self.last(F.relu(self.up(self.conv(x))))


def _mk(flag):
    torch.manual_seed(0)
    return Net(flag).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(1, 3, 6, 6),)


EXPECT = {
    "where": {"module": "up", "op": "aten.clone.default"},
    "accept": ["aten.permute.default", "aten.view.default", "aten._unsafe_view.default"],
    "kind": "layout",
    "note": "views and one copy; the multiset of values agrees",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
