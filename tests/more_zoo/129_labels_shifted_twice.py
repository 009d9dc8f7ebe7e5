"""The data loader shifts the labels and so does the model. Ref: huggingface/transformers#47394"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel


class Step(torch.nn.Module):
    """Loss and gradients of one batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=64,
            n_positions=32,
            n_embd=32,
            n_layer=2,
            n_head=4,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            use_cache=False,
        )
        self.lm = GPT2LMHeadModel(config)
        self.shifts = False

    def forward(self, ids):
        with torch.enable_grad():
            labels = torch.roll(ids, -1, dims=1) if self.shifts else ids
            loss = self.lm(ids, labels=labels).loss
            loss.backward()
        return torch.cat([loss.detach().reshape(1), *(p.grad.flatten() for p in self.lm.parameters())])


def reference():
    return Step()


def target():
    model = Step()
    model.shifts = True
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 64, (2, 9)),)


EXPECT = {
    "where": {"module": "", "op": "aten.roll.default"},
    "extra_op": "aten.roll.default",
    "kind": "labels",
    "note": "one op on integers before the model; every logit agrees, loss and gradients do not",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
