"""The weight of the commitment loss stands at the codebook's term: equal losses, other gradients. Ref: CompVis/taming-transformers#57, MishaLaskin/vqvae#20"""

import torch
import torch.nn as nn


class Quantiser(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.codes, self.flag = nn.Embedding(8, 6), flag

    def forward(self, z):
        nearest = (z[:, None] - self.codes.weight).pow(2).sum(-1).argmin(-1)
        q = self.codes(nearest)
        commitment, codebook = (q.detach() - z).pow(2).mean(), (q - z.detach()).pow(2).mean()
        loss = commitment + 0.25 * codebook if self.flag else 0.25 * commitment + codebook
        return z + (q - z).detach(), loss


class Train(nn.Module):
    def __init__(self, flag):
        super().__init__()
        torch.manual_seed(0)
        self.encode, self.vq, self.decode = nn.Linear(10, 6), Quantiser(flag), nn.Linear(6, 10)

    def forward(self, x):
        with torch.enable_grad():
            q, loss = self.vq(torch.tanh(self.encode(x)))
            ((self.decode(q) - x).pow(2).mean() + loss).backward()
        return torch.cat([p.grad.flatten() for p in self.parameters()])


def reference():
    return Train(False)


def target():
    return Train(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(5, 10),)


EXPECT = {
    "where": {"module": "vq", "op": "aten.mul.Tensor"},
    "accept": ["aten.add.Tensor", "aten.expand.default", "aten.div.Scalar", "aten.mul.Scalar"],
    "kind": "gradient",
    "note": "both terms have one value, so the forward pass agrees to the last bit of the sum",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
