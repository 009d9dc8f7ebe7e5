"""A checkpoint of parameters alone leaves the running statistics at 0 and 1. Ref: torch/nn#1165, cleinc/bts#90"""

import torch
import torch.nn as nn


def _mk(loaded):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4)
    )
    if loaded:
        for norm in (net[1], net[4]):
            norm.running_mean.uniform_(-0.5, 0.5)
            norm.running_var.uniform_(0.5, 2)
    return net.eval()


def reference():
    return _mk(True)


def target():
    return _mk(False)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 3, 8, 8),)


EXPECT = {
    "where": {"module": "1", "op": "aten.native_batch_norm.default"},
    "accept": ["aten._native_batch_norm_legit_no_training.default", "aten.cudnn_batch_norm.default", None],
    "kind": "weights",
    "note": "buffers, not parameters",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
