"""Labels of padding are not masked. Ref: 01-ai/Yi#110"""

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
        self.masks = True

    def forward(self, ids, mask):
        with torch.enable_grad():
            labels = ids.masked_fill(mask == 0, -100) if self.masks else ids
            loss = self.lm(ids, attention_mask=mask, labels=labels).loss
            loss.backward()
        return torch.cat([loss.detach().reshape(1), *(p.grad.flatten() for p in self.lm.parameters())])


def reference():
    return Step()


def target():
    model = Step()
    model.masks = False
    return model


def inputs():
    torch.manual_seed(1)
    ids, mask = torch.randint(1, 64, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    ids[1, 5:], mask[1, 5:] = 0, 0
    return ids, mask


EXPECT = {
    "where": {"module": "", "op": "aten.masked_fill.Scalar"},
    "accept_modules": ["lm"],
    "accept": ["aten.constant_pad_nd.default", "aten.nll_loss_forward.default", "aten.eq.Scalar"],
    "missing_op": "aten.masked_fill.Scalar",
    "kind": "labels",
    "note": "two ops on integers are absent before the model, which reads the plain ids instead",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
