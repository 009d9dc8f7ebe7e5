"""Layers run again in the backward pass. Ref: allenai/OLMo-core#720, pytorch/pytorch#81296"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel


class Step(torch.nn.Module):
    def __init__(self, again):
        super().__init__()
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4, use_cache=False)
        self.lm = GPT2LMHeadModel(config).train()
        if again:
            self.lm.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(self, ids):
        torch.manual_seed(5)
        with torch.enable_grad():
            loss = self.lm(ids, labels=ids).loss
            loss.backward()
        return torch.cat([loss.detach().reshape(1), *(p.grad.flatten() for p in self.lm.parameters())])


def reference():
    return Step(False)


def target():
    return Step(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randint(1, 64, (2, 9)),)


EXPECT = {
    "where": None,
    "kind": "benign-recompute",
    "tol": 1e-6,
    "note": "modules are entered again, dropout included; calls of the forward must not be counted twice",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
