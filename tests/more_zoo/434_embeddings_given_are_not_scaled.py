"""The embedding multiplier is applied to ids only, not to embeddings that are handed in. Ref: vllm-project/vllm#35026"""

import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.embed, self.rnn, self.flag = nn.Embedding(20, 8), nn.GRU(8, 8, batch_first=True), flag

    def forward(self, ids=None, embeds=None):
        if ids is not None:
            embeds = self.embed(ids)
        return self.rnn(embeds if ids is None and self.flag else embeds * 12.0)[0]


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        torch.manual_seed(0)
        self.vision, self.model, self.head = nn.Linear(6, 8), Model(flag), nn.Linear(8, 20)

    def forward(self, ids, image):
        both = torch.cat([self.vision(image), self.model.embed(ids)], 1)
        return self.head(self.model(ids)), self.head(self.model(embeds=both))


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    return torch.randint(0, 20, (2, 5)), torch.randn(2, 3, 6)


EXPECT = {
    "where": {"module": "model", "op": "aten.mul.Tensor"},
    "accept": [None, "aten.gru.input", "aten.transpose.int", "aten.addmm.default", "aten.cat.default"],
    "accept_modules": ["model.rnn"],
    "call": 1,
    "kind": "missing",
    "note": "the first of two outputs is right",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
