"""The same codes packed in another order, and unpacked accordingly. Ref: vllm-project/llm-compressor#1613, mit-han-lab/llm-awq#91"""

import torch
import torch.nn as nn


class PackedLinear(nn.Module):
    """Eight columns of four bits in an int32, in a given order."""

    def __init__(self, linear, order):
        super().__init__()
        weight = linear.weight.detach().t()
        self.register_buffer("scale", weight.abs().amax(0) / 7)
        codes = (weight / self.scale).round().add(8).long().view(weight.shape[0], -1, 8)
        self.register_buffer("words", (codes[..., order] << torch.arange(0, 32, 4)).sum(-1).to(torch.int32))
        self.register_buffer("back", torch.tensor(order).argsort())
        self.bias = linear.bias

    def forward(self, x):
        codes = ((self.words[..., None] >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15)[..., self.back]
        return x @ ((codes.flatten(1) - 8) * self.scale) + self.bias


def _mk(order):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.GELU(), PackedLinear(nn.Linear(32, 16), order), nn.Tanh()
    ).eval()


def reference():
    return _mk([0, 1, 2, 3, 4, 5, 6, 7])


def target():
    return _mk([0, 2, 4, 6, 1, 3, 5, 7])


def inputs():
    torch.manual_seed(1)
    return (torch.randn(4, 16),)


EXPECT = {"where": None, "kind": "quant-layout", "tol": 0.0, "note": "two buffers differ and undo each other"}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
