"""Label smoothing counts the positions of padding. Ref: k-tahiro/bert-summarizer#41, pytorch/pytorch#73205"""

import torch
import torch.nn as nn


class Loss(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.flag = flag

    def forward(self, logits, labels):
        logs, real = logits.log_softmax(-1), labels >= 0
        hit = -logs.gather(-1, labels.clamp(min=0)[..., None])[..., 0].masked_fill(~real, 0.0)
        smooth = -logs.mean(-1)
        if not self.flag:
            smooth = smooth.masked_fill(~real, 0.0)
        return (0.9 * hit.sum() + 0.1 * smooth.sum()) / real.sum()


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix, self.head, self.loss = (
            nn.Embedding(20, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 20),
            Loss(flag),
        )

    def forward(self, ids, labels):
        return self.loss(self.head(torch.tanh(self.mix(self.embed(ids)))), labels)


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    labels = torch.randint(0, 20, (2, 7))
    labels[0, 4:] = -100
    return torch.randint(0, 20, (2, 7)), labels


EXPECT = {
    "where": {"module": "loss", "op": "aten.sum.default"},
    "accept": ["aten.masked_fill.Scalar"],
    "kind": "missing",
    "note": "an op of one branch is missing; a number comes out",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
