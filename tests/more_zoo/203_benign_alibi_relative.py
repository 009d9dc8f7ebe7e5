"""ALiBi by distance or by position of the key: softmax cannot tell them apart. Ref: mosaicml/examples#307, ml-explore/mlx#343 (family)"""

import torch
from transformers import BloomConfig, BloomForCausalLM
from transformers.models.bloom import modeling_bloom


def _mk():
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4, use_cache=False)
    return BloomForCausalLM(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    run = model.transformer.forward

    def distances(attention_mask, num_heads, dtype):
        batch, length = attention_mask.shape
        at = torch.arange(length)
        slopes = 2.0 ** (-8 * torch.arange(1, num_heads + 1) / num_heads)
        bias = slopes[:, None, None] * (at[None, :] - at[:, None])
        return bias.repeat(batch, 1, 1).to(dtype)

    def forward(*args, **kwargs):
        kept, modeling_bloom.build_alibi_tensor = modeling_bloom.build_alibi_tensor, distances
        try:
            return run(*args, **kwargs)
        finally:
            modeling_bloom.build_alibi_tensor = kept

    model.transformer.forward = forward
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(1, 64, (2, 9)),)


EXPECT = {
    "where": None,
    "kind": "benign-formula",
    "tol": 5e-6,
    "note": "biases and scores differ by a constant in each row, and biases in shape",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
