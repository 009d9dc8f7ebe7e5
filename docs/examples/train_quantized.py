"""Trains with fake-quantised linears, then converts them, after torchao's guide to QAT."""

import torch
from torch import nn
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerGroup, quantize_
from torchao.quantization.qat import QATConfig

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
base = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
quantize_(model, QATConfig(base, step="prepare"))

optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
loss_function = nn.MSELoss()
for _ in range(2):
    example, target = torch.randn(4, 64), torch.randn(4, 64)
    optimizer.zero_grad()
    loss_function(model(example), target).backward()
    optimizer.step()

quantize_(model, QATConfig(base, step="convert"))
model.eval()
with torch.no_grad():
    print(f"mean {float(model(torch.ones(1, 64)).mean()):.3f}")
