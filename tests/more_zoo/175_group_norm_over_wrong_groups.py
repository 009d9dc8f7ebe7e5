"""Group norm with the number of groups and their size exchanged. Ref: huggingface/transformers#21534 (family)"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 12, 3, padding=1), nn.GroupNorm(3 if flag else 4, 12)
        self.out = nn.Conv1d(12, 4, 3, padding=1)

    def forward(self, x):
        return self.out(F.gelu(self.norm(self.conv(x))))


def _mk(flag):
    torch.manual_seed(0)
    return Net(flag).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 4, 10),)


EXPECT = {
    "where": {"module": "norm", "op": "aten.native_group_norm.default"},
    "kind": "argument",
    "note": "statistics of other shapes are saved besides the result",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
