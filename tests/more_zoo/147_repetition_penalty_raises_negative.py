"""The repetition penalty divides negative logits too. Ref: huggingface/transformers#2302, NVIDIA-NeMo/Speech#8194"""

import torch
import torch.nn as nn


class Penalty(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.flag = flag

    def forward(self, logits, seen):
        score = logits.gather(1, seen)
        score = score / 1.3 if self.flag else torch.where(score < 0, score * 1.3, score / 1.3)
        return logits.scatter(1, seen, score)


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.embed, self.head, self.penalty = nn.Embedding(40, 16), nn.Linear(16, 40), Penalty(flag)

    def forward(self, ids):
        probs, ids = [], ids
        for _ in range(3):
            p = self.penalty(self.head(torch.tanh(self.embed(ids)).mean(1)), ids).softmax(-1)
            probs.append(p)
            ids = torch.cat((ids, p.argmax(-1, keepdim=True)), 1)
        return torch.stack(probs)


def _mk(flag):
    torch.manual_seed(0)
    return Net(flag).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 40, (2, 5)),)


EXPECT = {
    "where": {"module": "penalty", "op": "aten.scatter.src"},
    "accept": ["aten.where.self", "aten.div.Tensor", "aten.mul.Tensor", "aten.lt.Scalar"],
    "missing_op": "aten.where.self",
    "call": 0,
    "kind": "sampling",
    "note": "a choice between two branches is absent; sampled tokens may part later",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
