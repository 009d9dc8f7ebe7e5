"""Codes are unpacked in their interleaved order, zero points in the linear one. Ref: pie-project/pie#491"""

import torch
import torch.nn as nn

ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


class PackedLinear(nn.Module):
    """Eight columns of four bits in an int32, in the order of `ORDER`; scales and zero points of 8 rows."""

    def __init__(self, linear, flag):
        super().__init__()
        weight = linear.weight.detach().t()  # [in, out]
        groups = weight.reshape(-1, 8, weight.shape[1])
        low, high = groups.amin(1), groups.amax(1)
        scale = (high - low) / 15
        zero = (-low / scale).round().clamp(0, 15)
        codes = (groups / scale[:, None] + zero[:, None]).round().clamp(0, 15).reshape(weight.shape)
        self.register_buffer("codes", self._pack(codes.long()))
        self.register_buffer("zeros", self._pack(zero.long()))
        self.register_buffer("scale", scale)
        self.bias, self.flag = linear.bias, flag

    @staticmethod
    def _pack(values):
        values = values.view(values.shape[0], -1, 8)[..., ORDER]
        return (values << torch.arange(0, 32, 4)).sum(-1)

    @staticmethod
    def _unpack(words, order):
        values = (words[..., None] >> torch.arange(0, 32, 4)) & 15
        return values[..., order].flatten(1)

    def forward(self, x):
        back = torch.tensor(ORDER).argsort()
        codes = self._unpack(self.codes, back)
        zeros = self._unpack(self.zeros, torch.arange(8) if self.flag else back)
        rows = codes.shape[0] // zeros.shape[0]
        weight = (codes - zeros.repeat_interleave(rows, 0)) * self.scale.repeat_interleave(rows, 0)
        return x @ weight + self.bias


def _mk(flag):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.GELU(), PackedLinear(nn.Linear(32, 16), flag), nn.Tanh()
    ).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(4, 16),)


EXPECT = {
    "where": {"module": "2", "op": "aten.index.Tensor"},
    "accept": ["aten.arange.default"],
    "kind": "quant-layout",
    "note": "integers in another order inside the unpacking",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
