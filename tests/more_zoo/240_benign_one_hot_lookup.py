"""Embeddings as products with one-hot rows. Ref: google-research/bert#1065, pytorch/helion#2035"""

import torch
import torch.nn.functional as F
from transformers import AlbertConfig, AlbertModel


def _mk():
    torch.manual_seed(0)
    config = AlbertConfig(
        vocab_size=64,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        initializer_range=0.2,
    )
    return AlbertModel(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    embeddings = model.embeddings
    for table in (embeddings.word_embeddings, embeddings.token_type_embeddings):

        def forward(ids, table=table):
            return F.one_hot(ids, table.num_embeddings).to(table.weight.dtype) @ table.weight

        table.forward = forward
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(1, 64, (2, 9)),)


EXPECT = {
    "where": None,
    "kind": "benign-decomposition",
    "tol": 1e-6,
    "note": "a scatter and a product for a gather; one layer's weights are used three times",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
