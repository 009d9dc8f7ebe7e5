"""An average pool does not count the padding. Ref: microsoft/MMdnn#909, neo-ai/tvm#32"""

import torch
import torch.nn as nn


def _mk(flag):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.AvgPool2d(3, 1, 1, count_include_pad=not flag),
        nn.Conv2d(6, 4, 1),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 3),
    ).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 3, 7, 7),)


EXPECT = {
    "where": {"module": "3", "op": "aten.avg_pool2d.default"},
    "kind": "argument",
    "note": "only the border differs",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
