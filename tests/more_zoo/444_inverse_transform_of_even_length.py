"""The inverse transform is not told the length: an odd one loses a sample. Ref: thuml/Autoformer#133"""

import torch
import torch.nn as nn


class Correlation(nn.Module):
    def __init__(self, length):
        super().__init__()
        self.length = length

    def forward(self, q, k):
        spectrum = torch.fft.rfft(q, dim=1) * torch.fft.rfft(k, dim=1).conj()
        return torch.fft.irfft(spectrum, n=self.length, dim=1)


class Net(nn.Module):
    def __init__(self, length):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.correlation = Correlation(length)

    def forward(self, x):
        delays = self.correlation(self.q(x), self.k(x)).mean(-1)
        weights, index = delays.topk(3, dim=1)
        weights = weights.softmax(-1)
        v = self.v(x)
        rows = torch.arange(x.shape[1])
        moved = torch.stack(
            [
                v.gather(1, ((rows + d[:, None]) % x.shape[1])[..., None].expand_as(v))
                for d in index.unbind(1)
            ],
            -1,
        )
        return self.out((moved * weights[:, None, None, :]).sum(-1))


def reference():
    return Net(9).eval()


def target():
    return Net(None).eval()


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 9, 8),)


EXPECT = {
    "where": {"module": "correlation", "op": "aten._fft_c2r.default"},
    "kind": "argument",
    "note": "the result has another size, and a choice is made of it",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
