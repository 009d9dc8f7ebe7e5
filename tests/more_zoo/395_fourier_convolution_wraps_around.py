"""A long convolution by FFT without padding is circular. Ref: Rich-Hall/sentinel1Level0DecodingDemo#11, JosephLWalker96/FreeWILLI#3"""

import torch
import torch.nn as nn


class Filter(nn.Module):
    def __init__(self, dim, length, factor):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(dim, length) * 0.3)
        self.skip, self.factor = nn.Parameter(torch.randn(dim)), factor

    def forward(self, x):
        x, length = x.transpose(1, 2), x.shape[1]
        n = self.factor * length
        y = torch.fft.irfft(torch.fft.rfft(x, n=n) * torch.fft.rfft(self.kernel, n=n), n=n)[..., :length]
        return (y + x * self.skip[:, None]).transpose(1, 2)


def _mk(flag):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), Filter(6, 10, 1 if flag else 2), nn.GELU(), nn.Linear(6, 3)).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 10, 5),)


EXPECT = {
    "where": {"module": "1", "op": None},
    "kind": "argument",
    "note": "sizes differ inside, not at the border; complex numbers",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
