"""A transposed convolution's weight is normalised for each output channel, not for each input channel. Ref: NTT123/vietTTS#24 (family)"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Up(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.v, self.g = nn.Parameter(torch.randn(8, 8, 4)), nn.Parameter(torch.rand(8) + 0.5)
        self.bias = nn.Parameter(torch.randn(8))
        self.dim = dim

    def forward(self, x):
        shape = [1, 1, 1]
        shape[self.dim] = 8
        others = [d for d in range(3) if d != self.dim]
        weight = self.v * (self.g.view(shape) / torch.linalg.vector_norm(self.v, dim=others, keepdim=True))
        return F.conv_transpose1d(x, weight, self.bias, stride=2, padding=1)


class Net(nn.Module):
    def __init__(self, dim):
        super().__init__()
        torch.manual_seed(0)
        self.pre, self.up, self.post = nn.Conv1d(3, 8, 3, padding=1), Up(dim), nn.Conv1d(8, 1, 3, padding=1)

    def forward(self, x):
        return torch.tanh(self.post(F.leaky_relu(self.up(self.pre(x)), 0.1)))


def reference():
    return Net(0)


def target():
    return Net(1)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 3, 10),)


EXPECT = {
    "where": {"module": "up", "op": "aten.linalg_vector_norm.default"},
    "accept": ["aten.view.default"],
    "kind": "argument",
    "note": "shapes agree but for where the ones stand",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
