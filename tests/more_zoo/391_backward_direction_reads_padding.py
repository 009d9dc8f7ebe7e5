"""A bidirectional LSTM runs over the padding: its backward state is wrong. Ref: pytorch/pytorch#3662, pytorch/pytorch#1811 (family)"""

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Encoder(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.embed, self.flag = nn.Embedding(20, 6), flag
        self.lstm = nn.LSTM(6, 5, batch_first=True, bidirectional=True)

    def forward(self, ids, lengths):
        x = self.embed(ids)
        if self.flag:
            x = self.lstm(x)[0]
        else:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            x = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]
        return x.masked_fill((torch.arange(x.shape[1]) >= lengths[:, None])[..., None], 0.0)


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = Encoder(flag), nn.Linear(10, 3)

    def forward(self, ids, lengths):
        return self.head(self.encoder(ids, lengths))


def reference():
    return Net(False).eval()


def target():
    return Net(True).eval()


def inputs():
    torch.manual_seed(1)
    return torch.randint(0, 20, (3, 6)), torch.tensor([4, 6, 2])


EXPECT = {
    "where": {"module": "encoder.lstm", "op": None},
    "accept_modules": ["encoder"],
    "kind": "masking",
    "note": "the caller hands over another input; one op against a packed one",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
