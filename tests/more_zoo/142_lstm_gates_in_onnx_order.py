"""LSTM weights with the gates in ONNX's order (i, o, f, c). Ref: CrispStrobe/CrispASR#106"""

import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.embed, self.lstm, self.head = nn.Linear(6, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)
        if flag:
            for weight in self.lstm.parameters():
                i, f, c, o = weight.data.chunk(4)
                weight.data = torch.cat((i, o, f, c))

    def forward(self, x):
        return self.head(self.lstm(self.embed(x))[0])


def _mk(flag):
    torch.manual_seed(0)
    return Net(flag).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 7, 6),)


EXPECT = {
    "where": {"module": "lstm", "op": None},
    "kind": "weight-order",
    "note": "four parameters hold the right rows in another order; one fused op reads them all",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
