"""The tied head is a copy: each half of the gradient updates its own. Ref: paiml/entrenar#314, NVIDIA/Megatron-LM#656"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Train(nn.Module):
    def __init__(self, tied):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20, bias=False)
        self.head.weight.data = self.embed.weight.data.clone()
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids, labels):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        losses = []
        with torch.enable_grad():
            for _ in range(3):
                optimizer.zero_grad()
                loss = F.cross_entropy(self.head(torch.tanh(self.body(self.embed(ids)))), labels)
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
        return torch.stack(losses)


def reference():
    return Train(True)


def target():
    return Train(False)


def inputs():
    torch.manual_seed(1)
    return torch.randint(0, 20, (12,)), torch.randint(0, 20, (12,))


EXPECT = {
    "where": {"module": "", "op": "aten.add.Tensor"},
    "accept": ["aten._foreach_add_.List", "aten.add_.Tensor", None],
    "accept_modules": ["embed", "head"],
    "missing_op": "aten.add.Tensor",
    "kind": "training",
    "note": "the forward pass and both gradients are right; their sum is missing, between the modules",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
