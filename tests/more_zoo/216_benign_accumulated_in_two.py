"""Two micro-batches whose losses are divided by all tokens give the whole batch's gradient. Ref: karpathy/nanoGPT#206, unslothai/unsloth-zoo#1023"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel


class Step(torch.nn.Module):
    def __init__(self, parts):
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
        self.lm, self.parts = GPT2LMHeadModel(config), parts

    def forward(self, ids):
        with torch.enable_grad():
            for rows in ids.chunk(self.parts):
                self.lm(rows, labels=rows, num_items_in_batch=ids[:, 1:].numel()).loss.backward()
        return torch.cat([p.grad.flatten() for p in self.lm.parameters()])


def reference():
    return Step(1)


def target():
    return Step(2)


def inputs():
    torch.manual_seed(1)
    return (torch.randint(1, 64, (2, 9)),)


EXPECT = {
    "where": None,
    "kind": "benign-accumulation",
    "tol": 1e-6,
    "note": "twice the calls with half the rows, and sums of gradients that the reference has not",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
