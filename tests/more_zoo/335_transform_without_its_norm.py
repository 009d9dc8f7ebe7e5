"""A Fourier layer leaves the transform unscaled where the checkpoint has an orthonormal one. Ref: pyro-ppl/pyro#2093 (family), HazyResearch/H3#15 (family)"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Mix(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.gain, self.norm = nn.Parameter(torch.randn(7, 8, 2)), norm

    def forward(self, x):
        spectrum = torch.fft.rfft(x, dim=1, norm=self.norm)
        spectrum = spectrum / (1 + spectrum.abs())
        return torch.fft.irfft(spectrum * torch.view_as_complex(self.gain), n=x.shape[1], dim=1, norm="ortho")


class Net(nn.Module):
    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.mix, self.fc2 = nn.Linear(5, 8), Mix(norm), nn.Linear(8, 5)

    def forward(self, x):
        h = self.fc1(x)
        return self.fc2(F.gelu(h + self.mix(h)))


def reference():
    return Net("ortho").eval()


def target():
    return Net("backward").eval()


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 12, 5),)


EXPECT = {
    "where": {"module": "mix", "op": "aten._fft_r2c.default"},
    "kind": "argument",
    "note": "complex values; an integer among the arguments",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
