"""Bilinear resizing as a product with one matrix for each direction. Ref: openvinotoolkit/openvino.genai#4444 (family)"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Resize(nn.Module):
    def __init__(self, sizes, matrices):
        super().__init__()
        self.sizes, self.matrices = sizes, matrices

    def forward(self, x):
        if not self.matrices:
            return F.interpolate(x, self.sizes, mode="bilinear", align_corners=False)
        for n, dim in zip(self.sizes, (2, 3), strict=True):
            eye = torch.eye(x.shape[dim])[None]
            matrix = F.interpolate(eye, n, mode="linear", align_corners=False)[0]
            x = torch.tensordot(x, matrix, ([dim], [0])).movedim(-1, dim)
        return x


def _mk(flag):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), Resize((10, 7), flag), nn.Conv2d(6, 2, 1)
    ).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 3, 5, 4),)


EXPECT = {
    "where": None,
    "kind": "rewrite",
    "tol": 1e-5,
    "note": "one op against products with matrices made in the run",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
