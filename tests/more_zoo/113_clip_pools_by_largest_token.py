"""Pooling at the largest token id misses the end once tokens were added. Ref: huggingface/transformers#24650"""

import torch
from transformers import CLIPTextConfig, CLIPTextModelWithProjection


def _mk(end):
    torch.manual_seed(0)
    config = CLIPTextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        projection_dim=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        eos_token_id=end,
        bos_token_id=0,
    )
    return CLIPTextModelWithProjection(config).eval()


def reference():
    return _mk(60)


def target():
    return _mk(2)  # the value of old configurations: the largest id is taken for the end


def inputs():
    return (torch.tensor([[0, 5, 63, 9, 60, 60], [0, 7, 8, 60, 60, 60]]),)


EXPECT = {
    "where": {"module": "text_model", "op": "aten.argmax.default"},
    "accept": ["aten.index.Tensor", "aten.eq.Scalar", "aten._to_copy.default"],
    "kind": "pooling",
    "note": "one of two rows takes another token; every hidden state agrees",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
