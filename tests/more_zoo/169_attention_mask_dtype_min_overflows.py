"""An additive mask of the smallest float is added twice and becomes -inf, then NaN. Ref: pytorch/pytorch#103749 (family)"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def _mk(**changes):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
        attn_implementation="eager",
        **changes,
    )
    return LlamaForCausalLM(config).eval()


def _masked(fill):
    model = _mk()
    run = model.model.forward

    def forward(input_ids=None, attention_mask=None, **rest):
        length = input_ids.shape[1]
        causal = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)
        padding = torch.zeros(2, 1, 1, length)
        padding[1, ..., :3] = torch.finfo(torch.float32).min
        both = causal + padding
        return run(input_ids=input_ids, attention_mask=both.clamp(min=fill), **rest)

    model.model.forward = forward
    return model


def reference():
    return _masked(torch.finfo(torch.float32).min)


def target():
    return _masked(-float("inf"))


def inputs():
    torch.manual_seed(1)
    return (torch.randint(1, 64, (2, 9)),)


EXPECT = {
    "where": {"module": "model", "op": "aten.clamp.default"},
    "accept": ["aten.add.Tensor"],
    "kind": "nonfinite",
    "note": "the sum of two masks overflows on both sides, one of them clamps; rows of padding attend elsewhere",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
