"""The last token is looked for at the number of tokens, though padding stands on the left. Ref: huggingface/transformers#46782, huggingface/peft#3620"""

import torch
import torch.nn as nn


class Pool(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.flag = flag

    def forward(self, states, ids):
        real = ids != 0
        last = real.sum(-1) - 1 if self.flag else (torch.arange(ids.shape[1]) * real).argmax(-1)
        return states[torch.arange(ids.shape[0]), last]


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 8)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.pool, self.score = Pool(flag), nn.Linear(8, 3)

    def forward(self, ids):
        return self.score(self.pool(self.rnn(self.embed(ids))[0], ids))


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    ids = torch.randint(1, 20, (3, 7))
    ids[0, :3] = ids[1, :1] = 0
    return (ids,)


EXPECT = {
    "where": {"module": "pool", "op": None},
    "kind": "masking",
    "note": "other integer ops lead to the index; one row is right",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
