"""A correlation by transforms lacks the conjugate, and is a convolution. Ref: bytedance/jaqmc#114 (family), thuml/Autoformer#133 (family)"""

import torch
import torch.nn as nn


class Correlation(nn.Module):
    def __init__(self, conjugate):
        super().__init__()
        self.conjugate = conjugate

    def forward(self, q, k):
        q, k = torch.fft.fft(q, dim=1), torch.fft.fft(k, dim=1)
        if self.conjugate:
            k = k.conj()
        return torch.fft.ifft(q * k, dim=1).real


class Net(nn.Module):
    def __init__(self, conjugate):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.correlation = Correlation(conjugate)

    def forward(self, x):
        return self.out(self.correlation(self.q(x), self.k(x)))


def reference():
    return Net(True).eval()


def target():
    return Net(False).eval()


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 10, 6),)


EXPECT = {
    "where": {"module": "correlation", "op": "aten.mul.Tensor"},
    "accept": ["aten._conj.default", "aten._fft_c2c.default"],
    "missing_op": "aten._conj.default",
    "kind": "complex",
    "note": "a bit of a view is missing; magnitudes of the spectrum agree",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
