"""A transposed convolution is written as a convolution of spread inputs, its kernel not turned round. Ref: tenstorrent/tt-metal#15995, google/flax#2577"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Up(nn.ConvTranspose2d):
    def forward(self, x):
        spread = x.new_zeros(*x.shape[:2], 2 * x.shape[2] - 1, 2 * x.shape[3] - 1)
        spread[..., ::2, ::2] = x
        return F.conv2d(F.pad(spread, (2, 2, 2, 2)), self.weight.transpose(0, 1), self.bias)


def _mk(flag):
    torch.manual_seed(0)
    up = (Up if flag else nn.ConvTranspose2d)(6, 4, 3, stride=2)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), up, nn.ReLU(), nn.Flatten(), nn.Linear(484, 3)).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 3, 7, 7),)


EXPECT = {
    "where": {"module": "2", "op": None},
    "kind": "weight-layout",
    "note": "one op of the reference is several of the target",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
