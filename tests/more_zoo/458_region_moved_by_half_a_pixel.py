"""Regions are cut out without the half pixel that their coordinates are off by. Ref: microsoft/onnxruntime#6921, onnx/onnx#3428"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Regions(nn.Module):
    def __init__(self, half):
        super().__init__()
        self.half = half

    def forward(self, x, boxes):
        if self.half:
            boxes = boxes - 0.5
        x0, y0, x1, y1 = boxes.unbind(-1)
        steps = (torch.arange(3) + 0.5) / 3
        xs, ys = x0[:, None] + (x1 - x0)[:, None] * steps, y0[:, None] + (y1 - y0)[:, None] * steps
        size = torch.tensor([x.shape[-1], x.shape[-2]])
        grid = torch.stack((xs[:, None].expand(-1, 3, -1), ys[:, :, None].expand(-1, -1, 3)), -1)
        grid = (2 * grid + 1) / size - 1
        return F.grid_sample(x.expand(len(boxes), -1, -1, -1), grid, align_corners=False)


class Net(nn.Module):
    def __init__(self, half):
        super().__init__()
        torch.manual_seed(0)
        self.features, self.regions, self.head = (
            nn.Conv2d(3, 4, 3, padding=1),
            Regions(half),
            nn.Linear(36, 5),
        )

    def forward(self, x, boxes):
        return self.head(self.regions(F.relu(self.features(x)), boxes).flatten(1))


def reference():
    return Net(True).eval()


def target():
    return Net(False).eval()


def inputs():
    torch.manual_seed(1)
    return torch.randn(1, 3, 12, 12), torch.tensor([[1.0, 2.0, 6.0, 7.0], [3.0, 3.0, 9.5, 5.0]])


EXPECT = {
    "where": {"module": "regions", "op": "aten.unbind.int"},
    "accept": [
        "aten.sub.Tensor",
        "aten.unsqueeze.default",
        "aten.add.Tensor",
        "aten.select.int",
        "aten.rsub.Scalar",
    ],
    "missing_op": "aten.sub.Tensor",
    "kind": "missing-op",
    "note": "an input of the program is used as it is",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
