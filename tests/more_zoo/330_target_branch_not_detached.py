"""The target branch should get no gradient. Ref: PatrickHua/SimSiam#39, lightly-ai/lightly#559"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Loss(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.flag = flag

    def forward(self, p, z):
        z = z if self.flag else z.detach()
        return -F.cosine_similarity(p, z, dim=-1).mean()


class Train(nn.Module):
    def __init__(self, flag):
        super().__init__()
        torch.manual_seed(0)
        self.encode, self.predict, self.loss = (
            nn.Sequential(nn.Linear(8, 12), nn.Tanh()),
            nn.Linear(12, 12),
            Loss(flag),
        )

    def forward(self, x, y):
        with torch.enable_grad():
            a, b = self.encode(x), self.encode(y)
            (self.loss(self.predict(a), b) + self.loss(self.predict(b), a)).backward()
        return torch.cat([p.grad.flatten() for p in self.parameters()])


def reference():
    return Train(False)


def target():
    return Train(True)


def inputs():
    torch.manual_seed(1)
    return torch.randn(4, 8), torch.randn(4, 8)


EXPECT = {
    "where": {"module": "loss", "op": None},
    "accept_modules": [""],
    "kind": "gradient",
    "note": "the forward pass agrees; a second path leads back (the sum of both belongs to the root)",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
