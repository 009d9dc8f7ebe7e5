"""The feed-forward part runs over chunks of the sequence. Ref: huggingface/transformers#6024"""

import torch
from transformers import BertConfig, BertModel


def _mk(chunk):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        initializer_range=0.1,
        chunk_size_feed_forward=chunk,
    )
    return BertModel(config).eval()


def reference():
    return _mk(0)


def target():
    return _mk(3)


def inputs():
    torch.manual_seed(1)
    return (torch.randint(1, 64, (2, 9)),)


EXPECT = {
    "where": None,
    "kind": "benign-blocking",
    "tol": 5e-6,
    "note": "one call of two modules becomes three with a third of the rows each",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
