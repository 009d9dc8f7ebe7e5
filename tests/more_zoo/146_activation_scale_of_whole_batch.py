"""Activations are quantised with one scale for all tokens, not one each. Ref: vllm-project/vllm#20937, pytorch/executorch#22431"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class QLinear(nn.Linear):
    def __init__(self, i, o, flag):
        super().__init__(i, o, bias=False)
        self.flag = flag

    def forward(self, x):
        top = x.abs().amax() if self.flag else x.abs().amax(-1, keepdim=True)
        scale = top / 127
        return F.linear((x / scale).round().clamp(-128, 127) * scale, self.weight)


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(32), QLinear(32, 64, flag), QLinear(64, 8, flag)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x + self.norm(x))))


def _mk(flag):
    torch.manual_seed(0)
    return Net(flag).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    x = torch.randn(6, 32)
    x[0] *= 40
    return (x,)


EXPECT = {
    "where": {"module": "fc1", "op": "aten.amax.default"},
    "accept": ["aten.div.Tensor", "aten.max.default"],
    "kind": "quant-scale-axis",
    "note": "one op reduces all dims; the row that holds the maximum is the same in both",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
