"""Masked scores of -1e9 instead of the smallest number. Ref: tenstorrent/tt-metal#35817 (family)"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def _mk(**changes):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
        initializer_range=0.2,
        **changes,
    )
    return LlamaForCausalLM(config).eval()


def _masked(fill):
    model = _mk(attn_implementation="eager")
    run = model.model.forward

    def forward(input_ids=None, attention_mask=None, **rest):
        length = input_ids.shape[1]
        mask = torch.full((length, length), fill).triu(1)[None, None]
        return run(input_ids=input_ids, attention_mask=mask, **rest)

    model.model.forward = forward
    return model


def reference():
    return _masked(torch.finfo(torch.float32).min)


def target():
    return _masked(-1e9)


def inputs():
    torch.manual_seed(1)
    return (torch.randint(1, 64, (2, 9)),)


EXPECT = {
    "where": None,
    "kind": "benign-constant",
    "tol": 0,
    "note": "an argument, a constant and half of all scores differ; every probability agrees",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
