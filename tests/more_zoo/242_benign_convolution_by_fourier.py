"""A long convolution by Fourier transforms. Ref: HazyResearch/H3#15, pyro-ppl/pyro#2093"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Long(nn.Module):
    def __init__(self, fourier):
        super().__init__()
        self.kernel, self.skip = nn.Parameter(0.2 * torch.randn(8, 48)), nn.Parameter(torch.randn(8))
        self.fourier = fourier

    def forward(self, x):
        n = x.shape[-1]
        if self.fourier:
            y = torch.fft.irfft(torch.fft.rfft(x, n=2 * n) * torch.fft.rfft(self.kernel, n=2 * n), n=2 * n)[
                ..., :n
            ]
        else:
            y = F.conv1d(F.pad(x, (n - 1, 0)), self.kernel.flip(-1)[:, None], groups=8)
        return y + x * self.skip[:, None]


class Net(nn.Module):
    def __init__(self, fourier):
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.long, self.out = nn.Linear(4, 8), Long(fourier), nn.Linear(8, 4)

    def forward(self, x):
        return self.out(F.gelu(self.long(self.inp(x).transpose(1, 2))).transpose(1, 2))


def reference():
    return Net(False)


def target():
    return Net(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 48, 4),)


EXPECT = {
    "where": None,
    "kind": "benign-decomposition",
    "tol": 1e-5,
    "note": "complex values between, of twice the length; rounding spreads over all positions alike",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
