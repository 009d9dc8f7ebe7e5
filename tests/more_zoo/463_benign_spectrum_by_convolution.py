"""A spectrum by a strided convolution with sines and cosines, as exporters have it. Ref: pytorch/audio#287 (family), csukuangfj/kaldi-native-fbank#63 (family)"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class Power(nn.Module):
    def __init__(self, by_convolution):
        super().__init__()
        self.register_buffer("window", torch.hann_window(32))
        angle = 2 * math.pi * torch.arange(17)[:, None] * torch.arange(32) / 32
        basis = torch.cat((angle.cos(), -angle.sin())) * self.window
        self.register_buffer("basis", basis[:, None], persistent=False)
        self.by_convolution = by_convolution

    def forward(self, x):
        if self.by_convolution:
            real, imaginary = F.conv1d(x[:, None], self.basis, stride=8).chunk(2, 1)
            return real * real + imaginary * imaginary
        spectrum = torch.stft(x, 32, 8, window=self.window, center=False, return_complex=True)
        return spectrum.abs() ** 2


class Net(nn.Module):
    def __init__(self, by_convolution):
        super().__init__()
        torch.manual_seed(0)
        self.power, self.conv = Power(by_convolution), nn.Conv1d(17, 6, 3)

    def forward(self, x):
        return self.conv((self.power(x) + 1e-3).log()).mean(-1)


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 128),)


EXPECT = {"where": None, "kind": "rewrite", "tol": 1e-4, "note": "complex numbers on one side alone"}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
