"""Gradient accumulation averages the micro-batches' mean losses. Ref: unslothai/unsloth-zoo#1023, OpenNMT/OpenNMT-py#2209"""

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
        self.counts = True

    def forward(self, ids, labels):
        total = (labels[:, 1:] != -100).sum()
        with torch.enable_grad():
            for row, wanted in zip(ids.split(1), labels.split(1), strict=True):
                if self.counts:
                    loss = self.lm(row, labels=wanted, num_items_in_batch=total).loss
                else:
                    loss = self.lm(row, labels=wanted).loss / len(ids)
                loss.backward()
        return torch.cat([loss.detach().reshape(1), *(p.grad.flatten() for p in self.lm.parameters())])


def reference():
    return Step()


def target():
    model = Step()
    model.counts = False
    return model


def inputs():
    torch.manual_seed(1)
    ids = torch.randint(1, 64, (2, 9))
    labels = ids.clone()
    labels[1, 3:] = -100
    return ids, labels


EXPECT = {
    "where": {"module": "lm", "op": "aten.nll_loss_forward.default"},
    "accept_modules": [""],
    "accept": ["aten.div.Tensor", "aten.div.Scalar"],
    "call": 0,
    "kind": "loss",
    "note": "another reduction and another divisor, elsewhere; all logits of the first forward agree",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
