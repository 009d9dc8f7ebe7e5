"""Folding a batch norm scales the weight and not the bias of the convolution. Ref: ultralytics/yolov3#807"""

import torch
import torch.nn as nn


def _mk(flag):
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
    norm.weight.data.uniform_(0.5, 2)
    norm.bias.data.normal_()
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.3, 3)
    if flag:
        scale = norm.weight / (norm.running_var + norm.eps).sqrt()
        conv.weight.data *= scale.detach()[:, None, None, None]
        conv.bias.data += (norm.bias - norm.running_mean * scale).detach()
        norm = nn.Identity()
    return nn.Sequential(
        conv, norm, nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 3)
    ).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 3, 8, 8),)


EXPECT = {
    "where": {"module": "0", "op": "aten.convolution.default"},
    "accept": [None, "aten.native_batch_norm.default", "aten.clone.default"],
    "accept_modules": ["1"],
    "kind": "parameter",
    "note": "the fold is meant, its bias is wrong; the norm is a module that does nothing",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
