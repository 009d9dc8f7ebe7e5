"""A compiler pass folds a weight that is updated later. Ref: pytorch/pytorch#108863, pytorch/pytorch#156239"""

import torch
import torch.nn as nn


def folding_backend(graph, example_inputs):
    """Keeps the parameters of the first call for good."""
    kept = [x.detach().clone() if isinstance(x, nn.Parameter) else None for x in example_inputs]

    def run(*args):
        return graph.forward(*(a if k is None else k for a, k in zip(args, kept, strict=True)))

    return run


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.fc = nn.Parameter(torch.rand(8) + 0.5), nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.fc(x * self.scale))


class Net(nn.Module):
    """Two calls with an update of a weight between them."""

    def __init__(self, backend):
        super().__init__()
        torch.manual_seed(0)
        self.block, self.head = Block(), nn.Linear(8, 3)
        self.backend = backend

    def forward(self, x):
        block = self.block if self.backend is None else torch.compile(self.block, backend=self.backend)
        first = self.head(block(x))
        self.block.scale.mul_(1.5)
        return torch.cat([first, self.head(block(x))])


def reference():
    return Net(None).eval()


def target():
    torch._dynamo.reset()
    return Net(folding_backend).eval()


def inputs():
    torch.manual_seed(1)
    return (torch.randn(3, 8),)


EXPECT = {
    "where": {"module": "block", "op": None},
    "call": 1,
    "kind": "compiler-bug",
    "note": "the first call is right; a region inside an eager model reads a weight of its own",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
