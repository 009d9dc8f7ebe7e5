"""Fused attention is not given the scale 1 / layer. Ref: huggingface/transformers#44397"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def _mk(flag):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64,
        n_positions=32,
        n_embd=32,
        n_layer=3,
        n_head=4,
        use_cache=False,
        initializer_range=0.2,
        scale_attn_by_inverse_layer_idx=not flag,
        attn_implementation="sdpa" if flag else "eager",
    )
    return GPT2LMHeadModel(config).eval()


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 64, (2, 9)),)


EXPECT = {
    "where": {"module": "transformer.h.1.attn", "op": None},
    "kind": "argument",
    "note": "a fused op against five; the first layer's scale is 1 and right",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
