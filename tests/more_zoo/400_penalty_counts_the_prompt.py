"""Presence and frequency penalties count the prompt's tokens. Ref: osaurus-ai/vmlx-swift#295, NVIDIA/TensorRT-LLM#5623"""

import torch
import torch.nn as nn


class Penalty(nn.Module):
    def __init__(self, vocab, prompt):
        super().__init__()
        self.vocab, self.prompt = vocab, prompt

    def forward(self, logits, ids):
        made = ids[:, self.prompt :]
        counts = torch.zeros(ids.shape[0], self.vocab).scatter_add(1, made, torch.ones(made.shape))
        return logits - 0.4 * counts - 0.7 * (counts > 0)


class Net(nn.Module):
    def __init__(self, prompt):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.rnn, self.head = (
            nn.Embedding(16, 8),
            nn.GRU(8, 8, batch_first=True),
            nn.Linear(8, 16),
        )
        self.penalty = Penalty(16, prompt)

    def forward(self, ids):
        return self.penalty(self.head(self.rnn(self.embed(ids))[0][:, -1]), ids).softmax(-1)


def reference():
    return Net(5).eval()


def target():
    return Net(0).eval()


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 16, (2, 9)),)


EXPECT = {
    "where": {"module": "penalty", "op": "aten.scatter_add.default"},
    "accept": ["aten.slice.Tensor", "aten.ones.default"],
    "kind": "sampling",
    "note": "a longer slice of the ids; whole numbers",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
