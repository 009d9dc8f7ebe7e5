"""A pipeline runs the batch in halves through stages. Ref: unslothai/unsloth-zoo#1023 (family)"""

import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self, parts):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.parts = nn.Embedding(20, 16), nn.Linear(16, 20), parts
        self.stages = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2)
        )

    def forward(self, ids):
        parts = [self.embed(part) for part in ids.chunk(self.parts)]
        for stage in self.stages:
            parts = [stage(part) for part in parts]
        return torch.cat([self.head(part) for part in parts])


def reference():
    return Net(1).train()


def target():
    return Net(2).train()


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 20, (4, 6)),)


EXPECT = {
    "where": None,
    "kind": "batching",
    "tol": 1e-5,
    "note": "each module is called twice, with half of the rows",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
