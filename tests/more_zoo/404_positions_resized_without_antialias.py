"""Positions are made smaller without antialiasing. Ref: openvinotoolkit/openvino.genai#4444"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Positions(nn.Module):
    def __init__(self, dim, side, flag):
        super().__init__()
        self.table, self.flag = nn.Parameter(torch.randn(1, dim, side, side)), flag

    def forward(self, height, width):
        resized = F.interpolate(
            self.table, (height, width), mode="bilinear", align_corners=False, antialias=not self.flag
        )
        return resized.flatten(2).transpose(1, 2)


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        torch.manual_seed(0)
        self.patch, self.positions = nn.Conv2d(3, 8, 4, 4), Positions(8, 12, flag)
        self.block, self.head = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        x = self.patch(x)
        height, width = x.shape[2:]
        return self.head(self.block(x.flatten(2).transpose(1, 2) + self.positions(height, width)).mean(1))


def reference():
    return Net(False).train()


def target():
    return Net(True).train()


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 3, 20, 16),)


EXPECT = {
    "where": {"module": "positions", "op": "aten.upsample_bilinear2d.default"},
    "accept": ["aten.upsample_bilinear2d.vec", "aten._upsample_bilinear2d_aa.default"],
    "kind": "argument",
    "note": "one op is replaced by another one of its kind",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
