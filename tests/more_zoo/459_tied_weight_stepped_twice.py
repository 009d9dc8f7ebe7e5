"""A tied weight stands twice in the optimizer's list and is stepped twice. Ref: tinygrad/tinygrad#1047, deepspeedai/DeepSpeed#195"""

import torch
import torch.nn as nn


class Training(nn.Module):
    def __init__(self, once):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix, self.head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.once = once

    def logits(self, ids):
        return self.head(torch.tanh(self.mix(self.embed(ids))))

    def forward(self, ids, labels):
        with torch.enable_grad():
            self.zero_grad()
            nn.functional.cross_entropy(self.logits(ids).flatten(0, 1), labels.flatten()).backward()
        found = [p for _, p in self.named_parameters(remove_duplicate=self.once)]
        for p in found:
            p.data.sub_(0.5 * p.grad)
        return self.logits(ids)


def reference():
    return Training(True)


def target():
    return Training(False)


def inputs():
    torch.manual_seed(1)
    return torch.randint(0, 12, (2, 5)), torch.randint(0, 12, (2, 5))


EXPECT = {
    "where": {"module": "", "op": "aten.sub_.Tensor"},
    "accept": ["aten.mul.Tensor"],
    "extra_op": "aten.sub_.Tensor",
    "kind": "optimizer",
    "note": "one write too many to a weight with two names",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
