"""A fused LSTM against its cell in a loop, and back to front for the other direction. Ref: pytorch/pytorch#3587 (family)"""

import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self, flag):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(30, 12)
        self.lstm = nn.LSTM(12, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 4)
        if flag:
            self.lstm.forward = self.written_out

    def written_out(self, x):
        w, sides = dict(self.lstm.named_parameters()), []
        for end in ("", "_reverse"):
            h = c = x.new_zeros(x.shape[0], 8)
            steps, states = range(x.shape[1]), []
            for t in reversed(steps) if end else steps:
                gates = x[:, t] @ w[f"weight_ih_l0{end}"].T + w[f"bias_ih_l0{end}"]
                gates = gates + h @ w[f"weight_hh_l0{end}"].T + w[f"bias_hh_l0{end}"]
                i, f, g, o = gates.chunk(4, -1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
                states.append(h)
            sides.append(torch.stack(states[::-1] if end else states, 1))
        return torch.cat(sides, -1), None

    def forward(self, ids):
        x, _ = self.lstm(self.embed(ids))
        return self.head(x.amax(1))


def reference():
    return Net(False)


def target():
    return Net(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 30, (3, 7)),)


EXPECT = {
    "where": None,
    "kind": "benign-decomposition",
    "tol": 1e-6,
    "note": "a module of one op against 250 ops, without the states that the fused one returns besides",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
