"""Quantises the weights of a small network to int8 and measures the error, after torchao's quick start."""

import copy

import torch
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_


class ToyLinearModel(nn.Module):
    def __init__(self, m: int, n: int, k: int) -> None:
        super().__init__()
        self.linear1 = nn.Linear(m, n, bias=False)
        self.linear2 = nn.Linear(n, k, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear2(self.linear1(x))


torch.manual_seed(0)
model = ToyLinearModel(64, 64, 64).eval()
quantized = copy.deepcopy(model)
quantize_(quantized, Int8WeightOnlyConfig())
example = torch.randn(4, 64)
with torch.no_grad():
    expected, found = model(example), quantized(example)
print(f"relative error {float((found - expected).norm() / expected.norm()):.3f}")
