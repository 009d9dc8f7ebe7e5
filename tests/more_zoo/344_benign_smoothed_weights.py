"""Smoothing divides a norm's weight and bias and multiplies the layer behind it. Ref: mit-han-lab/smoothquant#79, NVIDIA/TensorRT-LLM#215"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Linear(12, 16), nn.LayerNorm(16)
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 12)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(self.norm(self.embed(x)))))


def _mk():
    torch.manual_seed(0)
    model = Net().eval()
    model.norm.weight.data.uniform_(0.5, 1.5)
    model.norm.bias.data.normal_()
    return model


def reference():
    return _mk()


def target():
    model = _mk()
    scales = torch.rand(16) * 3 + 0.5
    model.norm.weight.data /= scales
    model.norm.bias.data /= scales
    model.fc1.weight.data *= scales
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randn(5, 12),)


EXPECT = {
    "where": None,
    "kind": "weights-folded",
    "tol": 1e-5,
    "note": "three weights differ, and a norm's output; the product behind it is the same",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
