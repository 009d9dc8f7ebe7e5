"""The batch holds (unconditional, conditional); the guidance takes it the other way round. Ref: hpcaitech/Open-Sora#843 (family)"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.text, self.fc2 = nn.Linear(8, 16), nn.Embedding(4, 16), nn.Linear(16, 8)

    def forward(self, z, labels):
        return self.fc2(F.silu(self.fc1(z) + self.text(labels)))


class Sampler(nn.Module):
    def __init__(self, flag):
        super().__init__()
        torch.manual_seed(0)
        self.model, self.flag = Denoiser(), flag

    def forward(self, z, labels):
        for _ in range(3):
            first, second = self.model(
                torch.cat([z, z]), torch.cat([torch.zeros_like(labels), labels])
            ).chunk(2)
            base, guided = (second, first) if self.flag else (first, second)
            z = z - 0.2 * (base + 3.0 * (guided - base))
        return z


def reference():
    return Sampler(False).eval()


def target():
    return Sampler(True).eval()


def inputs():
    torch.manual_seed(1)
    return torch.randn(2, 8), torch.tensor([1, 3])


EXPECT = {
    "where": {"module": "", "op": "aten.sub.Tensor"},
    "accept": ["aten.split.Tensor", "aten.add.Tensor"],
    "kind": "wiring",
    "note": "both halves are right in the first step; a difference has the other sign",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
