"""Slopes of one geometric sequence where the number of heads is no power of two. Ref: ml-explore/mlx#3071"""

import torch
from transformers import BloomConfig, BloomForCausalLM
from transformers.models.bloom import modeling_bloom


def _mk():
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=64, hidden_size=48, n_layer=2, n_head=6, use_cache=False)
    return BloomForCausalLM(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    run = model.transformer.forward

    def slopes(num_heads, device):
        return torch.pow(torch.tensor(2.0 ** (-8 / num_heads)), torch.arange(1, num_heads + 1))

    def forward(*args, **kwargs):
        kept, modeling_bloom._get_alibi_slopes = modeling_bloom._get_alibi_slopes, slopes
        try:
            return run(*args, **kwargs)
        finally:
            modeling_bloom._get_alibi_slopes = kept

    model.transformer.forward = forward
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 64, (2, 9)),)


EXPECT = {
    "where": {"module": "transformer", "op": "aten.pow.Tensor_Tensor"},
    "accept": [
        "aten.arange.start",
        "aten.full.default",
        "aten.cat.default",
        "aten.mul.Tensor",
        "aten.lift_fresh.default",
    ],
    "kind": "alibi",
    "note": "a constant of the program, made by other ops; the biases differ for each head",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
