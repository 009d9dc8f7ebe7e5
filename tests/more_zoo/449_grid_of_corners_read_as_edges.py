"""A grid whose ends are the centres of corner pixels is read as one of their edges. Ref: kornia/kornia#3945, kornia/kornia#4504"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Warp(nn.Module):
    def __init__(self, corners):
        super().__init__()
        self.corners = corners

    def forward(self, x, flow):
        h, w = x.shape[-2:]
        ys, xs = torch.meshgrid(torch.linspace(-1, 1, h), torch.linspace(-1, 1, w), indexing="ij")
        grid = torch.stack((xs, ys), -1) + flow.permute(0, 2, 3, 1) * 0.2
        return F.grid_sample(x, grid, align_corners=self.corners)


class Net(nn.Module):
    def __init__(self, corners):
        super().__init__()
        torch.manual_seed(0)
        self.features, self.flow = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 2, 3, padding=1)
        self.warp, self.out = Warp(corners), nn.Conv2d(6, 1, 1)

    def forward(self, first, second):
        a, b = self.features(first), self.features(second)
        return self.out(a - self.warp(b, self.flow(a)))


def reference():
    return Net(True).eval()


def target():
    return Net(False).eval()


def inputs():
    torch.manual_seed(1)
    return torch.randn(1, 3, 9, 7), torch.randn(1, 3, 9, 7)


EXPECT = {
    "where": {"module": "warp", "op": "aten.grid_sampler_2d.default"},
    "kind": "argument",
    "note": "one flag; everything is moved by less than a pixel",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
